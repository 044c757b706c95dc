"""What the tuner tries for FSDP2. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baselines.fsdp.knobs import FSDPKnobs
from zeropp.literals import Recompute, ReduceEvery
from zeropp.plan import SizedPlan
from zeropp.tune.space import Point, Space, choices, recompute_choices

_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_REDUCE: tuple[ReduceEvery, ...] = ("unit", "step")


def families(point: Point[FSDPKnobs]) -> Iterator[FSDPKnobs]:
    """All knobs to try at a point, except for when gradients are reduced."""
    asked, degrees = point.asked, point.degrees
    for recompute, blocks in recompute_choices(
        asked.recompute, asked.recompute_blocks, _RECOMPUTE, point.task.shape.layers
    ):
        yield replace(
            asked,
            shard=degrees.shard,
            replicate=degrees.replicate,
            recompute=recompute,
            recompute_blocks=blocks,
        )


def members(asked: FSDPKnobs, family: FSDPKnobs, plan: SizedPlan) -> Iterator[FSDPKnobs]:
    """A family's knobs with gradients reduced per microbatch, and with them reduced per step."""
    for reduce_every in choices(asked.reduce_every, _REDUCE):
        yield replace(family, reduce_every=reduce_every)


SPACE = Space(families=families, members=members, pipelines=(1, 1), shards=(2, 0))
