"""The options of the launchers, one type per file ``conf/launcher/<name>.yaml``, which explains
each option: read, checked, typed."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from benchmarks.specification import SpecError
from benchmarks.specification.reading import validated
from zeropp.types.literals import AT_LEAST_0, AT_LEAST_1

Flag = str | int | float | bool | None
Flags = dict[str, Flag]
GpuFlag = Literal["gpus-per-node", "gres", "gpus-per-task", "none"]

# The flags of sbatch and srun that a point's resources and the suite's bookkeeping decide; neither
# a flag map nor a variable may.
OWNED = {
    *("array", "dependency", "distribution", "kill-on-bad-exit", "parsable", "signal", "wait"),
    *("nodes", "ntasks", "test-only", "clusters"),
    *("chdir", "error", "job-name", "open-mode", "output"),
}
_GPU_FLAGS = {"gpus-per-node", "gpus-per-task", "gpus", "gres"}
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class LauncherOptions:
    """What the options of every launcher have; ``simulate`` and ``replay`` have no others."""

    kind: str
    dry_run: bool = False  # show only what would be done, without writing anything

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    @property
    def variant(self) -> str:
        """The variant of the records that these options give; see ``RunRecord.variant``."""
        return ""


@dataclass(frozen=True, kw_only=True)
class LocalOptions(LauncherOptions):
    """``launcher=local``."""

    kind: Literal["local"] = "local"
    steps: bool = False
    share_gpu: bool = False

    @property
    def variant(self) -> str:
        """``shared GPU`` where ranks share one on purpose, whose times say nothing."""
        return "shared GPU" if self.share_gpu else ""


@dataclass(frozen=True, kw_only=True)
class TraceOptions(LauncherOptions):
    """``launcher=trace``."""

    kind: Literal["trace"] = "trace"
    pipeline_ranks: tuple[int, ...] = (0, -1)


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(LauncherOptions):
    """``launcher=slurm``."""

    kind: Literal["slurm"] = "slurm"
    report_dir: str
    python: str | None = None
    worker_python: str | None = None
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str | int | None] = field(default_factory=dict)
    grace_s: Annotated[int, AT_LEAST_1] = 60
    walltime_safety: Annotated[float, AT_LEAST_0] = 3.0
    gpu_flag: GpuFlag = "gpus-per-node"
    gpu_type: str | None = None
    snapshot: bool = False
    chain: bool = False
    max_running: Annotated[int | None, AT_LEAST_1] = None
    name: str | None = None
    wait: bool = False
    sbatch: Flags = field(default_factory=dict)
    queues: dict[int, Flags] = field(default_factory=dict)
    srun: Flags = field(default_factory=dict)
    report_sbatch: Flags = field(default_factory=dict)

    @property
    def interpreter(self) -> str:
        """The Python of the batch script."""
        return shlex.quote(self.python or sys.executable)

    def sbatch_of(self, num_gpus: int) -> Flags:
        """The flags of sbatch for a point: the general ones, and over them those of its size's
        ``queues``."""
        sizes = [size for size in self.queues if size <= num_gpus]
        return normal(self.sbatch) | normal(self.queues[max(sizes)] if sizes else {})


_TYPES: dict[str, type[LauncherOptions]] = {
    "local": LocalOptions,
    "slurm": SlurmOptions,
    "trace": TraceOptions,
    "replay": LauncherOptions,
    "simulate": LauncherOptions,
}
KINDS = tuple(_TYPES)


def read_launcher_options(values: Mapping[str, Any]) -> LauncherOptions:
    """The options of a configuration's launcher; raises SpecError with one line for a mistake."""
    kind = values.get("kind")
    if kind not in _TYPES:
        raise SpecError(f"launcher.kind={kind!r}: must be one of {', '.join(KINDS)}")
    options = validated(_TYPES[kind], dict(values), "launcher")
    if isinstance(options, SlurmOptions):
        maps = {name: getattr(options, name) for name in ("sbatch", "srun", "report_sbatch")}
        maps |= {f"queues.{size}": flags for size, flags in options.queues.items()}
        for group, flags in maps.items():
            for name, value in flags.items():
                is_tasks = dashed(name) == "ntasks-per-node" and (group, value) != ("sbatch", False)
                if is_tasks or dashed(name) in OWNED:
                    raise SpecError(
                        f"launcher.{group}.{name}: the suite sets this flag from the point"
                    )
                if dashed(name) in _GPU_FLAGS:
                    raise SpecError(
                        f"launcher.{group}.{name}: how GPUs are asked for is launcher.gpu_flag "
                        "(and launcher.gpu_type); their number follows the point"
                    )
            # A job whose limit is within the grace time would end when it begins.
            limit_s = seconds_of(flags.get("time")) if group != "report_sbatch" else None
            if limit_s is not None and limit_s <= options.grace_s:
                raise SpecError(
                    f"launcher.{group}.time={flags['time']}: must be above "
                    f"launcher.grace_s={options.grace_s} s (minutes, HH:MM:SS or D-HH)"
                )
        if not re.fullmatch(r"[\w.+-]*", options.name or ""):
            raise SpecError(f"launcher.name={options.name!r}: use letters, digits, _ . + - alone")
    return options


def seconds_of(limit: Flag) -> float | None:
    """The seconds of a time limit in Slurm's notation, infinite for ``UNLIMITED``; None if it is
    absent or not understood."""
    if limit == "UNLIMITED":
        return math.inf
    parts = None if isinstance(limit, bool) else _TIME.fullmatch(str(limit))
    if parts is None:
        return None
    days, *rest = parts.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is None and len(numbers) < 3:  # MM[:SS], and else [D-]HH[:MM[:SS]]
        numbers = [0, *numbers]
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds


def dashed(name: str) -> str:
    """A flag's name as on a command line."""
    return name.replace("_", "-")


def normal(flags: Flags) -> Flags:
    """Flags with names as on a command line, without those that are null."""
    return {dashed(name): value for name, value in flags.items() if value is not None}


def words(flags: Flags) -> list[str]:
    """The flags as words ``--name=value``; true gives a bare flag, false leaves it out. But
    ``requeue=false`` is ``--no-requeue``, because sites requeue by default."""
    if flags.get("requeue") is False:
        flags = flags | {"no-requeue": True}
    kept = {name: value for name, value in normal(flags).items() if value is not False}
    return [f"--{n}" if value is True else f"--{n}={value}" for n, value in kept.items()]


def sbatch_words(flags: Flags) -> list[str]:
    """The flags as words for ``#SBATCH`` lines, with quotes, because sbatch splits at spaces."""
    quoted = []
    for name, equals, value in (word.partition("=") for word in words(flags)):
        if re.search(r"[^\w@%+=:,./\[\]-]", value):
            value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        quoted.append(f"{name}{equals}{value}")
    return quoted
