"""What the tuner tries for ZeroPP. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from zeropp.contender.knobs import ZeroppKnobs
from zeropp.literals import Auto, Recompute, ReduceEvery
from zeropp.plan import Plan
from zeropp.schedule.zeropp_order import smallest_cap
from zeropp.tune.space import Point, Space, choices, placement_choices, zero_choices

_CHUNKS = (1, 2, 3, 4, 6, 8, 12)
# Selective recomputation was tried in all cells of the verdict, and no best plan had it: smaller
# units did.
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
_REDUCE: tuple[ReduceEvery, ...] = ("unit", "step")
_UNITS = (0.5, 1, 2, 4)  # as multiples of the pipeline's ranks, beside all microbatches
_CAPS = (0.0, 1.0, 1.5)  # as multiples of U*V, between the smallest and all of a step


def families(point: Point[ZeroppKnobs]) -> Iterator[ZeroppKnobs]:
    """Every setting but unit, cap, gathers kept and point of reduction. The unit is the largest
    one, with which a bound on the step's time holds for the smaller ones."""
    asked, degrees = point.asked, point.degrees
    unit = point.num_microbatches if asked.unit == "auto" else asked.unit
    for zero, placement, chunks, recompute in product(
        zero_choices(asked.replicate_zero, degrees),
        placement_choices(asked.placement, point),
        choices(asked.chunks, _CHUNKS),
        choices(asked.recompute, _RECOMPUTE),
    ):
        yield replace(
            asked,
            pp=degrees.pp,
            shard=degrees.shard,
            replicate=degrees.replicate,
            replicate_zero=zero,
            placement=placement,
            chunks=chunks,
            recompute=recompute,
            unit=unit,
            activation_cap="auto",
        )


def members(asked: ZeroppKnobs, family: ZeroppKnobs, plan: Plan) -> Iterator[ZeroppKnobs]:
    """A family's units, activation caps and points of reduction, least memory first."""
    m, pp, chunks = plan.num_microbatches, plan.layout.pp, plan.layout.chunks
    for unit in choices(asked.unit, _units(pp, m)):
        unit = min(unit, m)
        reductions = choices(asked.reduce_every, _REDUCE if unit < m else ("step",))
        for cap, reduce_every in product(_caps(asked, unit, chunks, m), reductions):
            yield replace(
                family,
                unit=unit,
                activation_cap=cap,
                reduce_every=reduce_every,
                keep=0 if asked.keep == "auto" else asked.keep,
            )


def _units(pp: int, m: int) -> list[int]:
    return sorted({min(m, max(1, int(pp * factor))) for factor in _UNITS} | {m})


def _caps(asked: ZeroppKnobs, unit: int, chunks: int, m: int) -> tuple[int | Auto, ...]:
    if asked.activation_cap_gib != "auto":
        return ("auto",)
    smallest = smallest_cap(asked.stage_style, chunks, m, unit)
    wanted = {round(unit * chunks * factor) for factor in _CAPS}
    return choices(
        asked.activation_cap, sorted({min(max(cap, smallest), m * chunks) for cap in wanted})
    )


# With one pipeline rank, ZeroPP is FSDP; with one shard, a zero-bubble pipeline without ZeRO-3.
SPACE = Space(families=families, members=members, pipelines=(2, 0), shards=(2, 0))
