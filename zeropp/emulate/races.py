"""Races and reuse of memory on one rank: which order CUDA would guarantee for what its streams do.

Each stream has a vector clock. An operation is ordered after those before it on its stream, after
the events that its stream has waited for, and after what the host has waited for. Two accesses of
the same bytes, one of them a write, that are not ordered are a race. Memory belongs to the stream
on which it was allocated, as in torch's caching allocator: it may be given to any later allocation
there, unless ``record_stream`` or an ordered use says otherwise.

A tensor is taken to be read or written from its first byte to its last. Numbers that the host reads
(``item``, ``tolist``, ``cpu``) order nothing, because the number may as well lie on the CPU.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType

import torch

from zeropp.emulate.log import here, shown

Clock = dict[str, int]  # by stream, the number of its last operation that has happened before
Extent = tuple[torch.UntypedStorage, int, int]  # storage, first byte, byte after the last


def _join(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if into.get(stream, 0) < time:
            into[stream] = time


@dataclass(frozen=True)
class Access:
    """One use of memory: bytes ``begin`` to ``end`` of a block, by an operation on a stream."""

    stream: str
    time: int
    write: bool
    begin: int
    end: int
    what: str
    where: tuple[tuple[CodeType, int], ...]

    def __str__(self) -> str:
        places = " < ".join(f"{shown(c.co_filename)}:{line} {c.co_name}" for c, line in self.where)
        return f"{'write' if self.write else 'read'} by {self.what} on {self.stream!r} at {places}"


@dataclass(frozen=True)
class Fault:
    """Two uses of memory that nothing orders. ``kind``: ``race``; ``reuse`` where memory was given
    to another tensor while it may still be in use; ``outside`` where there was no memory."""

    kind: str
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"{self.kind}: {self.first}\n   and {self.second}"


@dataclass(eq=False)
class _StorageUse:
    """The memory of one storage, from its allocation until it is freed."""

    stream: str  # on which it was allocated
    size: int
    accesses: dict[tuple[str, bool, int, int], Access] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)  # by record_stream


class Races:
    """The clocks of a device's streams, its memory, and what nothing orders so far.

    ``current`` is always the stream on which the host allocates.
    """

    def __init__(self) -> None:
        self._host: Clock = {}  # what the host has waited for
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, _StorageUse] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._freed: dict[str, list[Access]] = defaultdict(list)  # by the stream of their block
        self._faults: dict[tuple[object, ...], Fault] = {}

    @property
    def faults(self) -> list[Fault]:
        """What was found so far, each pair of places once."""
        return list(self._faults.values())

    def record(self, stream: str, event: int) -> None:
        """An event, which has happened once all that a stream holds has ended."""
        self._events[event] = clock = dict(self._clocks[stream])
        _join(clock, self._host)

    def follow(self, stream: str, event: int) -> None:
        """Let a stream wait for an event."""
        _join(self._clocks[stream], self._events[event])

    def host_follows(self, stream: str | None, event: int) -> None:
        """The host waits for an event, if its number is given, or for a stream, or for all."""
        streams = [*self._clocks] if stream is None else [stream]
        for clock in [self._events[event]] if event else map(self._clocks.__getitem__, streams):
            _join(self._host, clock)

    def run(
        self,
        stream: str,
        current: str,
        what: str,
        reads: Iterable[Extent],
        writes: Iterable[Extent],
    ) -> None:
        """An operation on a stream, which reads and writes these bytes."""
        clock = self._tick(stream)
        where = here()
        for write, extents in ((False, reads), (True, writes)):
            for storage, begin, end in extents:
                if begin < end:
                    access = Access(stream, clock[stream], write, begin, end, what, where)
                    self._access(self._block_of(storage, current), access, clock)

    def allocate(self, storage: torch.UntypedStorage, current: str, what: str) -> None:
        """New memory, unless it is known, which may have belonged to what was freed there."""
        if id(storage) in self._blocks:
            return
        block, stream = self._add(storage, current), current
        if not block.size:
            return
        clock = self._tick(stream)
        new = Access(stream, clock[stream], True, 0, block.size, what, here())
        for old in self._freed.pop(stream, ()):
            if clock.get(old.stream, 0) < old.time:
                self._report("reuse", old, new)
        block.accesses[stream, True, 0, block.size] = new

    def free(self, storage: int) -> None:
        """Give a storage's memory back to its stream. Accesses on streams of ``record_stream`` are
        waited for by the allocator; others must be ordered before the next allocation there."""
        block = self._blocks.pop(storage, None)
        if block is not None and block.size:
            self._freed[block.stream] += (
                access
                for access in block.accesses.values()
                if access.stream != block.stream and access.stream not in block.recorded
            )

    def record_stream(self, storage: torch.UntypedStorage, current: str, stream: str) -> None:
        """Keep memory until a stream has ended what it holds when the memory is freed."""
        self._block_of(storage, current).recorded.add(stream)

    def resize(
        self, storage: torch.UntypedStorage, current: str, resized: Callable[[], object]
    ) -> None:
        """Give a storage other memory, with ``resized``."""
        self._block_of(storage, current)
        self.free(id(storage))
        resized()
        self.allocate(storage, current, "resize_")

    def _tick(self, stream: str) -> Clock:
        clock = self._clocks[stream]
        _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _block_of(self, storage: torch.UntypedStorage, current: str) -> _StorageUse:
        """The block of a storage; one whose allocation was not seen was there before all."""
        return self._blocks.get(id(storage)) or self._add(storage, current)

    def _add(self, storage: torch.UntypedStorage, current: str) -> _StorageUse:
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._blocks[key] = block = _StorageUse(current, storage.nbytes())
        return block

    def _gone(self, key: int) -> None:
        del self._storages[key]
        self.free(key)

    def _access(self, block: _StorageUse, new: Access, clock: Clock) -> None:
        for old in block.accesses.values():
            if (
                old.stream != new.stream
                and (new.write or old.write)
                and old.begin < new.end
                and new.begin < old.end
                and clock.get(old.stream, 0) < old.time
            ):
                self._report("race", old, new)
        if new.end > block.size:
            self._report("outside", new, new)
        if new.write:  # later accesses that follow this one follow what it has covered, too
            block.accesses = {
                key: old
                for key, old in block.accesses.items()
                if old.begin < new.begin or old.end > new.end or clock.get(old.stream, 0) < old.time
            }
        block.accesses[new.stream, new.write, new.begin, new.end] = new

    def _report(self, kind: str, first: Access, second: Access) -> None:
        self._faults.setdefault(
            (kind, first.what, first.where, second.what, second.where), Fault(kind, first, second)
        )
