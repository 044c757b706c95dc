"""Where a model is cut into stages, so that every pipeline rank has the same amount of work.

With several chunks per rank the sum over a rank's stages counts, so that a short stage makes up for
a long one. All blocks of a model take the same time, so a cut is a number of blocks per stage, or
of halves of blocks (``half_cuts``) in programs that can cut between attention and MLP.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import floor
from typing import TYPE_CHECKING

from zeropp.cluster import Cluster
from zeropp.cost.blocks import Work, piece_times
from zeropp.cost.half_cuts import spread_halves
from zeropp.cost.stage_costs import work_of
from zeropp.cost.tensor_parallel import TensorTimes, tensor_times
from zeropp.programs import Program

if TYPE_CHECKING:
    from zeropp.plan import SizedPlan

_WORTH = 0.01  # the least gain, in blocks, for which cuts inside blocks are taken


def cut_by_cost(
    plan: SizedPlan, cluster: Cluster, program: Program | None = None, *, split_blocks: bool = False
) -> tuple[float, ...]:
    """The cuts of a plan's model by the times of its pieces (embedding, blocks, head) on the
    cluster: forward, input gradient and weight gradient of one microbatch.

    The plan's own ``cuts`` are not read; ``program`` is as in ``price_plan``. ``split_blocks``: a
    cut may be inside a block, if that makes the work of the busiest rank less. ``spread_blocks``
    says what is minimised.
    """
    work = work_of(plan, cluster, program)
    tensor = tensor_times(plan, cluster, work)
    return _cuts(work, tensor, plan.schedule.stage_rank, split_blocks)


@lru_cache(maxsize=65536)
def _cuts(
    work: Work, tensor: TensorTimes, ranks: tuple[int, ...], split_blocks: bool
) -> tuple[float, ...]:
    times = piece_times(work, tensor.forward, tensor.backward)
    block, layers = times.block.total, work.shape.layers
    ends = ((piece.total + 2 * tensor.one) / block for piece in (times.embedding, times.head))
    # Rounded, so that plans that differ little share their cuts.
    embedding, head = (round(end, 2 if split_blocks else 3) for end in ends)
    if not split_blocks:
        return spread_blocks(layers, ranks, embedding, head)
    attention = round(times.attention.total / block, 2)
    return _cuts_of_halves(layers, ranks, (embedding, head), attention)


@lru_cache(maxsize=4096)
def _cuts_of_halves(
    layers: int, ranks: tuple[int, ...], ends: tuple[float, float], attention: float
) -> tuple[float, ...]:
    """The cuts inside blocks, or those between blocks if they are hardly worse; ``ends`` is the
    work of embedding and head, in blocks."""
    embedding, head = ends
    if len(ranks) > layers + 2:
        return spread_halves(
            layers, ranks, embedding=embedding, head=head, attention=attention, whole=()
        )
    whole = spread_blocks(layers, ranks, embedding, head)
    halves = spread_halves(
        layers, ranks, embedding=embedding, head=head, attention=attention, whole=whole
    )
    most = partial(largest_work, ranks=ranks, ends=ends, attention=attention)
    return halves if most(halves) < most(whole) - _WORTH else whole


def largest_work(
    cuts: Sequence[float], ranks: Sequence[int], ends: tuple[float, float], attention: float
) -> float:
    """The work of the busiest rank, in blocks; ``ends`` is the work of embedding and head."""

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
    """The cuts of an embedding, ``layers`` blocks and a head into the stages of ``stage_rank``.

    ``embedding`` and ``head`` are their work as multiples of a block's. The largest work of a rank
    is as small as possible, and the stages of a rank are as equal as possible. Of ranks with equal
    work the later ones get more blocks, because the first ones hold the activations of more
    microbatches. Every stage has at least one piece; raises ValueError if there are more stages
    than pieces.
    """
    last = len(stage_rank) - 1
    blocks = [1] * len(stage_rank)
    blocks[0] -= 1  # the first stage has the embedding
    blocks[last] -= 1  # the last stage has the head; a single stage has both
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
