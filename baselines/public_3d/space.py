"""What the tuner tries for a public 3D program. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from baselines.public_3d.knobs import Public3DKnobs
from baselines.public_3d.offers import OFFERS
from zeropp.literals import if_auto
from zeropp.tune.space import (
    Point,
    Space,
    choices,
    chunk_choices,
    one_member,
    placement_choices,
    sequence_choices,
    zero_choices,
)

P = TypeVar("P", bound=Public3DKnobs)


def families(point: Point[P]) -> Iterator[P]:
    """All knobs to try at a point that the program can have, none of them ``auto``."""
    asked, degrees = point.asked, point.degrees
    offer = OFFERS[asked.name]
    sequences = sequence_choices(asked.sequence_parallel, degrees)
    placements = placement_choices(asked.placement, point)
    for zero, sequence, placement, schedule in product(
        zero_choices(asked.replicate_zero, degrees),
        sequences if offer.sequence_parallel else (False,),
        [placement for placement in placements if placement in offer.placements],
        [s for s in choices(asked.schedule, offer.schedules) if s in offer.schedules],
    ):
        kinds = offer.recomputes if schedule in offer.recomputed else offer.recomputes[:1]
        for chunks, recompute, blocks in chunk_choices(point, offer.schedules[schedule], kinds):
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
                recompute_blocks=blocks,
                placement=placement,
                split_blocks=if_auto(
                    asked.split_blocks, offer.split_blocks and not point.task.shape.dropout
                ),
            )


SPACE: Space[Any] = Space(families=families, members=one_member, tensor=True)
