"""What the tuner tries for ZeroPP. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from zeropp.contender.knobs import ZeroppKnobs
from zeropp.literals import Auto, Recompute, ReduceEvery, StageStyle, if_auto
from zeropp.plan import SizedPlan
from zeropp.schedule.zeropp_order import smallest_cap
from zeropp.tune.space import (
    Point,
    Space,
    choices,
    placement_choices,
    recompute_choices,
    zero_choices,
)

_CHUNKS = (1, 2, 3, 4, 6, 8, 12)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_REDUCE: tuple[ReduceEvery, ...] = ("unit", "step")
_UNITS = (0.5, 1, 2, 4)  # multiples of the pipeline ranks; one unit of the whole step is tried, too
_CAPS = (0.0, 1.0, 1.5)  # multiples of U*V, raised to the smallest cap, lowered to the whole step
_V_CHUNKS = (2, 4)  # with one chunk per rank a V is a loop; more than four gain little
_V_CAPS = (0.375, 0.5)  # multiples of P*V, which is what the first rank holds under 1F1B


def families(point: Point[ZeroppKnobs]) -> Iterator[ZeroppKnobs]:
    """All knobs to try at a point, except for unit, cap, ``keep`` and when gradients are reduced.

    They are set to what takes the least time: the largest unit, a cap that holds all activations
    of a step, and gradients that are reduced once per step. So the lower bound on a family's step
    time holds for all that ``members`` yields.
    """
    asked, degrees, m = point.asked, point.degrees, point.num_microbatches
    for zero, placement, (chunks, style) in product(
        zero_choices(asked.replicate_zero, degrees),
        placement_choices(asked.placement, point),
        _stages(asked, max(1, point.task.shape.layers // degrees.pp)),
    ):
        largest = -(-point.task.shape.layers // (degrees.pp * chunks))
        for recompute, blocks in recompute_choices(
            asked.recompute, asked.recompute_blocks, _RECOMPUTE, largest
        ):
            yield replace(
                asked,
                pp=degrees.pp,
                shard=degrees.shard,
                replicate=degrees.replicate,
                replicate_zero=zero,
                placement=placement,
                chunks=chunks,
                stage_style=style,
                recompute=recompute,
                recompute_blocks=blocks,
                split_blocks=if_auto(asked.split_blocks, not point.task.shape.dropout),
                unit=if_auto(asked.unit, m),
                activation_cap=m * chunks if asked.activation_cap_gib == "auto" else "auto",
                reduce_every=if_auto(asked.reduce_every, "step"),
            )


def _stages(asked: ZeroppKnobs, most: int) -> Iterator[tuple[int, StageStyle]]:
    """(chunks per rank, how their stages are assigned to ranks) to try; ``most``: the chunks per
    rank of one block each, which have the smallest buffers."""
    for chunks in choices(asked.chunks, sorted({*_CHUNKS, most})):
        styles: tuple[StageStyle, ...] = ("loop", "v") if chunks in _V_CHUNKS else ("loop",)
        for style in choices(asked.stage_style, styles):
            yield chunks, style


def members(asked: ZeroppKnobs, family: ZeroppKnobs, plan: SizedPlan) -> Iterator[ZeroppKnobs]:
    """A family's knobs with every unit, activation cap and choice of when gradients are reduced,
    those with the least memory first."""
    m = plan.num_microbatches
    # With stages in a V all chunks stay gathered during the step, so that units save nothing.
    units = [m] if plan.stage_style == "v" else _units(plan.layout.pp, m)
    for unit in choices(asked.unit, units):
        unit = min(unit, m)
        reductions = choices(asked.reduce_every, _REDUCE if unit < m else ("step",))
        for cap, reduce_every in product(_caps(asked, unit, plan), reductions):
            yield replace(
                family,
                unit=unit,
                activation_cap=cap,
                reduce_every=reduce_every,
                keep=0 if asked.keep == "auto" else asked.keep,
            )


def _units(pp: int, m: int) -> list[int]:
    return sorted({min(m, max(1, int(pp * factor))) for factor in _UNITS} | {m})


def _caps(asked: ZeroppKnobs, unit: int, plan: SizedPlan) -> tuple[int | Auto, ...]:
    """Activation caps to try, in chunk-activations, ascending."""
    if asked.activation_cap_gib != "auto":
        return ("auto",)
    chunks, m = plan.layout.chunks, plan.num_microbatches
    smallest = smallest_cap(plan.stage_style, chunks, m, unit)
    if plan.stage_style == "v":
        wanted = {int(plan.layout.pp * chunks * factor) for factor in _V_CAPS}
    else:
        wanted = {round(unit * chunks * factor) for factor in _CAPS}
    return choices(
        asked.activation_cap, sorted({min(max(cap, smallest), m * chunks) for cap in wanted})
    )


# At least two pipeline ranks, as ZeroPP would otherwise be FSDP; and at least two ranks per ZeRO-3
# group, as it would otherwise be a zero-bubble pipeline without ZeRO-3.
SPACE = Space(families=families, members=members, pipelines=(2, 0), shards=(2, 0))
