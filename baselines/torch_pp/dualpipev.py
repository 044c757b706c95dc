"""DualPipeV's order (arXiv 2412.19437; its V-shaped form): eight phases per rank, as in torch.

A forward and a backward that DualPipeV overlaps stand here one after the other, as torch computes
them. Where a rank's weight gradients are split off they are run first in, first out.
"""

from __future__ import annotations

from collections import Counter, deque

from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Program


def dualpipev(num_ranks: int, num_microbatches: int) -> tuple[Program, ...]:
    """One program a rank; needs at least two microbatches a rank (two chunks a rank)."""
    return tuple(_Rank(rank, num_ranks).program(num_microbatches) for rank in range(num_ranks))


class _Rank:
    """One rank's program under construction: ``near`` is its stage of the way down, ``far`` of the
    way up."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._near, self._far = rank, 2 * num_ranks - 1 - rank
        self._out: list[Action] = []
        self._next: Counter[tuple[int, str]] = Counter()
        self._weights: deque[tuple[int, int]] = deque()

    def program(self, num_microbatches: int) -> Program:
        """The eight phases in turn."""
        near, far, rank = self._near, self._far, self._rank
        below = self._num_ranks - rank - 1  # ranks further down the V
        for _ in range(2 * below):
            self._forward(near)
        for _ in range(rank + 1):
            self._forward(near)
            self._forward(far)
        for _ in range(below):
            self._backward(far, split=True)
            self._weight()
            self._forward(far)
        for _ in range(num_microbatches - 2 * self._num_ranks + rank + 1):
            self._forward(near)
            self._backward(far)
            self._forward(far)
            self._backward(near)
        for _ in range(below):
            self._backward(far)
            self._forward(far)
            self._backward(near)
        self._drain(below)
        return tuple(self._out)

    def _drain(self, below: int) -> None:
        """The last backwards; from the middle on they are split, to send sooner."""
        passes = [stage for _ in range(self._rank + 1) for stage in (self._far, self._near)]
        half = (self._rank + 1) // 2
        split_from = 2 * half + (self._rank + 1) % 2
        for index, stage in enumerate(passes):
            self._backward(stage, split=index >= split_from)
        for _ in range(below):
            self._weight()
            self._backward(self._near, split=True)
        while self._weights:
            self._weight()

    def _forward(self, stage: int) -> None:
        self._add(stage, Op.FORWARD)

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
