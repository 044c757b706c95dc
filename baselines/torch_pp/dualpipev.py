"""The order of DualPipeV, the V-shaped form of DualPipe (arXiv 2412.19437): eight phases per rank,
as in torch's ``ScheduleDualPipeV``.

DualPipeV can overlap a forward with a backward; here one follows the other, as in torch's runtime.
Delayed weight gradients of a rank run first in, first out.
"""

from __future__ import annotations

from collections import Counter, deque

from zeropp.schedule.program import Action, Op, RankProgram


def dualpipev(num_ranks: int, num_microbatches: int) -> tuple[RankProgram, ...]:
    """One program of compute actions per rank, with two chunks per rank. ``num_microbatches`` must
    be at least ``2 * num_ranks``."""
    return tuple(_Rank(rank, num_ranks).program(num_microbatches) for rank in range(num_ranks))


class _Rank:
    """One rank's program under construction. A microbatch comes twice: in the ``near`` stage on
    the way down the V, and in its ``far`` stage on the way up."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._near, self._far = rank, 2 * num_ranks - 1 - rank
        self._out: list[Action] = []
        self._next: Counter[tuple[int, str]] = Counter()
        self._weights: deque[tuple[int, int]] = deque()

    def program(self, num_microbatches: int) -> RankProgram:
        """The rank's program: the eight phases, one after the other."""
        near, far, rank = self._near, self._far, self._rank
        below = self._num_ranks - rank - 1  # ranks further down the V
        for _ in range(2 * below):
            self._add(near, Op.FORWARD)
        for _ in range(rank + 1):
            self._add(near, Op.FORWARD)
            self._add(far, Op.FORWARD)
        for _ in range(below):
            self._backward(far, split=True)
            self._weight()
            self._add(far, Op.FORWARD)
        for _ in range(num_microbatches - 2 * self._num_ranks + rank + 1):
            self._add(near, Op.FORWARD)
            self._backward(far)
            self._add(far, Op.FORWARD)
            self._backward(near)
        for _ in range(below):
            self._backward(far)
            self._add(far, Op.FORWARD)
            self._backward(near)
        # From the middle on the last backwards are split into input and weight gradients, so that
        # the input gradients are sent sooner.
        for index, stage in enumerate((rank + 1) * (far, near)):
            self._backward(stage, split=index >= rank + 1)
        for _ in range(below):
            self._weight()
            self._backward(near, split=True)
        while self._weights:
            self._weight()
        return tuple(self._out)

    def _backward(self, stage: int, *, split: bool = False) -> None:
        if not split:
            self._add(stage, Op.FULL_BACKWARD)
            return
        self._weights.append((stage, self._next[stage, "backward"]))
        self._add(stage, Op.BACKWARD_INPUT)

    def _weight(self) -> None:
        if self._weights:
            stage, microbatch = self._weights.popleft()
            self._out.append(Action(stage, Op.BACKWARD_WEIGHT, microbatch))

    def _add(self, stage: int, op: Op) -> None:
        phase = "forward" if op is Op.FORWARD else "backward"
        self._out.append(Action(stage, op, self._next[stage, phase]))
        self._next[stage, phase] += 1
