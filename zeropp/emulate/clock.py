"""The time of a step: the logs of the ranks of one pipeline on one clock. It imports no torch.

Every host issues its log, one kernel or communication after another, and waits where its log says.
A stream is a queue. A kernel runs after its stream's earlier ones and its launch; a message or a
collective when all that take part and are here have come to it and its link is free. Ranks that are
not here do what their like here does at the same time. Prices are the simulator's
(``zeropp.price``): of kernels by what they compute and move, of communication by bytes and links.
While collectives move bytes, compute takes ``overlap_slowdown`` longer, spread evenly over a rank's
step.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

from zeropp.emulate.log import COMPUTE, STEP, Issued, Kernel, Logs, RankPart, name_of
from zeropp.price.cluster import Cluster, Device, Host
from zeropp.price.kernels import fused_attention_backward_s, fused_attention_s, matmul_s, stream_s
from zeropp.price.network import (
    all_reduce_s,
    all_reduce_waits_s,
    all_to_all_s,
    gather_s,
    group,
    message_s,
    waits_s,
)
from zeropp.price.price import stragglers
from zeropp.types.literals import Precision
from zeropp.types.operators import Attention, Product
from zeropp.types.timeline import Lane, Span, Timeline

_LANES: dict[str, Lane] = {
    "allgather": "gather",
    "reducescatter": "reduce",
    "send": "transfer",
    "irecv": "transfer",
}


class StuckError(ValueError):
    """The ranks wait for each other for ever; the message says for what."""


@dataclass(frozen=True)
class Replay:
    """The last step of the logs.

    ``busy_s``: by rank, the seconds in which its compute stream runs kernels. ``waits_s``: by rank
    and cause, those in which it does not: a lane of what it waits for, or the ``host``.
    """

    step_s: float
    busy_s: Mapping[int, float]
    waits_s: Mapping[int, Mapping[str, float]]
    timeline: Timeline


def kernel_s(device: Device, kernel: Kernel, *, host: Host | None = None) -> float:
    """Seconds of one kernel, at the prices of the simulator; ``host``: for copies to it."""
    if kernel.with_host and host is not None:
        return kernel.moved / host.rate
    product = kernel.product
    precision: Precision = "bf16" if kernel.element == 2 else "fp32"
    if isinstance(product, Product):
        seconds = matmul_s(
            device, precision, m=product.m, k=product.k, n=product.n, batch=product.batch
        )
    elif isinstance(product, Attention):
        price = fused_attention_backward_s if kernel.is_backward else fused_attention_s
        seconds = price(device, precision, product)
    else:
        return stream_s(device, kernel.moved)
    return seconds + stream_s(device, kernel.moved, kernels=0)


def replay(
    logs: Logs,
    cluster: Cluster,
    world: int,
    *,
    kernel_prices: Callable[[Kernel], float],
    launch_s: float,
    title: str = "",
) -> Replay:
    """Replay the logs of the ranks of one pipeline of a job of ``world`` ranks, at the prices of
    ``kernel_prices`` and a time of the host per launch; messages and collectives are priced by the
    links of the cluster. Raises StuckError if they do not end."""
    links = _Links(logs, cluster, world)
    slow_nodes = stragglers(cluster, world)
    prices = cache(kernel_prices)
    last = max(sum(issued.what == STEP for issued in log) for log in logs.values()) - 1
    factors = dict.fromkeys(logs, slow_nodes)
    for _ in range(2):  # compute that is slowed hides more of the collectives
        factors = {
            rank: slow_nodes
            + cluster.device.overlap_slowdown
            * min(slow_nodes, factors[rank] * ran.share_beside(ran.end_of(last - 1)))
            for rank, ran in _Machine(logs, links, prices, launch_s, factors).run().items()
        }
    ranks = _Machine(logs, links, prices, launch_s, factors).run()
    begin, end = (max(ran.end_of(step) for ran in ranks.values()) for step in (last - 1, last))
    names = {rank: index for index, rank in enumerate(sorted(logs))}
    spans = [
        Span(names[rank], lane, action, max(start, begin) - begin, stop - begin)
        for rank, ran in ranks.items()
        for lane, action, start, stop in ran.spans
        if stop > begin
    ]
    return Replay(
        step_s=end - begin,
        busy_s={rank: ran.busy[last] for rank, ran in ranks.items()},
        waits_s={rank: dict(ran.waits[last]) for rank, ran in ranks.items()},
        timeline=Timeline(title, "replayed", tuple(spans)),
    )


class _Links:
    """Seconds of communication between ranks. A message between stages shares its network with the
    collectives of shards, if they use the same, as in the simulator."""

    def __init__(self, logs: Logs, cluster: Cluster, world: int) -> None:
        self._cluster, self._world = cluster, world
        self._stride = min((after - before for before, after in pairwise(sorted(logs))), default=1)
        self.holders: dict[Hashable, set[int]] = defaultdict(set)  # of every part, who is here
        self._crossed: set[bool] = set()  # whether collectives beside compute cross nodes
        for rank, log in logs.items():
            for issued in log:
                for part in issued.parts:
                    self.holders[part.key].add(rank)
                # Of shards; compute waits at once for those of tensor parallelism, be they on its
                # own stream or functional.
                beside = issued.stream != COMPUTE and not issued.what.startswith("_c10d_functional")
                if beside and lane_of(issued) in ("gather", "reduce"):
                    self._crossed.add(self._group(issued.parts[0]).nodes > 1)

    def seconds(self, issued: Issued, part: RankPart) -> float:
        """How long one message or collective takes once all are there."""
        if part.ends:
            source, target = part.ends
            node = self._cluster.gpus_per_node
            crosses = source // node != target // node
            return message_s(
                self._cluster,
                self._stride,
                self._world,
                crosses=crosses,
                size=part.moved * (2 if crosses in self._crossed else 1),
            )
        price = all_reduce_s if _all_reduces(issued) else gather_s
        price = all_to_all_s if "alltoall" in issued.what else price
        return price(self._cluster, self._group(part), part.moved)

    def waits_s(self, issued: Issued, part: RankPart) -> float:
        """For how long of it a collective moves nothing, and so slows no compute."""
        price = all_reduce_waits_s if _all_reduces(issued) else waits_s
        return price(self._cluster, self._group(part))

    def _group(self, part: RankPart) -> Any:
        ranks = part.among
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        return group(self._cluster, len(ranks), stride, self._world)


def _all_reduces(issued: Issued) -> bool:
    return "allreduce" in issued.what.replace("_", "")


def lane_of(issued: Issued) -> Lane:
    """The lane of a timeline in which a message or a collective is."""
    name = issued.what.replace("_", "")
    return next((lane for text, lane in _LANES.items() if text in name), "replicas")


class _Run(NamedTuple):
    """Kernels one after another on a stream: their seconds, and how long after the host began to
    start them they end at the earliest."""

    seconds: float
    after_s: float


class _End(NamedTuple):
    """When something ended, what it waited for, and when it began."""

    time: float
    cause: str
    begin: float


@dataclass(eq=False)
class _Stream:
    name: str
    queue: deque[tuple[float, int, Issued | _Run]] = field(default_factory=deque)
    end: float = 0.0
    cause: str = "host"
    runs: bool = False


class _Rank:
    """What one rank has done so far. Seconds are by step; the first entry is what comes before
    all steps."""

    def __init__(self) -> None:
        self.streams: dict[str, _Stream] = {}
        self.ends: dict[int, float] = defaultdict(float)
        self.busy: dict[int, float] = defaultdict(float)
        self.waits: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.spans: list[tuple[Lane, str, float, float]] = []
        self.moving: list[tuple[float, float]] = []  # when collectives move bytes

    def waited(self, stream: _Stream, step: int, until: float, cause: str) -> None:
        """A stream goes on at a later time, because of some cause."""
        if until > stream.end:
            if stream.name == COMPUTE:
                self.waits[step][cause] += until - stream.end
            stream.end, stream.cause = until, cause

    def end_of(self, last: int) -> float:
        """When all has ended that was issued until the end of a step."""
        return max((time for step, time in self.ends.items() if step <= last), default=0.0)

    def share_beside(self, since: float) -> float:
        """The share of its compute since some time beside which collectives move bytes."""
        compute = [
            (max(begin, since), end)
            for lane, _, begin, end in self.spans
            if lane == "compute" and end > since
        ]
        total = sum(end - begin for begin, end in compute)
        return _overlap_s(compute, self.moving) / total if total else 0.0


def _overlap_s(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Seconds that lie in one of each of two lists of intervals, the first without overlaps."""
    joined: list[list[float]] = []
    for begin, end in sorted(others):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    total, at = 0.0, 0
    for begin, end in sorted(some):
        while at < len(joined) and joined[at][1] <= begin:
            at += 1
        for low, high in joined[at:]:
            if low >= end:
                break
            total += min(end, high) - max(begin, low)
    return total


_Actor = Iterator[Hashable]  # yields the key of what it waits for


class _Machine:
    """One run of all ranks. Hosts and streams are actors: each goes on until it needs something
    that has not ended. Once none can go on, the communication that was complete first begins."""

    def __init__(
        self,
        logs: Logs,
        links: _Links,
        prices: Callable[[Kernel], float],
        launch_s: float,
        factors: Mapping[int, float],
    ) -> None:
        self._logs, self._links, self._prices = logs, links, prices
        self._launch_s, self._factors = launch_s, factors
        self._ranks = {rank: _Rank() for rank in logs}
        self._ends: dict[Hashable, _End] = {}
        self._waiting: dict[Hashable, list[_Actor]] = defaultdict(list)
        self._todo: deque[_Actor] = deque(self._host(rank) for rank in logs)
        self._arrived: dict[Hashable, list[float]] = defaultdict(list)
        self._complete: list[tuple[float, int, Issued, RankPart]] = []
        self._number = count()
        self._free: dict[Hashable, float] = defaultdict(float)  # when a link is

    def run(self) -> dict[int, _Rank]:
        """Run all logs to their ends."""
        while self._todo or self._complete:
            while self._todo:
                actor = self._todo.popleft()
                for key in actor:
                    if key not in self._ends:
                        self._waiting[key].append(actor)
                        break
            if self._complete:
                ready, _, issued, part = heapq.heappop(self._complete)
                links: list[Hashable] = [part.ends]
                if not part.ends:
                    # One for which compute waits runs beside those of other streams, as with tensor
                    # parallelism, whose ranks no other collective has.
                    waits = issued.stream == COMPUTE
                    links = [(rank, part.among, waits) for rank in self._links.holders[part.key]]
                begin = max([ready, *(self._free[link] for link in links)])
                end = begin + self._links.seconds(issued, part)
                self._free |= dict.fromkeys(links, end)
                self._ended(part.key, end, lane_of(issued), begin)
        if self._waiting:
            keys = [key for key in self._waiting if key in self._links.holders]
            raise StuckError(f"the ranks wait for ever for {' and '.join(map(name_of, keys[:3]))}")
        return self._ranks

    def _ended(self, key: Hashable, time: float, cause: str, begin: float) -> None:
        self._ends[key] = _End(time, cause, begin)
        self._todo.extend(self._waiting.pop(key, ()))

    def _arrive(self, part: RankPart, time: float) -> bool:
        """One of those that take part has come; whether it was the last one that is here."""
        arrived = self._arrived[part.key]
        arrived.append(time)
        return len(arrived) == len(self._links.holders[part.key])

    def _host(self, rank: int) -> _Actor:
        log, now, step, at = self._logs[rank], 0.0, 0, 0
        while at < len(log):
            issued = log[at]
            at += 1
            if issued.kind == "kernel":
                run, kernels = self._run_at(log, at - 1, rank)
                self._give(rank, now, step, issued.stream, run)
                now += kernels * self._launch_s
                at += kernels - 1
            elif issued.kind == "place":
                step += issued.what == STEP
            elif issued.kind == "meet":
                (part,) = issued.parts
                if self._arrive(part, now):
                    latest = max(self._arrived[part.key])
                    self._ended(part.key, latest, "host", latest)
                yield part.key
                now = max(now, self._ends[part.key].time)
            elif issued.kind == "sync":
                for key in self._sync(rank, now, step, issued, at):
                    yield key
                    now = max(now, self._ends[key].time)
            else:
                now += self._launch_s * (issued.kind == "communication")
                self._give(rank, now, step, issued.stream, issued)
            ends = self._ranks[rank].ends
            ends[step] = max(ends[step], now)

    def _run_at(self, log: Sequence[Issued], at: int, rank: int) -> tuple[_Run, int]:
        """The kernels on one stream that begin at a place of a log, and how many they are."""
        stream, seconds, after, kernels = log[at].stream, 0.0, 0.0, 0
        factor = self._factors[rank] if stream == COMPUTE else 1.0
        for issued in islice(log, at, None):
            if issued.kind != "kernel" or issued.stream != stream:
                break
            assert issued.kernel is not None
            kernels += 1
            lasts = factor * self._prices(issued.kernel)
            seconds += lasts
            after = max(after, kernels * self._launch_s) + lasts
        return _Run(seconds, after), kernels

    def _sync(
        self, rank: int, now: float, step: int, sync: Issued, place: int
    ) -> Iterator[Hashable]:
        """The keys of what the host waits for: an event, or the ends of one stream or of all."""
        if sync.event:
            yield rank, sync.event
            return
        for stream in [sync.stream] if sync.stream else [*self._ranks[rank].streams]:
            event = (place, stream)
            self._give(rank, now, step, stream, Issued("record", stream, event))  # type: ignore[arg-type]
            yield rank, event

    def _give(
        self, rank: int, now: float, step: int, name: str | None, item: Issued | _Run
    ) -> None:
        """Put something into the queue of a stream."""
        assert name is not None
        stream = self._ranks[rank].streams.setdefault(name, _Stream(name))
        stream.queue.append((now, step, item))
        if not stream.runs:
            stream.runs = True
            self._todo.append(self._stream(rank, stream))

    def _stream(self, number: int, stream: _Stream) -> _Actor:
        rank = self._ranks[number]
        while stream.queue:
            issued_s, step, item = stream.queue.popleft()
            if isinstance(item, _Run):
                self._compute(rank, stream, issued_s, step, item)
            elif item.kind == "communication":
                rank.waited(stream, step, issued_s, "host")
                for part in item.parts:
                    if self._arrive(part, stream.end):
                        heapq.heappush(
                            self._complete,
                            (max(self._arrived[part.key]), next(self._number), item, part),
                        )
                for part in item.parts:
                    yield part.key
                    end = self._ends[part.key]
                    rank.waited(stream, step, end.time, end.cause)
                    lane = lane_of(item)
                    rank.spans.append((lane, item.what, end.begin, end.time))
                    if lane != "transfer":
                        rank.moving.append((end.begin + self._links.waits_s(item, part), end.time))
            elif item.kind == "wait":
                yield number, item.event
                end = self._ends[number, item.event]
                rank.waited(stream, step, end.time, end.cause)
            else:
                time = max(stream.end, issued_s)
                self._ended((number, item.event), time, stream.cause, time)
            rank.ends[step] = max(rank.ends[step], stream.end)
        stream.runs = False

    def _compute(self, rank: _Rank, stream: _Stream, issued_s: float, step: int, run: _Run) -> None:
        end = max(max(stream.end, issued_s) + run.seconds, issued_s + run.after_s)
        rank.waited(stream, step, end - run.seconds, "host")
        if stream.name == COMPUTE:
            begin, stream.cause = stream.end, "compute"
            rank.busy[step] += run.seconds
            if rank.spans and rank.spans[-1][0] == "compute" and rank.spans[-1][3] == begin:
                begin = rank.spans.pop()[2]
            rank.spans.append(("compute", "kernels", begin, end))
        stream.end = end
