"""The options of ``launcher=slurm``: read from ``conf/launcher/slurm.yaml``, checked, typed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console

from benchmarks.launch.slurm.client import OWNED
from benchmarks.specification.run_spec import SpecError, validated

Flag = str | int | float | bool | None
Flags = dict[str, Flag]
GpuFlag = Literal["gpus-per-node", "gres", "gpus-per-task", "none"]

_GPU_FLAGS = {"gpus-per-node", "gpus-per-task", "gpus"}
_GRES = re.compile(r"gpu(?::(?P<type>[^:,=]*[^:,=\d][^:,=]*))?(?::\d+)?")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The options of ``conf/launcher/slurm.yaml``, which explains each; they are checked."""

    kind: str
    report_dir: str
    dry_run: bool = False
    python: str | None = None
    worker_python: str | None = None
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str | int | None] = field(default_factory=dict)
    grace_s: int = 60
    walltime_safety: float = 3.0
    gpu_flag: GpuFlag = "gpus-per-node"
    gpu_type: str | None = None
    snapshot: bool = False
    chain: bool = False
    max_running: int | None = None
    sbatch: Flags = field(default_factory=dict)
    queues: dict[int, Flags] = field(default_factory=dict)
    srun: Flags = field(default_factory=dict)
    report_sbatch: Flags = field(default_factory=dict)

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    variant = ""  # every record of this launcher is of one kind

    @property
    def interpreter(self) -> str:
        """The Python of the batch script."""
        return shlex.quote(self.python or sys.executable)

    @property
    def worker_interpreter(self) -> str:
        """The Python of the ranks."""
        return shlex.quote(self.worker_python) if self.worker_python else self.interpreter

    def sbatch_of(self, num_gpus: int) -> Flags:
        """The flags of sbatch for a point: the general ones, and over them those of its size's
        ``queues``."""
        sizes = [size for size in self.queues if size <= num_gpus]
        queue = self.queues[max(sizes)] if sizes else {}
        return normal(self.sbatch) | normal(queue)


def read_options(values: Mapping[str, Any]) -> SlurmOptions:
    """The checked options of the launcher; raises SpecError with one line for a mistake."""
    options = validated(SlurmOptions, _with_gpu_flag(values), "launcher")
    for group, flags in _flag_maps(options).items():
        for name in flags:
            if dashed(name) in OWNED:
                raise SpecError(f"launcher.{group}.{name}: the suite sets this flag from the point")
            if dashed(name) in _GPU_FLAGS:
                raise SpecError(
                    f"launcher.{group}.{name}: how GPUs are asked for is launcher.gpu_flag "
                    "(and launcher.gpu_type); their number follows the point"
                )
    for name, least in (("grace_s", 1), ("max_running", 1), ("walltime_safety", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise SpecError(f"launcher.{name}={value}: must be at least {least}")
    _check_times(options)
    return options


def _flag_maps(options: SlurmOptions) -> dict[str, Flags]:
    maps = {name: getattr(options, name) for name in ("sbatch", "srun", "report_sbatch")}
    return maps | {f"queues.{size}": flags for size, flags in options.queues.items()}


def _check_times(options: SlurmOptions) -> None:
    """Raise SpecError for a time limit that is not above the grace time, since such a job would end
    when it begins."""
    for group, flags in _flag_maps(options).items():
        limit_s = seconds_of(flags.get("time")) if group != "report_sbatch" else None
        if limit_s is not None and limit_s <= options.grace_s:
            raise SpecError(
                f"launcher.{group}.time={flags['time']}: must be above "
                f"launcher.grace_s={options.grace_s} s (minutes, HH:MM:SS or D-HH)"
            )


def seconds_of(limit: Flag) -> float | None:
    """The seconds of a time limit in Slurm's notation; None if it is absent or not understood."""
    if isinstance(limit, bool) or limit is None:
        return None
    found = _TIME.fullmatch(str(limit))
    if found is None:
        return None
    days, *rest = found.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # MM[:SS]
        hours, minutes, seconds = 0, *[*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds


def _with_gpu_flag(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options with ``gpu_flag`` in the place of flags that older command lines set by hand:
    ``sbatch.gpus-per-node=false`` and ``sbatch.gres=gpu:h100:8``. Says so in one line."""
    result = dict(values)
    sbatch = result.get("sbatch")
    if not isinstance(sbatch, Mapping):
        return result
    flags = {dashed(str(name)): name for name in sbatch}
    found: dict[str, Any] = {}
    gres = _GRES.fullmatch(str(sbatch.get(flags.get("gres", "gres"))))
    if gres:
        found = {"gpu_flag": "gres", "gpu_type": gres["type"]}
    elif "gpus-per-node" in flags and sbatch[flags["gpus-per-node"]] is False:
        found = {"gpu_flag": "none"}
    if found:
        said = " ".join(f"launcher.{name}={value}" for name, value in found.items() if value)
        Console(stderr=True).print(f"launcher.sbatch: read as {said}, its new name", markup=False)
        gone = {flags.get("gpus-per-node"), flags.get("gres") if gres else None}
        result["sbatch"] = {name: value for name, value in sbatch.items() if name not in gone}
    return result | found


def dashed(name: str) -> str:
    """A flag's name as on a command line."""
    return name.replace("_", "-")


def normal(flags: Flags) -> Flags:
    """Flags with names as on a command line, without those that are null."""
    return {dashed(name): value for name, value in flags.items() if value is not None}


def words(flags: Flags) -> list[str]:
    """The flags as words ``--name=value``; true gives a bare flag, false leaves it out."""
    kept = {name: value for name, value in normal(flags).items() if value is not False}
    return [f"--{n}" if value is True else f"--{n}={value}" for n, value in kept.items()]


def sbatch_words(flags: Flags) -> list[str]:
    """The flags as words for ``#SBATCH`` lines, with quotes, because sbatch splits at spaces."""
    return [_quoted(word) for word in words(flags)]


def _quoted(word: str) -> str:
    name, equals, value = word.partition("=")
    if not re.search(r"[^\w@%+=:,./\[\]-]", value):
        return word
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'
