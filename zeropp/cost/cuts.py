"""Where a model is cut into stages, so that every pipeline rank has the same amount of work.

A rank's work is what counts: with several chunks per rank, one short stage of a rank makes up for
a long one. All blocks of a model take the same time, so cutting means spreading them one by one,
or (``half_cuts``) by halves of blocks, where a program can cut between attention and MLP.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import floor
from typing import TYPE_CHECKING

from zeropp.cluster import Cluster
from zeropp.cost.blocks import piece_times
from zeropp.cost.half_cuts import spread_halves
from zeropp.cost.stage_costs import work_of
from zeropp.cost.tensor_parallel import tensor_times
from zeropp.programs import Program

if TYPE_CHECKING:
    from zeropp.plan import Plan

_WORTH = 0.01  # blocks: what cuts inside blocks must gain


def cut_by_cost(
    plan: Plan, cluster: Cluster, program: Program | None = None, *, split_blocks: bool = False
) -> tuple[float, ...]:
    """Cuts of a plan's model by what its pieces take on the cluster: forward, input gradient and
    weight gradient of one microbatch, the embedding's and the head's among them.

    The plan's own ``cuts`` are not read; ``program`` as for ``price_plan``. ``split_blocks``: a cut
    may lie inside a block, where that makes the busiest rank's work less. See ``spread_blocks`` for
    what is minimised.
    """
    work = work_of(plan, cluster, program)
    tensor = tensor_times(plan, cluster, work)
    times = piece_times(work, tensor.forward, tensor.backward)
    block, layers, ranks = times.block.total, plan.shape.layers, plan.schedule.stage_rank
    ends = ((piece.total + 2 * tensor.one) / block for piece in (times.embedding, times.head))
    # Rounded, so that plans that differ little share their cuts.
    embedding, head = (round(end, 2 if split_blocks else 3) for end in ends)
    if not split_blocks:
        return spread_blocks(layers, ranks, embedding, head)
    attention = round(times.attention.total / block, 2)
    if len(ranks) > layers + 2:
        return spread_halves(layers, ranks, embedding, head, attention, ())
    whole = spread_blocks(layers, ranks, embedding, head)
    halves = spread_halves(layers, ranks, embedding, head, attention, whole)
    most = partial(largest_work, ranks=ranks, ends=(embedding, head), attention=attention)
    return halves if most(halves) < most(whole) - _WORTH else whole


def largest_work(
    cuts: Sequence[float], ranks: Sequence[int], ends: tuple[float, float], attention: float
) -> float:
    """The work of the busiest rank, in blocks; ``ends``: that of the embedding and of the head."""

    def before(cut: float) -> float:
        whole = ends[0] + (floor(cut) - 1) + (attention if cut % 1 else 0.0)
        return 0.0 if cut == 0 else whole + (ends[1] - 1.0 if cut == cuts[-1] else 0.0)

    work = [0.0] * (max(ranks) + 1)
    for rank, (begin, end) in zip(ranks, pairwise(cuts), strict=True):
        work[rank] += before(end) - before(begin)
    return max(work)


@lru_cache(maxsize=4096)
def spread_blocks(
    layers: int, stage_rank: tuple[int, ...], embedding: float, head: float
) -> tuple[int, ...]:
    """Cuts of ``layers`` blocks, an embedding before them and a head behind, into the stages of
    ``stage_rank``; ``embedding`` and ``head`` are their work in blocks.

    The largest work of a rank is as small as it can be, and within a rank its stages are as equal
    as they can be. Of equal ranks the later ones get more, because the first ones hold the
    activations of more microbatches. Every stage holds a piece at least; raises ValueError where
    there are more stages than pieces.
    """
    last = len(stage_rank) - 1
    blocks = [1] * len(stage_rank)
    blocks[0] -= 1  # it has the embedding
    blocks[last] -= 1  # it has the head, and alone it has both
    left = layers - sum(blocks)
    if left < 0:
        raise ValueError(f"{last + 1} stages for {layers + 2} pieces")
    work = [float(count) for count in blocks]
    work[0] += embedding
    work[last] += head
    of_rank = [0.0] * (max(stage_rank) + 1)
    for stage, rank in enumerate(stage_rank):
        of_rank[rank] += work[stage]
    ranks = [(total, -rank) for rank, total in enumerate(of_rank)]
    stages: list[list[tuple[float, int]]] = [[] for _ in ranks]
    for stage, rank in enumerate(stage_rank):
        stages[rank].append((work[stage], -stage))
    for heap in (ranks, *stages):
        heapq.heapify(heap)
    for _ in range(left):
        total, rank = ranks[0]
        heapq.heapreplace(ranks, (total + 1.0, rank))
        held, stage = stages[-rank][0]
        heapq.heapreplace(stages[-rank], (held + 1.0, stage))
        blocks[-stage] += 1
    ends = [*accumulate(blocks, initial=1)]
    return (0, *ends[1:-1], layers + 2)
