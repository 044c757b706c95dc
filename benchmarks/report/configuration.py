"""A record's configuration: as short text, as knobs, and with the source of its numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import PLAIN_KNOBS, RecordedSpec, default_knobs

# Knobs that the text shows in a special form.
_NAMED = {"name", "tp", "pp", "chunks", "shard", "replicate", "replicate_zero", "unit"}
_NAMED |= {"schedule", "recompute", "sequence_parallel", "compile"}
# Knobs that a tuner sets. If all of them are the contender's defaults, nobody has tuned it.
_DEGREES: tuple[str, ...] = ("pp", "tp", "shard", "replicate", "replicate_zero", "chunks", "unit")
_DEGREES += ("activation_cap", "activation_cap_gib", "schedule", "sequence_parallel", "recompute")


def configuration_text(record: RunRecord, spec: RecordedSpec) -> str:
    """Degrees above 1 and the knobs that were set, in short form, such as ``PP2 V2 ZeRO-3x2 U4``.

    A unit that the planner cut also shows what was asked for, as in ``U8 (16 asked)``. An
    infeasible record has no plan, so its text shows what was asked for: ``auto`` if all degrees
    were left open.
    """
    name, plan = spec.contender.name, record.plan
    knobs = PLAIN_KNOBS | spec.contender.knobs
    degrees = plan.get("layout") or {k: v for k, v in knobs.items() if v != "auto"}
    names = {"tp": "TP", "pp": "PP", "chunks": "V", "shard": "ZeRO-3x", "replicate": "DP"}
    parts = [f"{short}{degrees[key]}" for key, short in names.items() if degrees.get(key, 1) > 1]
    if degrees.get("replicate_zero"):
        parts.append("ZeRO-1")
    parts += _unit_text(plan, knobs["unit"])
    if knobs["schedule"] not in ("auto", name):
        parts.append(knobs["schedule"])
    if spec.microbatch_size > 1:
        parts.append(f"b{spec.microbatch_size}")
    if knobs["recompute"] not in ("auto", "none"):
        parts.append(f"recompute {knobs['recompute']}")
    parts += [word for word in ("sequence_parallel", "compile") if knobs[word] is True]
    other = {k: v for k, v in knobs.items() if k not in _NAMED and v != "auto"}
    parts += [f"{k} {v}" for k, v in other.items() if v != PLAIN_KNOBS.get(k)]
    return " ".join(parts) or ("1 rank" if spec.num_gpus == 1 else "auto")


def _unit_text(plan: dict[str, Any], asked: object) -> list[str]:
    """The unit that runs, unless it is the whole step, and the one that was asked for, if it is
    another."""
    unit = plan.get("unit", 0)
    if isinstance(asked, int) and unit not in (0, asked):
        return [f"U{unit} ({asked} asked)"]
    return [f"U{unit}"] if unit not in (0, plan.get("num_microbatches")) else []


def asked_knobs(record: RunRecord, spec: RecordedSpec) -> dict[str, Any]:
    """Every knob and the microbatch size as they were asked for; ``unit`` also shows the unit that
    the planner made of it."""
    knobs = PLAIN_KNOBS | spec.contender.knobs
    knobs = {k: v for k, v in knobs.items() if k != "name"}
    run = record.plan.get("unit", 0)
    if isinstance(knobs["unit"], int) and run not in (0, knobs["unit"]):
        knobs["unit"] = f"{knobs['unit']} (run as {run})"
    return knobs | {"microbatch_size": spec.microbatch_size}


def has_default_degrees(spec: RecordedSpec) -> bool:
    """Whether every degree is the contender's default, which means that nobody has tuned it."""
    default = default_knobs(spec.contender.name)
    if default is None:
        return False
    knobs = default | spec.contender.knobs
    return all(knobs[name] in ("auto", default[name]) for name in _DEGREES)


def evidence_of(record: RunRecord) -> str:
    """A record's kind of evidence in words, such as ``simulated with traced compute``."""
    return " with ".join(filter(None, (record.provenance, record.variant)))


def source_of(record: RunRecord) -> dict[str, Any]:
    """The source of a record's numbers: commit, machine, versions, specification and gate."""
    first = record.ranks[0].environment if record.ranks else {}
    return {
        "record": record.record_id,
        "evidence": evidence_of(record),
        "status": f"{record.status} {record.reason}".strip(),
        "started": record.started_at,
        "ended": record.ended_at,
        "commit": record.git_sha + (" with local changes" if record.git_dirty else ""),
        "suite's files": record.code_digest,
        "notes": record.notes,
        "launcher": record.launcher,
        "hosts": sorted({rank.environment.get("host", "?") for rank in record.ranks}),
        "device": first.get("device", "none"),
        "processor": first.get("cpu", ""),
        "python": first.get("python", ""),
        "versions": first.get("versions", {}),
        "variables": first.get("variables", {}),
        "correctness gate": None if record.gate is None else asdict(record.gate),
        "raw steps [s]": record.step_s,
        "plan": record.plan,
        "slurm": record.slurm,
        "spec": record.spec,
    }
