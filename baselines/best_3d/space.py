"""What the tuner tries for the best public 3D parallelism. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Literal

from baselines.best_3d.knobs import Best3DKnobs, Best3DSchedule
from zeropp.literals import Auto
from zeropp.tune.space import (
    Point,
    Space,
    choices,
    one_member,
    placement_choices,
    recompute_choices,
    sequence_choices,
    zero_choices,
)

_CHUNKS: dict[Best3DSchedule, tuple[int, ...]] = {
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3, 4, 6, 8, 12),
    "zb_h1": (1,),
    "interleaved_zb": (2, 3, 4, 6, 8, 12),
    "zbv": (2,),
}
# Megatron's selective recomputation drops attention scores, which fused attention never keeps.
_RECOMPUTE: tuple[Literal["none", "full"], ...] = ("none", "full")


def families(point: Point[Best3DKnobs]) -> Iterator[Best3DKnobs]:
    """Every setting at a point; nothing is left open."""
    asked, degrees = point.asked, point.degrees
    for zero, sequence, placement, schedule in product(
        zero_choices(asked.replicate_zero, degrees),
        sequence_choices(asked.sequence_parallel, degrees),
        placement_choices(asked.placement, point),
        choices(asked.schedule, _CHUNKS),
    ):
        for chunks, recompute, blocks in _chunks_and_blocks(point, schedule):
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
            )


def _chunks_and_blocks(
    point: Point[Best3DKnobs], schedule: Best3DSchedule
) -> Iterator[tuple[int, Literal["none", "full"], int | Auto]]:
    asked, layers = point.asked, point.task.shape.layers
    for chunks in choices(asked.chunks, _CHUNKS[schedule]):
        largest = -(-layers // (point.degrees.pp * chunks))
        for recompute, blocks in recompute_choices(
            asked.recompute, asked.recompute_blocks, _RECOMPUTE, largest
        ):
            assert recompute != "selective"
            yield chunks, recompute, blocks


SPACE = Space(families=families, members=one_member, tensor=True)
