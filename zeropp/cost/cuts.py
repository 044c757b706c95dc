"""Where a model is cut into stages, so that every pipeline rank has the same amount of work.

A rank's work is what counts: with several chunks per rank, one short stage of a rank makes up for
a long one. All blocks of a model take the same time, so cutting means spreading them one by one.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from zeropp.cluster import Cluster
from zeropp.cost.blocks import piece_times
from zeropp.cost.stage_costs import tensor_times, work_of
from zeropp.programs import Program

if TYPE_CHECKING:
    from zeropp.plan import Plan


def cut_by_cost(plan: Plan, cluster: Cluster, program: Program | None = None) -> tuple[int, ...]:
    """Cuts of a plan's model by what its pieces take on the cluster: forward, input gradient and
    weight gradient of one microbatch, the embedding's and the head's among them. The plan's own
    ``cuts`` are not read; ``program`` as for ``price_plan``. See ``spread_blocks`` for what
    is minimised."""
    work = work_of(plan, cluster, program)
    tensor = tensor_times(plan, cluster, work)
    times = piece_times(work, tensor.forward, tensor.backward)
    block = times.block.total
    ends = ((piece.total + 2 * tensor.one) / block for piece in (times.embedding, times.head))
    embedding, head = (round(end, 3) for end in ends)  # so that plans that differ little share cuts
    return spread_blocks(plan.shape.layers, plan.schedule.stage_rank, embedding, head)


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
