"""Assemble an attempt's record from what its ranks wrote.

Called by the local launcher, by the last line of a Slurm script
(``python -m benchmarks.launch.finish DIR``), and for attempts that somebody killed:
the event files alone decide what was measured; the caller adds how the processes ended.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.launch.points import now
from benchmarks.records.rank_events import read_events
from benchmarks.records.record import SCHEMA_VERSION, GateResult, RankRecord, RunRecord, Status
from zeropp.layout import Layout

Events = list[dict[str, Any]]
_FIELDS = {field.name for field in fields(RunRecord)}
_GATE = TypeAdapter(GateResult)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. ``interrupted``: from outside, so that running again may help."""

    status: Status
    reason: str = ""  # one line; empty where the status is ok
    interrupted: bool = False


def finish_attempt(
    directory: Path,
    *,
    ending: Ending | None = None,
    slurm: Mapping[str, Any] | None = None,
    num_ranks: int | None = None,
) -> RunRecord:
    """Write ``record.json`` and return it.

    ``ending`` is what the launcher saw and the ranks could not write (a signal, a time limit);
    where it is None the events decide. ``num_ranks``: how many were started, where not all.
    """
    # Not checked: an attempt of another version of the suite keeps what it measured, too.
    spec = json.loads((directory / "spec.json").read_text())
    spec_id = directory.resolve().parent.name
    header = json.loads((directory / "attempt.json").read_text())
    header = {key: value for key, value in header.items() if key in _FIELDS}
    ranks = {
        int(path.stem.removeprefix("rank_")): read_events(path)
        for path in sorted(directory.glob("rank_*.jsonl"))
    }
    ending = ending or _ending_by_events(num_ranks or spec["num_gpus"], ranks)
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        record_id=f"{spec_id}/{directory.name}",
        spec_id=spec_id,
        spec=spec,
        status=ending.status,
        reason=ending.reason,
        interrupted=ending.interrupted,
        ended_at=now(),
        gate=_gate(ranks),
        losses=[e["loss"] for e in _of_kind(ranks.get(0, []), "warmup", "step")],
        warmup_s=_slowest(ranks, "warmup"),
        step_s=_slowest(ranks, "step"),
        ranks=[_rank_record(rank, events, header) for rank, events in ranks.items()],
        spans=_spans(ranks),
        predicted=_alone(ranks),
        slurm=dict(slurm or {}),
        **header,
    )
    record.write(directory / "record.json")
    return record


def killed(rank: int, number: int) -> Ending:
    """The ending of an attempt of which one rank died by a signal."""
    name = signal.Signals(number).name
    return Ending("failed", f"rank {rank} was killed by signal {number} ({name})", interrupted=True)


def _ending_by_events(num_ranks: int, ranks: Mapping[int, Events]) -> Ending:
    ends = [
        (event["time"], rank, event)
        for rank, events in ranks.items()
        for event in _of_kind(events, "oom", "error", "signal")
    ]
    gate = _gate(ranks)
    if gate is not None and not gate.passed:
        return Ending("failed", _gate_words(gate))
    if ends:
        _, rank, event = min(ends, key=lambda end: (end[2]["event"] != "oom", end[0]))
        if event["event"] == "signal":
            return Ending("preempted", f"rank {rank} left on {event['name']}", interrupted=True)
        text = f"rank {rank}: {event['type']}: {event['message'].splitlines()[0]}"
        return Ending("oom" if event["event"] == "oom" else "failed", text)
    finished = sum(bool(_of_kind(events, "done")) for events in ranks.values())
    if finished == num_ranks:
        return Ending("ok")
    silent = f"{num_ranks - finished} of {num_ranks} ranks ended without a word"
    return Ending("failed", silent, interrupted=True)


def _gate_words(gate: GateResult) -> str:
    """Why a gate did not hold: the worst check, and how many others."""
    failures = gate.failures()
    if not failures:  # written by a version that recorded no single checks
        return (
            f"gate: one step differs from one process by {gate.loss_error:.1e} (loss), "
            f"{gate.grad_norm_error:.1e} (gradient norm), {gate.parameter_error:.1e} (parameters); "
            f"allowed {gate.tolerance:.0e}"
        )
    worst = failures[0]
    what = worst.worst or worst.kind
    others = (
        f"; {len(failures) - 1} more of {len(gate.checks)} checks failed" if failures[1:] else ""
    )
    return (
        f"gate: {what} differs from one process by {worst.error:.1e} in step {worst.step}, "
        f"relative to its own; allowed {worst.limit:.1e}{others}"
    )


def _of_kind(events: Events, *kinds: str) -> Events:
    return [event for event in events if event["event"] in kinds]


def _gate(ranks: Mapping[int, Events]) -> GateResult | None:
    found = _fields(ranks.get(0, []), "gate")
    return _GATE.validate_python(found) if found else None


def _slowest(ranks: Mapping[int, Events], kind: str) -> list[float]:
    """Each step's time on its slowest rank, for the steps that every rank finished."""
    columns = [[e["seconds"] for e in _of_kind(events, kind)] for events in ranks.values()]
    return [max(step) for step in zip(*columns, strict=False)]


def _spans(ranks: Mapping[int, Events]) -> list[list[Any]]:
    found = [event for events in ranks.values() for event in _of_kind(events, "spans")]
    return [row for event in found for row in event["rows"]]


def _alone(ranks: Mapping[int, Events]) -> dict[str, Any]:
    """What ranks without peers did: seconds of each stage's compute actions and of whole steps,
    sums over kernels. Empty where ranks had their peers."""
    found = {rank: events for rank, events in ranks.items() if _of_kind(events, "compute")}
    if not found:
        return {}
    compute = [_of_kind(events, "compute")[-1]["seconds"] for events in found.values()]
    return {
        "ranks": list(found),
        "compute_s": {name: s for of_rank in compute for name, s in of_rank.items()},
        "lone_step_s": [[e["seconds"] for e in _of_kind(v, "lone_step")] for v in found.values()],
        "kernels": [_fields(events, "kernels") for events in found.values()],
    }


def _fields(events: Events, kind: str) -> dict[str, Any]:
    """The last event of a kind without its kind and time."""
    found = _of_kind(events, kind)
    return {k: v for k, v in found[-1].items() if k not in ("event", "time")} if found else {}


def _rank_record(rank: int, events: Events, header: Mapping[str, Any]) -> RankRecord:
    layout = header["plan"].get("layout")
    return RankRecord(
        rank=rank,
        pp_rank=Layout(**layout).coordinates(rank)["pp"] if layout else 0,
        environment=_fields(events, "environment"),
        step_s=[e["seconds"] for e in _of_kind(events, "step")],
        counters=_fields(events, "counters"),
        **_fields(events, "memory"),
    )


def main() -> int:
    """Command line for job scripts; prints the status and why."""
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
    record = finish_attempt(arguments.directory, ending=ending, slurm=arguments.slurm)
    print(f"{record.record_id}: {record.status} {record.reason}".rstrip())
    return 0 if record.status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
