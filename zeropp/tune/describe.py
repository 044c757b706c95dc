"""A plan's settings as one line of text, and as overrides for ``benchmarks.run``."""

from __future__ import annotations

from dataclasses import asdict

from zeropp.plan import Candidate, K, SizedPlan


def describe(plan: SizedPlan) -> str:
    """The degrees and knobs of a plan as short text, such as
    ``pp=4 shard=16 b=1 m=32 zeropp V=2 U=8 cap=16 reduce=unit``."""
    layout, order = plan.layout, plan.schedule
    degrees = [(k, getattr(layout, k)) for k in ("pp", "tp", "shard", "replicate")]
    words = [f"{name}={degree}" for name, degree in degrees if degree > 1] or ["one GPU"]
    words += [f"b={plan.microbatch_size}", f"m={plan.num_microbatches}", order.name]
    if 1 < layout.chunks < plan.shape.num_pieces:  # FSDP's stages are all pieces
        words.append(f"V={layout.chunks}")
    if plan.activation_cap:
        words.append(f"U={order.unit} cap={plan.activation_cap} reduce={plan.reduce_every}")
    words += ["stages on a V"] * (plan.stage_style == "v")
    words += ["zero1"] * layout.replicate_zero + ["sp"] * layout.sequence_parallel
    words += [f"keep={plan.keep}"] * (plan.keep > 0)
    if layout.placement == "pp_inner":
        words.append("pp inside the node")
    if plan.recompute != "none":
        words.append(f"{plan.recompute} recompute{_some(plan)}")
    return " ".join(words)


def _some(plan: SizedPlan) -> str:
    if not plan.recomputed:
        return ""
    if plan.layout.chunks == plan.shape.num_pieces:  # every piece is a stage
        return f" of {sum(plan.recomputed)} blocks"
    return f" of {max(plan.recomputed)} blocks per stage"


def overrides(candidate: Candidate[K]) -> list[str]:
    """The words for the command line of ``benchmarks.run`` that set exactly this candidate."""
    knobs = asdict(candidate.knobs)  # type: ignore[call-overload]
    words = [f"contender={knobs.pop('name')}", f"microbatch_size={candidate.microbatch_size}"]
    return words + [f"contender.{name}={_value(value)}" for name, value in knobs.items()]


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
