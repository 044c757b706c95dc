"""The fields of a record that come from the events of an attempt's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from benchmarks.launch.frozen import Header
from benchmarks.records.record import GateResult, RankRecord

Events = list[dict[str, Any]]
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
