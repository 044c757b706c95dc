"""The plan of DeepSpeed 3D: plain 1F1B over stages balanced by cost. Imports no torch.

Its programs are those of DeepSpeed's own ``TrainSchedule``; a test compares them.
"""

from __future__ import annotations

from zeropp.cost import balanced_cuts
from zeropp.layout import InfeasibleError, Layout, microbatches_per_step, resolve_layout
from zeropp.plan import Plan, PlanRequest
from zeropp.schedule import build, lower, validate
from zeropp.shape import ModelShape


def plan(request: PlanRequest) -> Plan:
    """TP x PP x DP (ZeRO-0 or 1); raises InfeasibleError in one line."""
    _refuse_what_deepspeed_lacks(request)
    layout = resolve_layout(request)
    check_tensor_parallel(request.shape, layout)
    schedule = build(
        "1f1b",
        num_ranks=layout.pp,
        chunks=1,
        num_microbatches=microbatches_per_step(request, layout),
    )
    schedule = lower(schedule, gather=False, reduce_every="step")
    validate(schedule)
    return Plan(
        contender=request.settings.name,
        shape=request.shape,
        layout=layout,
        microbatch_size=request.microbatch_size,
        schedule=schedule,
        cuts=balanced_cuts(request.shape, schedule.num_stages),
        precision=request.precision,
        recompute=request.settings.recompute,
        reduce_every="step",
    )


def check_tensor_parallel(shape: ModelShape, layout: Layout) -> None:
    """Refuse a tensor-parallel degree that does not divide what it cuts."""
    cut = {"heads": shape.heads, "kv_heads": shape.kv_heads, "ffn": shape.ffn, "vocab": shape.vocab}
    for field, size in cut.items():
        if size % layout.tp:
            fits = [d for d in range(1, 17) if all(value % d == 0 for value in cut.values())]
            raise InfeasibleError(
                f"contender.tp={layout.tp}: must divide model.{field}={size} "
                f"(try {', '.join(map(str, fits))})"
            )


def _refuse_what_deepspeed_lacks(request: PlanRequest) -> None:
    settings = request.settings
    refusals = {
        "chunks": (settings.chunks != 1, "its pipeline engine has no interleaving (use 1)"),
        "shard": (
            settings.shard not in (1, "auto"),
            "its pipeline engine refuses ZeRO-2 and ZeRO-3 (use 1; contender.replicate is its DP)",
        ),
        "schedule": (
            settings.schedule not in ("auto", "1f1b"),
            "it has 1F1B only (use 1f1b)",
        ),
        "unit": (settings.unit != "auto", "it knows no scheduling units (use auto)"),
        "activation_cap": (settings.activation_cap != "auto", "1F1B has no such cap (use auto)"),
        "sequence_parallel": (settings.sequence_parallel, "not in this baseline (use false)"),
        "recompute": (settings.recompute == "selective", "use none or full"),
        "placement": (settings.placement != "dp_inner", "DeepSpeed's order is dp_inner"),
        "compile": (settings.compile, "not supported by its pipeline engine (use false)"),
    }
    for field, (refused, way_out) in refusals.items():
        if refused:
            value = getattr(settings, field)
            raise InfeasibleError(f"contender.{field}={value}: deepspeed_3d: {way_out}")
