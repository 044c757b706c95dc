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
    """All knobs to try at a point, except for when gradients are reduced: for a family that is the
    choice with the shortest step, so that the lower bound on its step time holds for ``members``.
    """
    asked, degrees = point.asked, point.degrees
    *_, fastest = _reductions(asked, point.num_microbatches)
    for recompute, blocks in recompute_choices(
        asked.recompute, asked.recompute_blocks, _RECOMPUTE, point.task.shape.layers
    ):
        yield replace(
            asked,
            shard=degrees.shard,
            replicate=degrees.replicate,
            recompute=recompute,
            recompute_blocks=blocks,
            reduce_every=fastest,
        )


def members(asked: FSDPKnobs, family: FSDPKnobs, plan: SizedPlan) -> Iterator[FSDPKnobs]:
    """A family's knobs with gradients reduced per microbatch, and with them reduced per step."""
    for reduce_every in _reductions(asked, plan.num_microbatches):
        yield replace(family, reduce_every=reduce_every)


def _reductions(asked: FSDPKnobs, num_microbatches: int) -> tuple[ReduceEvery, ...]:
    """When to reduce gradients: first the choice with the least memory, last the one with the
    shortest step. A single microbatch has nothing to gain from gradients that are summed first."""
    return choices(asked.reduce_every, _REDUCE if num_microbatches > 1 else _REDUCE[:1])


SPACE = Space(families=families, members=members, pipelines=(1, 1), shards=(2, 0))
