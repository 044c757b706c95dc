"""RunRecord: one attempt at one spec. Append-only JSON, written atomically, never edited."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationError

from benchmarks.specification.reading import adapter
from zeropp.types.literals import MORE_THAN_0
from zeropp.types.timeline import Provenance
from zeropp.types.training import difference

# Records of other schemas are refused. A new field has a default and needs no new number; one that
# is renamed, or whose unit or meaning changes, does.
SCHEMA_VERSION: Final = 1
BLIND = 0.5  # an update whose limit is a larger share of it counts as not compared by the gate

Status = Literal["ok", "oom", "timeout", "failed", "infeasible", "preempted", "lost"]


# JSON has no number that is not finite, so records have null in its place.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Error = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]
Seconds = Annotated[float, MORE_THAN_0]
Moment = Annotated[str, AfterValidator(lambda text: datetime.fromisoformat(text) and text)]


class RecordError(ValueError):
    """A file that is not a readable record; the message names the file and the reason."""


def json_text(value: Any, **options: Any) -> str:
    """JSON that every program reads: null for numbers that are not finite."""
    return json.dumps(_plain(value), allow_nan=False, **options)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return _plain(vars(value)) if is_dataclass(value) else value


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank measured. Bytes are peaks since the moment before its trainer was built, None
    if not measured."""

    rank: int
    pp_rank: int
    environment: dict[str, Any]  # host, device, versions; captured by the rank itself
    step_s: list[Number]  # every timed step, in order
    counters: dict[str, int]
    peak_allocated_bytes: int | None = None  # CUDA allocator
    peak_reserved_bytes: int | None = None  # CUDA allocator
    peak_rss_bytes: int | None = None  # CPU: peak resident set above the start of the run


@dataclass(frozen=True, kw_only=True)
class GateCheck:
    """One kind of quantity that the gate compared, at the step and parameter where its error was
    largest in relation to its limit.

    ``error`` and ``limit`` are relative to the same quantity of one process.
    """

    kind: str  # "mlp.up.weight (sgd)", "loss (sgd)", "all parameters (adamw)"
    worst: str  # the parameter's name; empty if the quantity is no parameter
    step: int  # counted from 1
    error: Error
    limit: Error


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """The relative differences between some steps and the same steps of one process.

    Loss and gradient norm are those of the steps with plain SGD. ``parameter_error`` is that of the
    parameter whose update differs most, among those whose update is larger than rounding.
    """

    passed: bool
    tolerance: float
    loss_error: Error
    grad_norm_error: Error
    parameter_error: Error
    shape: str  # which model was compared ("gpt_tiny", or a reduced one)
    checks: list[GateCheck] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)  # kinds of parameter, and why

    def failures(self) -> list[GateCheck]:
        """The checks that failed, the worst first."""
        beyond = [check for check in self.checks if check.error > check.limit]
        return sorted(beyond, key=lambda check: -check.error / check.limit)

    def words(self) -> str:
        """Why it failed, in one line: the worst check, and how many others failed."""
        worst, *others = self.failures()
        # "3.mlp.up.weight (adamw)": the optimizer is named in the kind
        check = " ".join([worst.worst, *worst.kind.split()[1:]]) if worst.worst else worst.kind
        more = f"; {len(others)} more of {len(self.checks)} checks failed" if others else ""
        return f"gate: {check} {difference(worst.error, worst.step, worst.limit)}{more}"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One attempt, with its raw samples; statistics are computed when it is read."""

    schema_version: Literal[1]
    record_id: str  # spec_id/attempt
    spec_id: str
    spec: dict[str, Any]
    provenance: Provenance
    status: Status
    reason: str  # one line; empty when ok
    started_at: Moment  # ISO 8601, UTC
    ended_at: Moment
    git_sha: str  # of the checkout, as rank 0 read it, or the launcher if no rank started
    git_dirty: bool
    launcher: str
    code_digest: str = ""  # of the suite's files, see environment.Code
    variant: str = ""  # measured with a "shared GPU"
    basis: str = ""  # how a study chose the degrees of all contenders ("best plans"), if one did
    interrupted: bool = False  # ended from outside (signal, lost node), so it will run again
    plan: dict[str, Any] = field(default_factory=dict)  # layout, cuts, schedule, predicted memory
    gate: GateResult | None = None
    losses: list[Number] = field(default_factory=list)  # every step, warm-up included
    grad_norms: list[Number] = field(default_factory=list)  # before clipping
    loss_error: float | None = None  # largest relative distance from one process's; None: too long
    loss_steps: int = 0  # that were compared so; all, if one process had the time
    warmup_s: list[Number] = field(default_factory=list)  # slowest rank, each warm-up step
    step_s: list[Seconds] = field(default_factory=list)  # slowest rank, each timed step
    ranks: list[RankRecord] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)  # Timeline.to_rows of one step
    span_clock: str = ""  # what spans wait for: "compute stream" or "host"
    predicted: dict[str, Any] = field(default_factory=dict)  # results of a simulation or trace
    slurm: dict[str, Any] = field(default_factory=dict)  # job id, nodes, state; else empty
    notes: list[str] = field(default_factory=list)  # what else a reader must know, in lines

    def write(self, path: Path) -> bool:
        """Write the record atomically, so that a reader sees all of it or nothing. Returns False if
        the file exists, since no record is ever overwritten: of two processes that write it at the
        same time, only one succeeds. Every record gets onto disk here. Raises OSError."""
        with _temporary_beside(path, json_text(vars(self), indent=1)) as temporary:
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links
                if path.exists():
                    return False
                temporary.replace(path)
        return True


def now() -> str:
    """Time of day in UTC, ISO 8601, as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_atomically(path: Path, text: str) -> None:
    """Write a file by way of a temporary file beside it, which is renamed. Raises OSError, and
    leaves nothing behind, if the disk is full or read-only."""
    with _temporary_beside(path, text) as temporary:
        temporary.replace(path)


@contextmanager
def _temporary_beside(path: Path, text: str) -> Iterator[Path]:
    """A temporary file beside ``path`` that holds the text; it is deleted afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        yield temporary
    except OSError as error:  # of a full disk, which names no file
        error.filename = error.filename or os.fspath(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path) -> RunRecord:
    """Read one record; raises RecordError, which names the file, if it cannot be read."""
    try:
        return adapter(RunRecord).validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path}: not readable ({error})") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]  # of another schema: its number
        readable = first["type"] != "json_invalid"
        field = (
            ".".join(map(str, first["loc"])) or "no record" if readable else "not readable as JSON"
        )
        value = str(first["input"])[:40]
        raise RecordError(f"{path}: {field}: {first['msg']} (it is {value})") from None


def find_records(roots: Iterable[Path]) -> Iterator[Path]:
    """The sorted paths of all records below the roots; a root may be a record itself."""
    for root in roots:
        yield from [root] if root.is_file() else find_below(root, "record.json")


def find_below(root: Path, name: str) -> list[Path]:
    """The sorted paths of files with a name below a folder, also behind links. A folder that may
    not be read is among them, so that its reader names it.

    Hidden folders are left out, unless a link leads there: locks, attempts that are being made, and
    copies of the checkout, which hold the committed records of other runs.
    """
    paths, seen, starts = list[Path](), set[str](), [os.fspath(root)]

    def closed(error: OSError) -> None:
        if isinstance(error, PermissionError):
            paths.append(Path(error.filename))

    for start in starts:  # links are followed last, as they may lead anywhere
        for place, folders, files in os.walk(start, onerror=closed):
            is_new = (real := os.path.realpath(place)) not in seen
            seen.add(real)
            paths += [Path(place, name)] * (is_new and name in files)
            folders[:] = [folder for folder in folders if is_new and not folder.startswith(".")]
            below = (os.path.join(place, folder) for folder in folders)
            starts += filter(os.path.islink, below)
    return sorted(paths)
