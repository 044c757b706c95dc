"""Where a list of layers is cut into pipeline stages, so that every rank has about the same work.

In: what the layers cost, in any unit, and the rank of every stage. Out: the cuts, where stage ``s``
has the layers from ``cuts[s]`` to before ``cuts[s+1]``. What a layer costs is somebody else's to
say: its caller, its number of parameters, or the prices of ``zeropp.price``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate


def cut_layers(weights: Sequence[float], stage_rank: Sequence[int]) -> tuple[int, ...]:
    """The cuts of layers with these relative costs into the stages of ``stage_rank``. Between the
    first and the last layer they usually cost the same, and then ranks are made equal; otherwise,
    or where those between cost nothing, stages are."""
    first, *blocks, last = weights if len(weights) > 1 else (*weights, 0.0)
    if len(set(blocks)) != 1 or not blocks[0]:
        return cut_by_weight(weights, len(stage_rank))
    ends = (round(end / blocks[0], 3) for end in (first, last))
    return spread_blocks(len(blocks), tuple(stage_rank), *ends)


def runs(sizes: Sequence[float], count: int) -> list[int]:
    """For each of these sizes, its run: at most ``count`` runs of neighbours, about as large."""
    run, total, numbers = 0, sum(sizes), list[int]()
    for filled in accumulate(sizes):
        numbers.append(run)
        run += filled * count >= total * (run + 1)
    return numbers


def cut_by_weight(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cut pieces into contiguous stages such that the largest weight of a stage is minimal.

    Of the cuts that reach it, the one with the most even stages, counted from the front, is taken.
    Every stage has at least one piece; raises ValueError if there are more stages than pieces.
    """
    if num_stages > len(weights):
        raise ValueError(f"{num_stages} stages for {len(weights)} pieces")
    best: dict[tuple[int, int], tuple[float, float, int]] = {}  # -> (largest, sum of squares, cut)

    def solve(first: int, stages: int) -> tuple[float, float]:
        if stages == 1:
            load = sum(weights[first:])
            return load, load * load
        if (first, stages) not in best:
            options = []
            load = 0
            for cut in range(first + 1, len(weights) - stages + 2):
                load += weights[cut - 1]
                largest, squares = solve(cut, stages - 1)
                options.append((max(load, largest), load * load + squares, cut))
            best[first, stages] = min(options)
        return best[first, stages][:2]

    solve(0, num_stages)
    cuts = [0]
    for stages in range(num_stages, 1, -1):
        cuts.append(best[cuts[-1], stages][2])
    return (*cuts, len(weights))


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
    blocks = [1] * len(stage_rank)
    blocks[0] -= 1  # the first stage has the embedding
    blocks[-1] -= 1  # the last stage has the head; a single stage has both
    left = layers - sum(blocks)
    if left < 0:
        raise ValueError(f"{len(stage_rank)} stages for {layers + 2} pieces")
    work = [float(count) for count in blocks]
    work[0] += embedding
    work[-1] += head
    # Those with the least work first, of several the last one.
    stages_of: list[list[tuple[float, int]]] = [[] for _ in range(max(stage_rank) + 1)]
    for stage, rank in enumerate(stage_rank):
        stages_of[rank].append((work[stage], -stage))
    ranks = [(sum(w for w, _ in stages), -rank) for rank, stages in enumerate(stages_of)]
    for heap in (ranks, *stages_of):
        heapify(heap)
    for _ in range(left):
        of_rank, rank = ranks[0]
        of_stage, stage = stages_of[-rank][0]
        heapreplace(ranks, (of_rank + 1, rank))
        heapreplace(stages_of[-rank], (of_stage + 1, stage))
        blocks[-stage] += 1
    _, *begins, _ = accumulate(blocks, initial=1)  # piece 0 is the embedding
    return (0, *begins, layers + 2)
