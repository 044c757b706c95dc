"""The options of the launchers, one type per file ``conf/launcher/<name>.yaml``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from benchmarks.launch.points import PROVENANCE
from benchmarks.launch.slurm.options import read_options as read_slurm_options
from benchmarks.specification.run_spec import SpecError, validated

_STRICT = {"extra": "forbid"}


class LauncherOptions(Protocol):
    """What the options of every launcher have."""

    @property
    def kind(self) -> str:
        """The launcher's name."""
        ...

    @property
    def variant(self) -> str:
        """The variant of the records that these options give; see ``RunRecord.variant``."""
        ...

    @property
    def dry_run(self) -> bool:
        """Whether to show only what would be done, without writing anything."""
        ...


@dataclass(frozen=True)
class LocalOptions:
    """``conf/launcher/local.yaml``; each field is explained there."""

    kind: Literal["local"] = "local"
    steps: bool = False
    variant = ""
    dry_run = False

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class SimulateOptions:
    """The options of ``conf/launcher/simulate.yaml``, which explains each."""

    kind: Literal["simulate"] = "simulate"
    compute: Literal["model", "traced"] = "model"
    traced_runs: str = ""
    dry_run = False

    __pydantic_config__ = _STRICT

    @property
    def variant(self) -> str:
        """``traced compute`` if compute times are traced ones, since numbers differ then."""
        return "traced compute" if self.compute == "traced" else ""


@dataclass(frozen=True)
class TraceOptions:
    """The options of ``conf/launcher/trace.yaml``, which explains each."""

    kind: Literal["trace"] = "trace"
    pipeline_ranks: tuple[int, ...] = (0, -1)
    tensors: Literal["fake", "real"] = "fake"
    dry_run = False

    __pydantic_config__ = _STRICT

    @property
    def variant(self) -> str:
        """``real tensors`` if tensors are real, since numbers differ then."""
        return "real tensors" if self.tensors == "real" else ""


_READERS: dict[str, Callable[[Mapping[str, Any]], LauncherOptions]] = {
    "local": lambda values: validated(LocalOptions, dict(values), "launcher"),
    "simulate": lambda values: validated(SimulateOptions, dict(values), "launcher"),
    "trace": lambda values: validated(TraceOptions, dict(values), "launcher"),
    "slurm": read_slurm_options,
}


def read_launcher_options(values: Mapping[str, Any]) -> LauncherOptions:
    """The options of a configuration's launcher; raises SpecError with one line for a mistake."""
    kind = values.get("kind")
    if kind not in _READERS:
        raise SpecError(f"launcher.kind={kind!r}: must be one of {', '.join(PROVENANCE)}")
    return _READERS[kind](values)
