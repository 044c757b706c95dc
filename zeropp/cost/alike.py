"""Which stages of a plan have the same price. Most stages are equal, so pricing them once saves
time."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from zeropp.cluster import Cluster
from zeropp.cost.collectives import crosses_nodes
from zeropp.layout import Layout

if TYPE_CHECKING:
    from zeropp.plan import SizedPlan


def first_alike(plan: SizedPlan, cluster: Cluster) -> tuple[int, ...]:
    """For each stage, the first stage with the same price, that is with the same pieces and with
    neighbours at the same distance."""
    hops = _hops(cluster, plan.layout, plan.schedule.stage_rank)
    return _first(plan.cuts, plan.shape.num_pieces, plan.recomputed_per_stage, hops)


@lru_cache(maxsize=4096)
def _hops(cluster: Cluster, layout: Layout, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """How far every stage is from the one before: 0 on the same rank, 1 on the same node, else 2;
    -1 before the first stage and after the last."""
    far = {
        (here, there): (here != there) + crosses_nodes(cluster, layout, here, there)
        for here, there in set(pairwise(ranks))
    }
    return (-1, *(far[pair] for pair in pairwise(ranks)), -1)


@lru_cache(maxsize=4096)
def _first(
    cuts: tuple[float, ...], pieces: int, recomputed: tuple[int, ...], hops: tuple[int, ...]
) -> tuple[int, ...]:
    first: dict[tuple[object, ...], int] = {}
    like = []
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        where = (begin == 0, end == pieces, hops[stage], hops[stage + 1])
        key = (end - begin, begin % 1, recomputed[stage], *where)
        like.append(first.setdefault(key, stage))
    return tuple(like)
