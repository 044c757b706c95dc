"""What the tuner tries for a public 3D program. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal, TypeVar

from baselines.public_3d.knobs import Public3DKnobs
from baselines.public_3d.offers import OFFERS
from zeropp.tune.space import (
    Point,
    Space,
    choices,
    one_member,
    placement_choices,
    sequence_choices,
    zero_choices,
)

P = TypeVar("P", bound=Public3DKnobs)

# Megatron's selective recomputation drops attention scores, which fused attention never keeps.
_RECOMPUTE: tuple[Literal["none", "full"], ...] = ("none", "full")


def families(point: Point[P]) -> Iterator[P]:
    """Every setting at a point that the program has; nothing is left open."""
    asked, degrees = point.asked, point.degrees
    offer = OFFERS[asked.name]
    sequences = sequence_choices(asked.sequence_parallel, degrees)
    placements = placement_choices(asked.placement, point)
    for zero, sequence, placement, schedule, recompute in product(
        zero_choices(asked.replicate_zero, degrees),
        sequences if offer.sequence_parallel else (False,),
        [placement for placement in placements if placement in offer.placements],
        [s for s in choices(asked.schedule, offer.schedules) if s in offer.schedules],
        choices(asked.recompute, _RECOMPUTE),
    ):
        if recompute != "none" and schedule not in offer.recomputed:
            continue
        for chunks in choices(asked.chunks, offer.schedules[schedule]):
            yield replace(
                asked,
                tp=degrees.tp,
                pp=degrees.pp,
                replicate=degrees.replicate,
                replicate_zero=zero,
                chunks=chunks,
                schedule=schedule,
                sequence_parallel=sequence,
                recompute=recompute,
                placement=placement,
            )


SPACE: Space[Any] = Space(families=families, members=one_member, tensor=True)
