"""Virtual CUDA streams on a CPU: every operation runs at once, and what is noted is which order
CUDA would guarantee.

Each stream has a vector clock. An operation is ordered after those before it on its stream, after
the events that its stream has waited for, and after what the host has waited for. Two accesses of
the same bytes, one of them a write, that are not ordered are a race. Memory belongs to the stream
on which it was allocated, as in torch's caching allocator: it may be given to any later allocation
there, unless ``record_stream`` or an ordered use says otherwise.

A tensor is taken to be read or written from its first byte to its last. Numbers that the host reads
(``item``, ``tolist``, ``cpu``) order nothing, because the number may as well lie on the CPU.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from zeropp.emulate.private_names import group_of
from zeropp.emulate.rendezvous import Log
from zeropp.engine.private_names import TorchDispatchMode

Clock = dict[str, int]  # by stream, the number of its last operation that has happened before
Extent = tuple[torch.UntypedStorage, int, int]  # storage, first byte, byte after the last
COMPUTE = "compute"
_DEPTH = 4  # frames of the caller that a fault shows
_NOT_SHOWN = ("/torch/", "zeropp/emulate/", "/contextlib.py", "<frozen", "/threading.py")

# The arguments of collectives that are read and written, by place.
_IN_PLACE = "allreduce_ allreduce_coalesced_ broadcast_ reduce_ barrier"
_FROM_SECOND = (
    "_allgather_base_ allgather_ allgather_into_tensor_coalesced_ _reduce_scatter_base_ "
    "reduce_scatter_ reduce_scatter_tensor_coalesced_ alltoall_ alltoall_base_ gather_ scatter_"
)
COLLECTIVES = {
    **{f"c10d::{name}": (0, 0) for name in _IN_PLACE.split()},
    **{f"c10d::{name}": (1, 0) for name in _FROM_SECOND.split()},
}
# Operators that run nothing on the device.
_NOTHING = {
    f"aten::{name}" for name in ("set_", "detach", "alias", "is_same_size", "record_stream")
}
_EMPTY = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided")}
_EMPTY |= {f"aten::{name}" for name in ("new_empty", "new_empty_strided")}
_READ_BY_HOST = {f"aten::{name}" for name in ("_local_scalar_dense", "equal", "nonzero")}


def _join(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if into.get(stream, 0) < time:
            into[stream] = time


@cache
def _shown(code: CodeType) -> str:
    """The file of some code, as faults show it; empty for that of torch and of this package."""
    name = code.co_filename
    return "" if any(part in name for part in _NOT_SHOWN) else "/".join(name.split("/")[-2:])


def _here() -> tuple[tuple[CodeType, int], ...]:
    """Where the caller is, outside of torch and of this package; innermost first."""
    frame: FrameType | None = sys._getframe(1)
    places: list[tuple[CodeType, int]] = []
    while frame is not None and len(places) < _DEPTH:
        if _shown(frame.f_code):
            places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(places)


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
        places = " < ".join(f"{_shown(c)}:{line} {c.co_name}" for c, line in self.where)
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


class VirtualDevice:
    """A GPU that one rank seems to have: its streams, memory, faults so far, and the ``log`` of
    what its host has issued."""

    def __init__(self) -> None:
        self.log = Log()
        self.host: Clock = {}  # what the host has waited for
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._blocks: dict[int, _StorageUse] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._freed: dict[str, list[Access]] = defaultdict(list)  # by the stream of their block
        self._faults: dict[tuple[object, ...], Fault] = {}
        self._local = threading.local()
        self.sees = True

    @property
    def faults(self) -> list[Fault]:
        """What was found so far, each pair of places once."""
        return list(self._faults.values())

    @property
    def current(self) -> str:
        """The current stream of this thread."""
        name: str = getattr(self._local, "stream", COMPUTE)
        return name

    @current.setter
    def current(self, stream: str) -> None:
        self._local.stream = stream

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside this context, nothing that this thread does is noted: it is on the CPU for real
        (a group of gloo beside one of NCCL, for example)."""
        before, self.sees = self.sees, False
        try:
            yield
        finally:
            self.sees = before

    def snapshot(self, stream: str) -> Clock:
        """What has happened once all that a stream holds has ended."""
        clock = dict(self._clocks[stream])
        _join(clock, self.host)
        return clock

    def follow(self, stream: str, clock: Clock, event: int) -> None:
        """Let a stream wait for an event, which was recorded when this clock was true."""
        _join(self._clocks[stream], clock)
        self.log.wait(stream, event)

    def wait_on_host(self, clock: Clock | None, stream: str | None, what: str) -> None:
        """The host waits for a stream or for the whole device. Without a clock, what it waits for
        is not ordered by it."""
        if self.sees:
            _join(self.host, clock or {})
            self.log.sync(stream, what)

    def everything(self) -> Clock:
        """What has happened once the device has ended all."""
        clock: Clock = {}
        for other in self._clocks.values():
            _join(clock, other)
        return clock

    def run(
        self, stream: str, what: str, reads: Iterable[Extent], writes: Iterable[Extent]
    ) -> None:
        """An operation on a stream, which reads and writes these bytes."""
        clock = self._tick(stream)
        where = _here()
        for write, extents in ((False, reads), (True, writes)):
            for storage, begin, end in extents:
                if begin < end:
                    access = Access(stream, clock[stream], write, begin, end, what, where)
                    self._access(self._block_of(storage), access, clock)

    def allocate(self, storage: torch.UntypedStorage, what: str) -> None:
        """New memory on the current stream, which may have belonged to what was freed there."""
        block = self._add(storage)
        if not block.size:
            return
        stream = self.current
        clock = self._tick(stream)
        new = Access(stream, clock[stream], True, 0, block.size, what, _here())
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

    def record_stream(self, storage: torch.UntypedStorage, stream: str) -> None:
        """Keep memory until a stream has ended what it holds when the memory is freed."""
        self._block_of(storage).recorded.add(stream)

    def resize(self, storage: torch.UntypedStorage, resized: Any, size: int) -> None:
        """Give a storage other memory of so many bytes, with ``resized``."""
        self._block_of(storage)
        self.free(id(storage))
        resized(storage, size)
        self.allocate(storage, "resize_")

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether the allocation of a storage was seen."""
        return id(storage) in self._blocks

    def _tick(self, stream: str) -> Clock:
        clock = self._clocks[stream]
        _join(clock, self.host)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _block_of(self, storage: torch.UntypedStorage) -> _StorageUse:
        """The block of a storage; one whose allocation was not seen was there before all."""
        return self._blocks.get(id(storage)) or self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> _StorageUse:
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._blocks[key] = block = _StorageUse(self.current, storage.nbytes())
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
        key = (kind, first.what, first.where, second.what, second.where)
        self._faults.setdefault(key, Fault(kind, first, second))


def extent(tensor: Tensor) -> Extent:
    """The bytes from a tensor's first element to its last."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    if not tensor.numel():
        return storage, 0, 0
    begin = int(tensor.storage_offset())
    last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return storage, begin * size, (last + 1) * size


def tensors_in(value: object) -> list[Tensor]:
    """The tensors with memory in an argument of an operator."""
    if isinstance(value, Tensor):
        return [value] if value.layout == torch.strided and not value.is_meta else []
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a virtual device of every operator and collective that runs inside this context.

    What an operator reads and writes is told by its schema. One outside of torch's own (``aten``)
    that gives back memory which it was given is taken to have written it.
    """

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.asynchronous = False  # whether collectives run on a stream of their group
        self.stream = ""  # of the last such

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors: its own operators come back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name: str = func._schema.name
        if not self._device.sees or name in ("c10d::send", "c10d::recv_"):
            return result  # told by who called them, who know the peer
        if name.startswith("c10d::"):
            self._collective(name, args)
        elif name not in _NOTHING and not name.startswith(("prim::", "profiler::")):
            arguments = [
                (argument, args[place] if place < len(args) else kwargs.get(argument.name))
                for place, argument in enumerate(func._schema.arguments)
            ]
            self._operator(name, arguments, result)
        return result

    def _operator(self, name: str, arguments: Sequence[tuple[Any, Any]], result: Any) -> None:
        device, stream = self._device, self._device.current
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for argument, value in arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(tensors_in(value))
        known = {id(tensor.untyped_storage()) for tensor in (*reads, *writes)}
        outputs = tensors_in(result)
        new = [tensor for tensor in outputs if id(tensor.untyped_storage()) not in known]
        if outputs and not new and not writes:
            if name.startswith("aten::"):
                return  # a view
            writes = outputs
        for tensor in new:
            if not device.knows(tensor.untyped_storage()):
                device.allocate(tensor.untyped_storage(), name)
        if name in _EMPTY:
            return
        device.run(stream, name, map(extent, reads), map(extent, (*writes, *new)))
        device.log.kernel(stream)
        if name in _READ_BY_HOST:
            device.wait_on_host(None, stream, f"a number that {name} gives the host")

    def _collective(self, name: str, args: Sequence[Any]) -> None:
        if name not in COLLECTIVES:
            raise NotImplementedError(
                f"{name}: not known to zeropp.emulate (add it to COLLECTIVES)"
            )
        device, stream = self._device, self._device.current
        group, ranks = next(known for argument in args if (known := group_of(argument)) is not None)
        if self.asynchronous:
            event, clock = device.log.record(stream), device.snapshot(stream)
            self.stream = stream = f"nccl {group}"
            device.follow(stream, clock, event)
        read, written = (tensors_in(args[place]) for place in COLLECTIVES[name])
        device.run(stream, name, map(extent, read), map(extent, written))
        device.log.collective(stream, (group, ranks), len(ranks), name)
