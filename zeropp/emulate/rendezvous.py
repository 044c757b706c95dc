"""Does what all ranks have issued to their devices come to an end?

A rank's ``Log`` is what its host issues, in order: kernels, events, messages and collectives on
streams, and places where the host waits. The simulation runs the logs of all ranks with the rules
of CUDA and NCCL. A stream is a queue. A message or a collective is a kernel that stays on the
device until all who take part have theirs there, too; a message does not leave before its receiver
is ready, which is what NCCL promises for large ones. Nothing has a duration, so an order that ends
here ends with any durations. It imports no torch.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["kernel", "communication", "record", "wait", "sync", "meet", "place"]


class RankPart(NamedTuple):
    """What a communication kernel has in common with the kernels of ``ranks`` ranks: ``key`` is
    equal on all of them. ``content`` (type and shape) must be."""

    key: Hashable
    ranks: int
    content: str


class Issued(NamedTuple):
    """One thing that a host does. ``stream`` is None where the host waits for the whole device;
    ``event`` is the number of a recorded event; ``what`` is for messages to people."""

    kind: Kind
    stream: str | None = None
    event: int = 0
    parts: tuple[RankPart, ...] = ()
    what: str = ""


Logs = Mapping[int, Sequence[Issued]]  # by rank


class Message(NamedTuple):
    """A message between two ranks of a group, which both name in the same way."""

    group: Hashable
    source: int
    target: int
    content: str


class Log:
    """What the host of one rank issues, in order."""

    def __init__(self) -> None:
        self.issued: list[Issued] = []
        self._events = 0
        self._counts: Counter[Hashable] = Counter()

    def kernel(self, stream: str) -> None:
        """Compute on a stream. Several kernels in a row are one, as they end alike."""
        kernel = Issued("kernel", stream)
        if not self.issued or self.issued[-1] != kernel:
            self.issued.append(kernel)

    def record(self, stream: str) -> int:
        """Record an event on a stream; returns its number."""
        self._events += 1
        self.issued.append(Issued("record", stream, self._events))
        return self._events

    def wait(self, stream: str, event: int) -> None:
        """Let a stream wait for an event."""
        self.issued.append(Issued("wait", stream, event))

    def follow(self, stream: str, other: str) -> None:
        """Let a stream wait for what another one holds so far."""
        self.wait(stream, self.record(other))

    def collective(self, stream: str, group: Hashable, ranks: int, what: str) -> None:
        """A collective of a group of so many ranks; those of one group are matched by order."""
        self._communicate(stream, [(group, ranks, what)], what)

    def messages(self, stream: str, messages: Sequence[Message], what: str) -> None:
        """Messages in one kernel, in no order among each other, as those of a batch are. Those of
        one pair in one group and direction are matched by order."""
        parts = [((m.group, m.source, m.target), 2, m.content) for m in messages]
        self._communicate(stream, parts, what)

    def sync(self, stream: str | None, what: str) -> None:
        """The host waits for a stream, or with None for the whole device."""
        self.issued.append(Issued("sync", stream, what=what))

    def meet(self, key: Hashable, ranks: int) -> None:
        """The host waits for the hosts of so many ranks, as where a communicator is made."""
        self._counts[key] += 1
        part = RankPart((key, self._counts[key]), ranks, "")
        self.issued.append(Issued("meet", parts=(part,), what=f"meets in {key}"))

    def place(self, what: str) -> None:
        """Name what follows, for messages to people."""
        self.issued.append(Issued("place", what=what))

    def _communicate(
        self, stream: str, messages: Iterable[tuple[Hashable, int, str]], what: str
    ) -> None:
        parts = []
        for key, ranks, content in messages:
            self._counts[key] += 1
            parts.append(RankPart((key, self._counts[key]), ranks, content))
        self.issued.append(Issued("communication", stream, 0, tuple(parts), what))


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
            self._advance(self._todo.popleft())

    def stuck(self) -> dict[int, str]:
        ranks = self.ranks.items()
        return {
            number: rank.described() for number, rank in ranks if rank.open or rank.at < rank.limit
        }

    def _advance(self, rank: _RankReplay) -> None:
        moved = True
        while moved:
            moved = self._issue(rank)
            for queue in list(rank.queues.values()):
                while queue and self._start(rank, *queue[0]):
                    queue.popleft()
                    moved = True
            while rank.ready and (self._places is None or rank.resident < self._places):
                self._run_kernel(rank)
                moved = True

    def _issue(self, rank: _RankReplay) -> bool:
        """Let the host go on as far as it can."""
        begin = rank.at
        while rank.at < rank.limit:
            issued = rank.log[rank.at]
            if issued.kind == "sync":
                if rank.open if issued.stream is None else issued.stream in rank.open:
                    break
            elif issued.kind == "meet":
                if not self._meet(rank, issued.parts[0]):
                    break
            elif issued.kind == "place":
                rank.place = issued.what
            else:
                assert issued.stream is not None
                rank.queues[self._queue_of(issued.stream)].append((rank.at, issued))
                rank.open[issued.stream] += 1
            rank.at += 1
        return rank.at > begin

    def _meet(self, rank: _RankReplay, part: RankPart) -> bool:
        met = self._met[part.key]
        if rank.rank not in met:
            met.add(rank.rank)
            if len(met) == part.ranks:
                self._todo.extend(self.ranks[other] for other in met)
        return len(met) == part.ranks

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
        if self._random is None:
            kernel = min(rank.ready, key=lambda kernel: kernel.number)
        else:
            kernel = self._random.choice(rank.ready)
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
