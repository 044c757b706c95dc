"""Where a model is cut into stages, so that every pipeline rank has the same amount of work.

With several chunks per rank the sum over a rank's stages counts, so that a short stage makes up for
a long one. All blocks of a model take the same time, so a cut is a number of blocks per stage, or
of halves of blocks in programs that can cut between attention and MLP.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import floor
from typing import TYPE_CHECKING

from zeropp.cluster import Cluster
from zeropp.cost.communication import TensorTimes, tensor_times
from zeropp.cost.kernels import Work, piece_times
from zeropp.cost.price import work_of
from zeropp.programs import Program

if TYPE_CHECKING:
    from zeropp.plan import SizedPlan


# Cuts that may lie inside a block, between its attention and its MLP.
#
# A model of L blocks then has 2 L + 1 places for a cut instead of L + 1. The search begins with the
# cuts between blocks, or, where there are more stages than blocks, with the places nearest to equal
# stages. How the work of two neighbouring ranks divides depends only on the sum of the places of
# all cuts between them. The sum at which all ranks have the same work is known, so these cuts are
# moved, one or two at a time, until their sum is as near to it as possible. As few cuts as possible
# are moved, because ranks whose stages are alike wait least for each other.


_ENOUGH = 0.01  # blocks: a rank's error that is not worth another move
_Move = tuple[int, int]  # which cut, and how many places it moves


@dataclass(frozen=True)
class _Model:
    """Work of a model in blocks; a cut's place is the number of half blocks before it."""

    layers: int
    embedding: float
    head: float
    attention: float  # of one block

    @property
    def total(self) -> float:
        return self.embedding + self.layers + self.head

    def before(self, place: int) -> float:
        """Work before a place."""
        return self.embedding + place // 2 + (self.attention if place % 2 else 0.0)

    def nearest(self, work: float) -> int:
        """The place with the work before it that is nearest to ``work``."""
        first = 2 * int(max(0.0, work - self.embedding))
        places = range(first, first + 3)
        return min(places, key=lambda place: abs(self.before(place) - work))


@lru_cache(maxsize=4096)
def spread_halves(
    layers: int,
    stage_rank: tuple[int, ...],
    *,
    embedding: float,
    head: float,
    attention: float,
    whole: tuple[int, ...],
) -> tuple[float, ...]:
    """Cuts of ``layers`` blocks, an embedding before them and a head behind, into the stages of
    ``stage_rank``; all work is in blocks, ``attention`` is the part of a block that is attention.
    ``whole``: the cuts between blocks, empty where there are too many stages for that.

    A cut of 3.5 is inside piece 3. Every stage holds half a block at least, or the embedding, or
    the head; raises ValueError where there are too many stages for that.
    """
    model = _Model(layers, embedding, head, attention)
    stages = len(stage_rank)
    if stages > 2 * layers + 2:
        raise ValueError(f"{stages} stages for {2 * layers} half blocks, embedding and head")
    wanted = list(accumulate(_stage_work(model, stage_rank)))[:-1]
    places = [2 * (cut - 1) for cut in whole[1:-1]] or _nearest(model, wanted)
    # On a loop the last rank sends to the first, and the cuts between these two stay. The other
    # sums may have the same error as theirs, because a rank's work is the difference of two sums.
    around = [cut for cut, (a, b) in enumerate(pairwise(stage_rank)) if abs(a - b) > 1]
    offset = sum(model.before(places[cut]) - wanted[cut] for cut in around)
    for cuts in _between_neighbours(stage_rank):
        _settle(model, places, wanted=wanted, cuts=cuts, offset=offset)
    return (0, *(1 + place / 2 for place in places), layers + 2)


def _nearest(model: _Model, wanted: Sequence[float]) -> list[int]:
    """The place nearest to each wanted work, with something left in every stage."""
    places: list[int] = []
    for left, work in zip(range(len(wanted) - 1, -1, -1), wanted, strict=True):
        least = places[-1] + 1 if places else 0
        places.append(min(max(model.nearest(work), least), 2 * model.layers - left))
    return places


def _stage_work(model: _Model, stage_rank: Sequence[int]) -> list[float]:
    """The work that every stage should have: the same for all, unless the embedding or the head
    alone is more than that; then the other stages of its rank have less."""
    stages, ranks = len(stage_rank), len(set(stage_rank))
    even = model.total / stages
    work = [even] * stages
    for stage, alone in ((0, model.embedding), (stages - 1, model.head)):
        mine = [s for s, rank in enumerate(stage_rank) if rank == stage_rank[stage] and s != stage]
        if alone > even and mine:
            for other in mine:
                work[other] = max(0.0, (model.total / ranks - alone) / len(mine))
            work[stage] = alone
    scale = model.total / sum(work)
    return [scale * w for w in work]


def _between_neighbours(stage_rank: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """The cuts between any two neighbouring ranks, each with its sign: 1 if the lower rank gets
    more work when the cut moves towards the end of the model, else -1."""
    cuts: dict[frozenset[int], list[tuple[int, int]]] = defaultdict(list)
    for cut, (here, there) in enumerate(pairwise(stage_rank)):
        if abs(here - there) == 1:
            cuts[frozenset((here, there))].append((cut, 1 if here < there else -1))
    yield from cuts.values()


def _settle(
    model: _Model,
    places: list[int],
    *,
    wanted: Sequence[float],
    cuts: Sequence[tuple[int, int]],
    offset: float,
) -> None:
    """Move the cuts between two ranks until the sum of their errors is as near to ``offset`` as it
    gets."""
    signs = dict(cuts)
    error = sum(sign * (model.before(places[cut]) - wanted[cut]) for cut, sign in cuts) - offset
    while abs(error) > _ENOUGH:
        added, moves = _best_move(_single_moves(model, places, signs), error)
        if abs(error + added) > abs(error) - _ENOUGH:
            return
        error += added
        for cut, step in moves:
            places[cut] += step


def _single_moves(
    model: _Model, places: Sequence[int], signs: dict[int, int]
) -> list[tuple[float, _Move]]:
    """All moves of one cut to a neighbouring place, each with what it adds to the error."""
    single: list[tuple[float, _Move]] = []
    for cut, sign in signs.items():
        below = places[cut - 1] if cut else -1
        above = places[cut + 1] if cut + 1 < len(places) else 2 * model.layers + 1
        for step in (-1, 1):
            place = places[cut] + step
            if below < place < above:
                gain = sign * (model.before(place) - model.before(places[cut]))
                single.append((gain, (cut, step)))
    return single


def _best_move(
    single: Sequence[tuple[float, _Move]], error: float
) -> tuple[float, tuple[_Move, ...]]:
    """The move of one cut, or of two, that leaves the smallest error; the first of several. Without
    any, one that changes nothing."""
    least = float("inf")
    best: tuple[float, tuple[_Move, ...]] = (0.0, ())
    for gain, move in single:
        if (left := abs(error + gain)) < least:
            least, best = left, (gain, (move,))
    for number, (first, one) in enumerate(single):
        cut = one[0]
        for second, two in single[number + 1 :]:
            if (left := abs(error + (first + second))) < least and abs(cut - two[0]) > 1:
                least, best = left, (first + second, (one, two))  # neighbours could meet
    return best


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
