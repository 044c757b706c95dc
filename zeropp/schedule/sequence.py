"""The order in which the actions of all ranks can be timed: each after those that it waits for.

Which action waits for which does not depend on durations. So this order is found once per schedule,
and the event loop then goes through it once for every set of durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from zeropp.schedule.action import TRANSFER, Action, Op

# States of an input: nothing has happened, its receive is posted, its message is sent, it is here.
_NOTHING, _POSTED, _SENT, _HERE = range(4)
_DONE = 4  # the input gradient that used it has been computed

_FORWARD_SIDE = frozenset({Op.FORWARD, Op.RECV_F})
_SENDS = frozenset({Op.SEND_F, Op.SEND_B})
_RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})


class DeadlockError(ValueError):
    """The programs wait for each other. Rank r stopped at index ``stuck[r]`` of its program."""

    def __init__(self, message: str, stuck: tuple[int, ...]) -> None:
        super().__init__(message)
        self.stuck = stuck


@dataclass(frozen=True)
class ActionSequence:
    """The actions of all programs, in an order in which each one's inputs come before it; actions
    of one rank keep the order of its program."""

    actions: tuple[Action, ...]
    num_microbatches: int  # one more than the largest number of a microbatch
    has_transfers: bool  # False: compute actions alone, whose outputs reach the next stage anyway


def sequence_of(programs: Sequence[Sequence[Action]], stage_rank: Sequence[int]) -> ActionSequence:
    """The sequence of some programs. Raises DeadlockError if the programs cannot end."""
    return _Search(programs, stage_rank).result()


class _Search:
    """Runs every rank as far as its inputs allow. The inputs of forwards are numbered ``stage *
    microbatches + microbatch``, and those of backwards follow, after a spare row."""

    def __init__(self, programs: Sequence[Sequence[Action]], stage_rank: Sequence[int]) -> None:
        self._programs, self._last = programs, len(stage_rank) - 1
        numbers = (action.microbatch or 0 for program in programs for action in program)
        self._m = 1 + max(numbers, default=0)
        self._back = (len(stage_rank) + 1) * self._m
        self._inputs = bytearray(2 * self._back)
        self._inputs[: self._m] = bytes([_HERE]) * self._m
        self._lowered = any(a.op in TRANSFER for program in programs for a in program)
        # Whether a stage's output reaches the next stage without a send, and the other way round.
        self._direct = [not self._lowered or a == b for a, b in pairwise(stage_rank)]
        self._waiting: dict[int, int] = {}  # input -> rank that waits for it
        self._position = [0] * len(programs)
        self._runnable = list(range(len(programs) - 1, -1, -1))
        self._order: list[Action] = []

    def result(self) -> ActionSequence:
        while self._runnable:
            self._advance(self._runnable.pop())
        stuck = tuple(self._position)
        where = [
            f"rank {r} at {p[stuck[r]]}" for r, p in enumerate(self._programs) if stuck[r] < len(p)
        ]
        if where:
            raise DeadlockError(f"deadlock: {', '.join(where)}", stuck)
        return ActionSequence(tuple(self._order), self._m, self._lowered)

    def _advance(self, rank: int) -> None:
        """Run one rank until its program ends or it has to wait for another rank."""
        inputs, m, begin = self._inputs, self._m, self._position[rank]
        place = begin
        for stage, op, microbatch in islice(self._programs[rank], begin, None):
            if microbatch is not None:
                key = stage * m + microbatch
                if op in _SENDS:
                    self._send(key + m if op is Op.SEND_F else self._back + key - m)
                else:
                    key += 0 if op in _FORWARD_SIDE else self._back
                    if op is Op.BACKWARD_WEIGHT:
                        if inputs[key] != _DONE:
                            break  # its input gradient stands later in the same program
                    elif op in _RECEIVES:
                        inputs[key] = _HERE if inputs[key] == _SENT else _POSTED
                    elif inputs[key] < _HERE:
                        self._waiting[key] = rank
                        break
                    else:
                        self._output(stage, op, key)
            place += 1
        self._order += self._programs[rank][begin:place]
        self._position[rank] = place

    def _output(self, stage: int, op: Op, key: int) -> None:
        """Pass on the output of a forward or backward, unless a send does it."""
        if op is not Op.FORWARD:
            self._inputs[key] = _DONE
            if stage > 0 and self._direct[stage - 1]:
                self._arrive(key - self._m)
        elif stage == self._last:
            self._arrive(self._back + key)
        elif self._direct[stage]:
            self._arrive(key + self._m)

    def _send(self, key: int) -> None:
        """A message is an input if its receive is posted, otherwise it is kept."""
        if self._inputs[key] == _POSTED:
            self._arrive(key)
        else:
            self._inputs[key] = _SENT

    def _arrive(self, key: int) -> None:
        """Note that an input is here, and wake the rank that waits for it."""
        self._inputs[key] = _HERE
        if key in self._waiting:
            self._runnable.append(self._waiting.pop(key))
