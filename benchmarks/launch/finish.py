"""Makes the record of an attempt from the event files of its ranks.

It is called by the local launcher, at the end of a Slurm script
(``python -m benchmarks.launch.finish DIR``), and for attempts that were killed. What was measured
comes from the event files only; the caller says how the processes ended. If files are damaged, only
their content is lost, and the record names them.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from benchmarks.launch.frozen import DamagedError, Header, read_frozen_spec, read_header
from benchmarks.launch.owner import release
from benchmarks.records.events import rank_of, read_events
from benchmarks.records.record import (
    SCHEMA_VERSION,
    GateResult,
    RankRecord,
    RecordError,
    RunRecord,
    Status,
    now,
    read_record,
)

# Which code an attempt ran, by its ranks, and whether the launcher had the same code.


Events = list[dict[str, Any]]


def code_fields(header: Header, ranks: Mapping[int, Events]) -> dict[str, Any]:
    """Commit, dirty flag and digest for the record: those of rank 0, or of the launcher if rank 0
    has written none."""
    code = _code(ranks.get(0, []))
    if "digest" not in code:
        return {name: getattr(header, name) for name in ("git_sha", "git_dirty", "code_digest")}
    return {
        "git_sha": str(code.get("sha", "unknown")),
        "git_dirty": bool(code.get("dirty", True)),
        "code_digest": str(code["digest"]),
    }


def code_notes(header: Header, ranks: Mapping[int, Events]) -> list[str]:
    """Notes for the record if the launcher and the ranks, or some of the ranks, did not run the
    same files."""
    digests = {rank: _code(events).get("digest", "") for rank, events in sorted(ranks.items())}
    first = digests.get(0, "")
    notes = []
    if first and header.code_digest and first != header.code_digest:
        notes.append("the suite's files changed between submission and start; the ranks' count")
    others = [str(rank) for rank, digest in digests.items() if digest and digest != first]
    if first and others:
        notes.append(f"other files of the suite than on rank 0 ran on ranks {', '.join(others)}")
    return notes


def _code(events: Events) -> dict[str, Any]:
    found = [event.get("code") for event in events if event.get("event") == "environment"]
    return found[-1] if found and isinstance(found[-1], dict) else {}


# The fields of a record that come from the events of an attempt's ranks.


_GATE = TypeAdapter(GateResult)
_RANK = TypeAdapter(RankRecord)


def measured(ranks: Mapping[int, Events], header: Header) -> dict[str, Any]:
    """The fields of a record that come from the events of the ranks."""
    return {
        "gate": gate_of(ranks),
        "losses": _of_steps(ranks.get(0, []), "loss"),
        "grad_norms": _of_steps(ranks.get(0, []), "grad_norm"),
        "warmup_s": _slowest(ranks, "warmup"),
        "step_s": _slowest(ranks, "step"),
        "ranks": [_rank_record(rank, events, header) for rank, events in ranks.items()],
        "spans": _spans(ranks),
        "span_clock": _span_clock(ranks),
        "predicted": _alone(ranks),
    }


def of_kind(events: Events, *kinds: str) -> Events:
    """The events of these kinds, in their order."""
    return [event for event in events if event["event"] in kinds]


def gate_of(ranks: Mapping[int, Events]) -> GateResult | None:
    """The result of the gate; None if there is none, or if it cannot be read."""
    found = _fields(ranks.get(0, []), "gate")
    try:
        return _GATE.validate_python(found) if found else None
    except ValidationError:  # a damaged line, or one of another version
        return None


def _of_steps(events: Events, name: str) -> list[float]:
    return [e[name] for e in of_kind(events, "warmup", "step") if name in e]


def _slowest(ranks: Mapping[int, Events], kind: str) -> list[float]:
    """The time of each step on its slowest rank, for steps that all ranks finished."""
    columns = [{e["index"]: e["seconds"] for e in of_kind(r, kind)} for r in ranks.values()]
    if not columns:
        return []
    whole = set(columns[0]).intersection(*columns[1:])
    return [max(column[index] for column in columns) for index in sorted(whole)]


def _spans(ranks: Mapping[int, Events]) -> list[list[Any]]:
    found = [event for events in ranks.values() for event in of_kind(events, "spans")]
    return [row for event in found for row in event["rows"]]


def _span_clock(ranks: Mapping[int, Events]) -> str:
    found = [event for events in ranks.values() for event in of_kind(events, "spans")]
    return str(found[0].get("clock", "")) if found else ""


def _alone(ranks: Mapping[int, Events]) -> dict[str, Any]:
    """The results of ranks that ran without peers: seconds of each stage's compute actions and of
    whole steps, and sums over kernels. Empty if ranks had their peers."""
    found = {rank: events for rank, events in ranks.items() if of_kind(events, "compute")}
    if not found:
        return {}
    compute = [of_kind(events, "compute")[-1]["seconds"] for events in found.values()]
    return {
        "ranks": list(found),
        "compute_s": {name: s for of_rank in compute for name, s in of_rank.items()},
        "lone_step_s": [[e["seconds"] for e in of_kind(v, "lone_step")] for v in found.values()],
        "kernels": [_fields(events, "kernels") for events in found.values()],
    }


def _fields(events: Events, kind: str) -> dict[str, Any]:
    """The fields of the last event of a kind, without its kind and time."""
    found = of_kind(events, kind)
    return {k: v for k, v in found[-1].items() if k not in ("event", "time")} if found else {}


def _rank_record(rank: int, events: Events, header: Header) -> RankRecord:
    seen = {
        "rank": rank,
        "pp_rank": header.pp_rank(rank),
        "environment": _fields(events, "environment"),
        "step_s": [e["seconds"] for e in of_kind(events, "step")],
        "counters": _fields(events, "counters"),
    }
    try:
        return _RANK.validate_python(seen | _fields(events, "memory"))
    except ValidationError:  # a damaged event of memory or counters
        return _RANK.validate_python(seen | {"counters": {}})


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. ``interrupted`` means from outside, so that it is worth running
    again."""

    status: Status
    reason: str = ""  # one line; empty if the status is ok
    interrupted: bool = False


def finish_attempt(
    directory: Path,
    *,
    ending: Ending | None = None,
    slurm: Mapping[str, Any] | None = None,
    num_ranks: int | None = None,
) -> RunRecord:
    """Write ``record.json`` and return the record.

    ``ending`` is what the launcher saw and the ranks could not write (a signal, a time limit); if
    it is None, the events say how the attempt ended. ``num_ranks`` is the number of ranks that were
    started, if these were not all. If the attempt already has a record, that one stays, and this
    one is written beside it as ``record-late.json``. Raises DamagedError if no copy of the spec is
    left, and OSError if the record cannot be written.
    """
    return _write(assemble(directory, ending=ending, slurm=slurm, num_ranks=num_ranks), directory)


def assemble(
    directory: Path,
    *,
    ending: Ending | None = None,
    slurm: Mapping[str, Any] | None = None,
    num_ranks: int | None = None,
) -> RunRecord:
    """The record of an attempt, without writing it; see ``finish_attempt``."""
    spec, header = read_frozen_spec(directory), read_header(directory)
    ranks = read_ranks(directory)
    ending = ending or ending_by_events(num_ranks or spec["num_gpus"], ranks)
    spec_id = directory.resolve().parent.name
    return RunRecord(
        schema_version=SCHEMA_VERSION,
        record_id=f"{spec_id}/{directory.name}",
        spec_id=spec_id,
        spec=spec,
        status=ending.status,
        reason=ending.reason,
        interrupted=ending.interrupted,
        ended_at=now(),
        slurm=dict(slurm or {}),
        notes=[*filter(None, [header.damage]), *code_notes(header, ranks)],
        **header.fields | code_fields(header, ranks),
        **measured(ranks, header),
    )


def read_ranks(directory: Path) -> dict[int, Events]:
    """The complete events of every rank that wrote a file, by rank."""
    numbered = ((rank_of(path), path) for path in sorted(directory.glob("rank_*.jsonl")))
    return {rank: read_events(path) for rank, path in numbered if rank is not None}


def _write(record: RunRecord, directory: Path) -> RunRecord:
    try:
        record.write(directory / "record.json")
    except FileExistsError:
        record = replace(
            record,
            record_id=f"{record.record_id}/late",
            notes=[*record.notes, f"closed before its end as {_closed_as(directory)}"],
        )
        record.write(directory / "record-late.json")
    release(directory)
    return record


def close_for_another(
    directory: Path, ending: Ending | None, slurm: Mapping[str, Any] | None = None
) -> RunRecord | None:
    """Write the record of an attempt whose own process can no longer do it; returns None if the
    attempt has got a record meanwhile.

    Raises DamagedError and OSError as ``finish_attempt`` does.
    """
    record = assemble(directory, ending=ending, slurm=slurm)
    try:
        record.write(directory / "record.json")
    except FileExistsError:
        return None
    return record


def _closed_as(directory: Path) -> str:
    try:
        closed = read_record(directory / "record.json")
    except RecordError as error:
        return f"what cannot be read ({error})"
    return f"{closed.status}: {closed.reason}"


def killed(rank: int, number: int) -> Ending:
    """The ending of an attempt in which a signal killed one rank."""
    name = signal.Signals(number).name
    return Ending("failed", f"rank {rank} was killed by signal {number} ({name})", interrupted=True)


def ending_by_events(num_ranks: int, ranks: Mapping[int, Events]) -> Ending:
    """How the attempt ended, by the events of its ranks."""
    ends = [
        (event["time"], rank, event)
        for rank, events in ranks.items()
        for event in of_kind(events, "oom", "error", "signal")
    ]
    gate = gate_of(ranks)
    if gate is not None and not gate.passed:
        return Ending("failed", _gate_words(gate))
    if ends:
        _, rank, event = min(ends, key=lambda end: (end[2]["event"] != "oom", end[0]))
        if event["event"] == "signal":
            return Ending("failed", f"rank {rank} left on {event['name']}", interrupted=True)
        return Ending("oom" if event["event"] == "oom" else "failed", _raised(rank, event))
    finished = sum(bool(of_kind(events, "done")) for events in ranks.values())
    if finished == num_ranks:
        return Ending("ok")
    silent = f"{num_ranks - finished} of {num_ranks} ranks ended without saying why"
    return Ending("failed", silent, interrupted=True)


def _raised(rank: int, event: Mapping[str, Any]) -> str:
    """A line about a rank's exception, which may have no message (``assert``, ``MemoryError``)."""
    lines = [line for line in event["message"].splitlines() if line.strip()]
    return ": ".join([f"rank {rank}", event["type"], *lines[:1]])


def _gate_words(gate: GateResult) -> str:
    """Why a gate failed: the worst check, and how many others failed."""
    failures = gate.failures()
    if not failures:  # the record is of a version without single checks
        return (
            f"gate: one step differs from one process by {gate.loss_error:.1e} (loss), "
            f"{gate.grad_norm_error:.1e} (gradient norm), {gate.parameter_error:.1e} (parameters); "
            f"allowed {gate.tolerance:.0e}"
        )
    worst = failures[0]
    # "3.mlp.up.weight (adamw)": the optimizer is named in the kind
    what = " ".join([worst.worst, *worst.kind.split()[1:]]) if worst.worst else worst.kind
    others = (
        f"; {len(failures) - 1} more of {len(gate.checks)} checks failed" if failures[1:] else ""
    )
    return (
        f"gate: {what} differs from one process by {worst.error:.1e} in step {worst.step}, "
        f"relative to its own; allowed {worst.limit:.1e}{others}"
    )


def main() -> int:
    """The command line for job scripts; prints the status and the reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--status", help="what the caller saw, e.g. timeout")
    parser.add_argument("--reason", default="", help="one line for --status")
    parser.add_argument("--slurm", type=json.loads, default={}, help="JSON to keep with the record")
    parser.add_argument("--interrupted", action="store_true", help="it ended from outside")
    arguments = parser.parse_args()
    ending = None
    if arguments.status:
        ending = Ending(arguments.status, arguments.reason, arguments.interrupted)
    try:
        record = finish_attempt(arguments.directory, ending=ending, slurm=arguments.slurm)
    except (DamagedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{record.record_id}: {record.status} {record.reason}".rstrip())
    return 0 if record.status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
