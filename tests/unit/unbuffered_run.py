"""Runs the programs of a schedule where a send blocks until its receive is posted."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from zeropp.schedule.program import Action, Op, Schedule


class UnbufferedRun:
    """One run of all ranks, without durations: each rank goes on as far as it can, again and again.
    The receives of a channel (a pair of ranks) must be posted in the order of its sends."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._ranks = schedule, schedule.stage_rank
        self._posted: dict[tuple[int, int], list[Action]] = defaultdict(list)
        self._sent: Counter[tuple[int, int]] = Counter()
        # What has arrived or was made on the same rank: (stage, forward, microbatch).
        self._there: set[tuple[int, bool, int | None]] = set()

    def stuck(self) -> list[Action]:
        """The actions at which ranks wait for ever; empty if all programs end."""
        left = [deque(program) for program in self._schedule.programs]
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(left):
                while program and self._passes(rank, program[0]):
                    program.popleft()
                    moved = True
        return [program[0] for program in left if program]

    def _passes(self, rank: int, action: Action) -> bool:
        stage, op = action.stage, action.op
        if op in (Op.SEND_F, Op.SEND_B):
            return self._sends(rank, action, forward=op is Op.SEND_F)
        if op in (Op.RECV_F, Op.RECV_B):
            source = stage + (-1 if op is Op.RECV_F else 1)
            self._posted[self._ranks[source], rank].append(action)
        elif op is Op.FORWARD:
            return self._computes(action, stage == 0, stage + 1, forward=True)
        elif op in (Op.BACKWARD_INPUT, Op.FULL_BACKWARD):
            is_last = stage + 1 == self._schedule.num_stages
            return self._computes(action, is_last, stage - 1, forward=False)
        return True

    def _sends(self, rank: int, action: Action, *, forward: bool) -> bool:
        target, j = action.stage + (1 if forward else -1), action.microbatch
        channel = (rank, self._ranks[target])
        if len(self._posted[channel]) == self._sent[channel]:
            return False
        receive = Action(target, Op.RECV_F if forward else Op.RECV_B, j)
        assert self._posted[channel][self._sent[channel]] == receive
        self._sent[channel] += 1
        self._there.add((target, forward, j))
        return True

    def _computes(self, action: Action, is_first: bool, target: int, *, forward: bool) -> bool:
        """A forward or a backward, which makes the input of stage ``target``; ``is_first`` needs no
        input."""
        stage, j = action.stage, action.microbatch
        if not is_first and (stage, forward, j) not in self._there:
            return False
        inside = 0 <= target < self._schedule.num_stages
        if inside and self._ranks[target] == self._ranks[stage]:
            self._there.add((target, forward, j))
        return True
