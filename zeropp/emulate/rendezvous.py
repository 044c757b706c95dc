"""Does what all ranks have issued to their devices come to an end?

The simulation runs the logs of all ranks with the rules of CUDA and NCCL. A stream is a queue. A
message or a collective is a kernel that stays on the device until all that take part have theirs
there, too; a message does not leave before its receiver is ready, which is what NCCL promises for
large ones. Nothing has a duration, so an order that ends here ends with any durations. It imports
no torch.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from zeropp.emulate.log import STEP, Issued, Logs, RankPart, name_of


def mismatches(logs: Logs) -> list[str]:
    """Messages and collectives that do not match: that some who should take part in never issue,
    or whose contents (type and shape) differ between ranks."""
    by_key: dict[Hashable, list[tuple[int, RankPart]]] = defaultdict(list)
    for rank, log in logs.items():
        for issued in log:
            for part in issued.parts:
                by_key[part.key].append((rank, part))
    return [
        f"{key}: "
        + ", ".join(f"rank {rank} has {part.content or 'a part'}" for rank, part in parts)
        for key, parts in by_key.items()
        if len(parts) != parts[0][1].ranks or len({part.content for _, part in parts}) > 1
    ]


def unmatched(logs: Logs) -> list[str]:
    """The same in logs of some ranks alone. Each log ends with a rank's last step. Ranks that
    are not here take part in everything, and what one issues in its last step may be what another
    issues in the next."""
    last = {
        rank: [n for n, issued in enumerate(log) if issued.what == STEP][-2]
        for rank, log in logs.items()
    }
    has: dict[Hashable, dict[int, RankPart]] = defaultdict(dict)
    where: dict[tuple[Hashable, int], str] = {}
    early: set[Hashable] = set()
    for rank, log in logs.items():
        for number, issued in enumerate(log):
            for part in issued.parts:
                has[part.key][rank], where[part.key, rank] = part, issued.where
                if number < last[rank]:
                    early.add(part.key)
    found = []
    for key, parts in has.items():
        among = {rank for part in parts.values() for rank in part.among}
        missing = sorted((among & logs.keys()) - parts.keys())
        # A message is this many bytes, of whatever shape.
        kinds = {part.moved if part.ends else part.content for part in parts.values()}
        if len(kinds) > 1 or (missing and key in early):
            ranks = [
                f"rank {rank} has {part.content}{where[key, rank]}" for rank, part in parts.items()
            ]
            ranks += [f"rank {rank} has none" for rank in missing]
            found.append(f"{name_of(key)}: {', '.join(ranks)}")
    return found


def stuck(
    logs: Logs,
    *,
    resident: int | None = None,
    seed: int | None = None,
    queue_of: Callable[[str], str] = str,
) -> dict[int, str]:
    """What each rank waits for that does not come to its end; empty if all do.

    ``resident``: how many communication kernels fit on a device at a time; None: any number. Of
    those that could start, the one that was issued first does or, with a ``seed``, any.
    ``queue_of`` gives the hardware queue of a stream; by default each has its own.
    """
    simulation = _Simulation(logs, resident, seed, queue_of)
    simulation.run()
    return simulation.stuck()


def hanging_waits(logs: Logs, rank: int) -> list[int]:
    """The places in one rank's log where its host, if it waited for its whole device, would wait
    for ever although all other ranks go on. At the end the log's length may be one of them."""
    simulation = _Simulation(logs, None, None, str)
    replay = simulation.ranks[rank]
    places = []
    replay.limit = 0
    simulation.run()
    for place in range(len(replay.log) + 1):
        replay.limit = place
        simulation.run([replay])
        if replay.open or replay.at < place:
            places.append(place)
    return places


@dataclass(eq=False, slots=True)
class _PeerKernel:
    """A communication kernel that has come to the head of its stream."""

    rank: _RankReplay
    issued: Issued
    number: int
    missing: int  # parts whose peers are not there yet


class _RankReplay:
    """The host and the device of one rank."""

    def __init__(self, rank: int, log: Sequence[Issued]) -> None:
        self.rank, self.log = rank, log
        self.at, self.limit = 0, len(log)  # how far the host is, and how far it may go
        self.queues: dict[str, deque[tuple[int, Issued]]] = defaultdict(deque)
        self.open: Counter[str | None] = Counter()  # by stream, what has not ended
        self.running: dict[str, _PeerKernel] = {}  # by stream, also those without a place yet
        self.ready: list[_PeerKernel] = []  # in a place as soon as there is one
        self.resident = 0
        self.events: set[int] = set()
        self.place = ""

    def has_ended(self, sync: Issued) -> bool:
        """Whether all has ended that the host waits for."""
        if sync.event:
            return sync.event in self.events
        return sync.stream not in self.open if sync.stream else not self.open

    def ended(self, stream: str) -> None:
        """Count one thing less on a stream."""
        self.open[stream] -= 1
        if not self.open[stream]:
            del self.open[stream]

    def described(self) -> str:
        """Where the host is, and what is at the head of every queue."""
        text = "the host has issued all"
        if self.at < self.limit:
            text = f"the host is at {self.log[self.at].what or self.log[self.at].kind}"
        heads = [f"{k.issued.what} (on {s})" for s, k in self.running.items()]
        return f"{text}{' in ' + self.place if self.place else ''}; waiting: {', '.join(heads)}"


class _Simulation:
    def __init__(
        self, logs: Logs, resident: int | None, seed: int | None, queue_of: Callable[[str], str]
    ) -> None:
        self.ranks = {rank: _RankReplay(rank, log) for rank, log in logs.items()}
        self._places, self._queue_of = resident, queue_of
        self._random = None if seed is None else random.Random(seed)
        self._there: dict[Hashable, list[_PeerKernel]] = {}
        self._met: dict[Hashable, set[int]] = defaultdict(set)
        self._todo: deque[_RankReplay] = deque()

    def run(self, ranks: Iterable[_RankReplay] | None = None) -> None:
        """Let everything happen that can, beginning with some ranks or with all."""
        self._todo.extend(self.ranks.values() if ranks is None else ranks)
        while self._todo:
            rank, moved = self._todo.popleft(), True
            while moved:
                moved = self._issue(rank)
                for queue in list(rank.queues.values()):
                    while queue and self._start(rank, *queue[0]):
                        queue.popleft()
                        moved = True
                while rank.ready and (self._places is None or rank.resident < self._places):
                    self._run_kernel(rank)
                    moved = True

    def stuck(self) -> dict[int, str]:
        return {
            number: rank.described()
            for number, rank in self.ranks.items()
            if rank.open or rank.at < rank.limit
        }

    def _issue(self, rank: _RankReplay) -> bool:
        """Let the host go on as far as it can."""
        begin = rank.at
        while rank.at < rank.limit:
            issued = rank.log[rank.at]
            if issued.kind == "sync":
                if not rank.has_ended(issued):
                    break
            elif issued.kind == "meet":
                (part,) = issued.parts
                met = self._met[part.key]
                if rank.rank not in met:
                    met.add(rank.rank)
                    if len(met) == part.ranks:
                        self._todo.extend(self.ranks[other] for other in met)
                if len(met) < part.ranks:
                    break
            elif issued.kind == "place":
                rank.place = issued.what
            else:
                assert issued.stream is not None
                rank.queues[self._queue_of(issued.stream)].append((rank.at, issued))
                rank.open[issued.stream] += 1
            rank.at += 1
        return rank.at > begin

    def _start(self, rank: _RankReplay, number: int, issued: Issued) -> bool:
        """Whether what is at the head of a queue leaves it."""
        stream = issued.stream
        assert stream is not None
        if stream in rank.running or (issued.kind == "wait" and issued.event not in rank.events):
            return False
        if issued.kind == "communication":
            rank.running[stream] = kernel = _PeerKernel(rank, issued, number, len(issued.parts))
            rank.ready.append(kernel)
            return True
        if issued.kind == "record":
            rank.events.add(issued.event)
        rank.ended(stream)
        return True

    def _run_kernel(self, rank: _RankReplay) -> None:
        """Give one of the kernels that could start a place on the device."""
        first = min(rank.ready, key=lambda kernel: kernel.number)
        kernel = self._random.choice(rank.ready) if self._random else first
        rank.ready.remove(kernel)
        rank.resident += 1
        for part in kernel.issued.parts:
            arrived = self._there.setdefault(part.key, [])
            arrived.append(kernel)
            if len(arrived) == part.ranks:
                for peer in self._there.pop(part.key):
                    peer.missing -= 1
                    if not peer.missing:
                        self._end(peer)

    def _end(self, kernel: _PeerKernel) -> None:
        rank, stream = kernel.rank, kernel.issued.stream
        assert stream is not None
        rank.resident -= 1
        del rank.running[stream]
        rank.ended(stream)
        self._todo.append(rank)
