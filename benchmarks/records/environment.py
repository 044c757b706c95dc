"""The code that a process ran and the machine that it ran on, captured by the process itself."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import CHECKOUT

_PACKAGES = (
    *("torch", "deepspeed", "megatron-core", "transformer-engine", "numpy", "triton"),
    *("transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
_CODE = (  # what takes part in a run: a spec has its own copy of what else is in conf
    *((f"benchmarks/{room}", "*.py") for room in ("launch", "records", "specification", "worker")),
    *(("baselines", "*.py"), ("zeropp", "*.py"), ("conf/program", "*.yaml"), ("conf", "*.csv")),
)
_OF_GIT_ITSELF = ("GIT_CONFIG_", "GIT_EXEC_PATH", "GIT_DISCOVERY_ACROSS_FILESYSTEM")
_VARIABLES = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "TORCH_NCCL_", "PYTORCH_"),
    *("OMP_", "MKL_", "KMP_AFFINITY", "LD_PRELOAD", "MALLOC_", "GLOO_SOCKET_IFNAME", "UCX_", "FI_"),
)


def capture_environment() -> dict[str, Any]:
    """Host, processor, memory, devices, versions, and the environment variables that change
    performance."""
    from importlib import metadata

    import psutil  # for ranks only, as is importlib.metadata

    versions = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "cpu": _cpu_name(),
        "cpu_count": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 2),
        "versions": versions,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        **_cuda(),
    }


@dataclass(frozen=True)
class Code:
    """The checkout at one moment. ``digest`` is a hash of the files that take part in a run,
    whether git knows them or not: checkouts with equal digests run the same code. ``sha``
    is empty if git was not asked."""

    sha: str
    dirty: bool
    digest: str


def read_code(*, ask_git: bool = True) -> Code:
    """Read the checkout. ``ask_git=False`` saves two processes; all ranks but the first use it."""
    sha, dirty = git_state() if ask_git else ("", False)
    total = hashlib.sha256()
    for folder, pattern in _CODE:
        for path in sorted((CHECKOUT / folder).rglob(pattern)):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(CHECKOUT)} {content}\n".encode())
    return Code(sha, dirty, total.hexdigest()[:16])


def git_state() -> tuple[str, bool]:
    """Commit of the checkout and whether its files differ from it: tracked ones, or files of the
    suite that git does not have. ("unknown", True) where git cannot say, and where the files only
    lie inside another repository, whose commit says nothing about them."""
    top, sha = _git("rev-parse", "--show-toplevel"), _git("rev-parse", "HEAD")
    if not top or not sha or Path(top).resolve() != CHECKOUT.resolve():
        return "unknown", True
    changed = _git("status", "--porcelain", "--untracked-files=no")
    added = _git("ls-files", "--others", "--", *(f"{folder}/{files}" for folder, files in _CODE))
    return sha, changed != "" or added != ""


def _git(*arguments: str) -> str | None:
    """What git says about the checkout; None if it fails. Variables such as GIT_DIR, which a hook
    sets, could name another repository; those that configure git itself are kept, because they may
    allow it to read a checkout of another user (``safe.directory``)."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_OF_GIT_ITSELF)
    }
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(CHECKOUT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env=variables,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


def _cuda() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "device_memory_gib": round(properties.total_memory / 2**30, 2),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
