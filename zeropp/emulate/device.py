"""A GPU that one rank seems to have: every operation runs at once, on the CPU or with fake tensors,
and what is noted is on which stream the host would have given it to the device, and after what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.emulate.kernels import (
    Tensors,
    all_tensors_in,
    arguments_of,
    new_of,
    size_of,
    tensors_in,
)
from zeropp.emulate.log import COMPUTE, Kernel, Log, Message
from zeropp.emulate.memory import Allocations
from zeropp.emulate.private_names import (
    NUMBER_OF,
    group_of,
    is_composite,
    is_fake,
    is_known,
    without_modes,
)
from zeropp.emulate.races import Extent, Fault, Races
from zeropp.emulate.world import replaced, taken_for_granted
from zeropp.engine.private_names import TorchDispatchMode

Group = tuple[str, tuple[int, ...]]  # a process group: its name and its ranks
# From an operator's name, the tensors that it reads and that it writes, and its arguments by name.
Describe = Callable[[str, Tensors, Tensors, Mapping[str, Any]], Kernel]

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
# Of these, and of functional ones, ranks may have other numbers of elements than their peers.
_UNEVEN = re.compile(r"::(allgather_|reduce_scatter_|gather_|scatter_|all_?to_?all.*)$")
# Operators that run nothing on the device.
_NOTHING = {
    f"aten::{name}" for name in ("set_", "detach", "alias", "is_same_size", "record_stream")
}
_EMPTY = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided")}
_EMPTY |= {f"aten::{name}" for name in ("new_empty", "new_empty_strided")}
_NONE: Mapping[str, Any] = {}
_READ_BY_HOST = {
    f"aten::{name}" for name in ("_local_scalar_dense", "equal", "nonzero", "masked_select")
}
_MESSAGES = {"c10d::send": "isend", "c10d::recv_": "irecv"}
_BARRIER = "c10d::barrier"
_FUNCTIONAL = "_c10d_functional::"  # collectives with a result, those of DTensor for example
_NEW = "aten::lift_fresh"  # by which a tensor that has just been made from numbers becomes fake
_WAIT = f"{_FUNCTIONAL}wait_tensor"


def extent(tensor: Tensor) -> Extent:
    """The bytes from a tensor's first element to its last."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    if not tensor.numel():
        return storage, 0, 0
    begin = int(tensor.storage_offset())
    last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return storage, begin * size, (last + 1) * size


class VirtualDevice:
    """What the host of one rank gives its device goes into ``log``.

    ``races``: what looks for races, which makes a step several times slower; ``memory``: what
    counts allocations; None: nobody does. ``describe``: what a kernel is in the log, from an
    operator's name, arguments and results; None: nothing but its stream.
    """

    def __init__(
        self,
        races: Races | None = None,
        memory: Allocations | None = None,
        describe: Describe | None = None,
    ) -> None:
        self.log = Log()
        self.races, self.memory, self.describe = races, memory, describe
        self.current = COMPUTE  # the current stream
        # Whether groups are connected when they are made, so that all messages of a group share
        # one stream; otherwise every pair of ranks has its own.
        self.is_connected = races is not None
        self.sees = True
        self.is_faked = False  # whether tensors with values are those that the host has made

    @property
    def faults(self) -> list[Fault]:
        """The races that were found so far."""
        return self.races.faults if self.races else []

    def has_values(self, operands: object) -> bool:
        """Whether there are tensors among the operands, and all of them keep their values."""
        tensors = all_tensors_in(operands) if self.is_faked else []
        return bool(tensors) and not any(map(is_fake, tensors))

    def unseen(self) -> AbstractContextManager[None]:
        """Inside this context, nothing is noted: what is done is on the CPU for real (by a group of
        gloo beside one of NCCL, for example)."""
        return replaced((self, "sees", False))

    def record(self, stream: str) -> int:
        """Record an event on a stream; returns its number."""
        event = self.log.record(stream)
        if self.races:
            self.races.record(stream, event)
        return event

    def follow(self, stream: str, event: int, *, ended: bool = False) -> None:
        """Let a stream wait for an event. Where the host knows that what it stands for has
        ``ended``, this orders what follows, but takes no time."""
        if not ended:
            self.log.wait(stream, event)
        if self.races:
            self.races.follow(stream, event)

    def wait_on_host(self, stream: str | None, what: str, event: int = 0) -> None:
        """The host waits for a stream, for one event on it, or with None for the whole device."""
        if self.sees:
            self.log.sync(stream, what, event)
            if self.races:
                self.races.host_follows(stream, event)

    def read_by_host(self, what: str, reads: Tensors = ()) -> None:
        """The host reads numbers of these tensors, which may lie on the CPU, so that this orders
        nothing."""
        if self.sees:
            self.touch(self.current, what, reads, ())
            self.log.sync(self.current, what)

    def kernel(
        self, what: str, reads: Tensors, writes: Tensors, arguments: Mapping[str, Any] = _NONE
    ) -> None:
        """A kernel on the current stream that reads and writes these tensors."""
        self.touch(self.current, what, reads, writes)
        kernel = self.describe(what, reads, writes, arguments) if self.describe else None
        self.log.kernel(self.current, kernel)

    def touch(self, stream: str, what: str, reads: Tensors, writes: Tensors) -> None:
        """What a stream runs reads and writes these tensors."""
        if self.races:
            self.races.run(stream, self.current, what, map(extent, reads), map(extent, writes))

    def allocate(self, storage: torch.UntypedStorage, what: str) -> None:
        """New memory on the current stream, unless it is known."""
        if self.races:
            self.races.allocate(storage, self.current, what)

    def resize(self, storage: torch.UntypedStorage, resized: Callable[[], object]) -> None:
        """Give a storage other memory, with ``resized``."""
        if self.races:
            self.races.resize(storage, self.current, resized)
        else:
            resized()
        if self.memory:
            self.memory.resized(storage)

    def record_stream(self, tensor: Tensor, stream: str) -> None:
        """Keep a tensor's memory until a stream has ended what it holds when it is freed."""
        if self.races:
            self.races.record_stream(tensor.untyped_storage(), self.current, stream)


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a virtual device of every operator and collective that runs inside this context.

    What an operator reads and writes stands in its schema. One outside of torch's own (``aten``)
    that gives back memory which it was given is taken to have written it.
    """

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._issued: list[str] | None = None  # inside ``asynchronously``
        # Inside ``in_one_kernel``: messages as (``isend`` or ``irecv``, the tensor, the message).
        self._batch: list[tuple[str, Tensor, Message]] | None = None
        # Of functional collectives nobody has waited for, by the identity of their results' memory:
        # the event of their end, what they read, which NCCL keeps until then, and their place.
        self._unwaited: dict[int, tuple[int, Tensors, int]] = {}

    @contextmanager
    def asynchronously(self) -> Iterator[list[str]]:
        """Inside this context collectives run on a stream of their group; yields a list that gets
        the names of these streams."""
        outside, issued = self._issued, list[str]()
        with replaced((self, "_issued", issued)):
            yield issued
        if outside is not None:
            outside.extend(issued)

    @contextmanager
    def in_one_kernel(self) -> Iterator[None]:
        """Inside this context messages are collected; at its end one kernel exchanges them."""
        batch: list[tuple[str, Tensor, Message]] = []
        with replaced((self, "_batch", batch)):
            yield
        if batch:
            group: Any = batch[0][2].group
            self._exchange(batch, group[0])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors: its own operators come back here
        kwargs = kwargs or {}
        name: str = func._schema.name
        whole = torch.is_inference_mode_enabled() and name.startswith("aten::")
        if whole and is_composite(func):  # elsewhere autograd has taken it apart
            with self:
                return func.decompose(*args, **kwargs)
        if name == _WAIT and is_fake(args[0]):  # torch's own stand-in for it makes a copy
            return self._waited(args[0])
        if func is NUMBER_OF and is_fake(args[0]) and not is_known(args[0]):
            result: Any = taken_for_granted(args[0])
        elif self._device.has_values([args, kwargs]) and name != _NEW:
            with without_modes():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if self._device.memory:
            self._device.memory.returned(func, args, kwargs, tensors_in(result))
        if not self._device.sees:
            return result
        if name in _MESSAGES:
            self._message(_MESSAGES[name], *args)
        elif name.startswith("c10d::"):
            self._collective(name, args)
        elif name == _WAIT:
            return self._waited(result)
        elif name not in _NOTHING and not name.startswith(("prim::", "profiler::")):
            tell = self._functional if name.startswith(_FUNCTIONAL) else self._operator
            tell(func, arguments_of(func, args, kwargs), result)
        return result

    def _operator(self, func: Any, given: Mapping[str, Any], result: Any) -> None:
        device, name = self._device, func._schema.name
        changed = {argument.name for argument in func._schema.arguments if argument.is_write}
        reads = tensors_in([value for key, value in given.items() if key not in changed])
        writes = tensors_in([value for key, value in given.items() if key in changed])
        outputs = tensors_in(result)
        new = new_of(outputs, [*reads, *writes])
        if outputs and not new and not writes:
            if name.startswith("aten::"):
                return  # a view
            writes = outputs
        for tensor in new:
            device.allocate(tensor.untyped_storage(), name)
        known = (is_known(read) or device.has_values(read) for read in reads)
        is_of_host = all(known) and not any(map(torch.is_floating_point, reads))
        if name in _EMPTY or (reads and is_of_host):  # of integers that the host knows
            return
        device.kernel(name, reads, [*writes, *new], given)
        # Rows are picked by a mask, whose count the host has to know.
        is_masked = any(index.dtype in (torch.bool, torch.uint8) for index in reads[1:])
        if name in _READ_BY_HOST or (name == "aten::index" and is_masked):
            device.read_by_host(f"a number that {name} gives the host")

    def _stream_of(self, communicator: str) -> str:
        """The stream of a communicator, which follows what the current stream holds."""
        device, stream = self._device, f"nccl {communicator}"
        device.follow(stream, device.record(device.current))
        if self._issued is not None:
            self._issued.append(stream)
        return stream

    def _message(self, kind: str, tensors: Tensors, boxed: object, place: int, *_: object) -> None:
        """A message that is no part of a batch runs on the stream of its pair of ranks, unless all
        groups were connected when they were made."""
        group, tensor, rank = group_of(boxed), tensors[0], dist.get_rank()
        assert group is not None
        peer = group[1][place]
        ends = (rank, peer) if kind == "isend" else (peer, rank)
        # One number is one number: torch 2.11's pipelines send () where (1,) is received.
        content = f"{tuple(tensor.shape) or (1,)} {tensor.dtype}"
        message = Message(group, *ends, content, size_of(tensor))
        if self._batch is not None:
            self._batch.append((kind, tensor, message))
        elif self._device.is_connected:
            self._exchange([(kind, tensor, message)], group[0])
        else:
            self._exchange([(kind, tensor, message)], f"{group[0]} {sorted(ends)}")

    def _exchange(self, batch: Sequence[tuple[str, Tensor, Message]], communicator: str) -> None:
        """One kernel with these messages, on a stream of its own after what the current stream
        holds. It keeps the tensors' memory by ``record_stream``, as in
        ``ProcessGroupNCCL::pointToPoint``."""
        device, stream = self._device, self._stream_of(communicator)
        for _, tensor, _ in batch:
            device.record_stream(tensor, stream)
        sent, received = ([t for k, t, _ in batch if k == kind] for kind in ("isend", "irecv"))
        what = ", ".join(f"{k} {m.target if k == 'isend' else m.source}" for k, _, m in batch)
        device.touch(stream, what, sent, received)
        device.log.messages(stream, [message for *_, message in batch], what)

    def _collective(self, name: str, args: Sequence[Any]) -> None:
        if name not in COLLECTIVES:
            raise NotImplementedError(
                f"{name}: not known to zeropp.emulate (add it to COLLECTIVES)"
            )
        group = next(known for argument in args if (known := group_of(argument)) is not None)
        read, written = (tensors_in(args[place]) for place in COLLECTIVES[name])
        stream = self._issue(name, group, read, written)
        if name == _BARRIER:
            self._device.wait_on_host(stream, "barrier")

    def _functional(self, func: Any, given: Mapping[str, Any], result: Any) -> None:
        """A collective on its group's stream, after which a stream is that waits for its result."""
        device, name = self._device, func._schema.name
        read, written = tensors_in([*given.values()]), tensors_in(result)
        group = group_of(given["group_name"])
        assert group is not None
        for tensor in written:
            device.allocate(tensor.untyped_storage(), name)
        with self.asynchronously():
            event = device.record(self._issue(name, group, read, written))
        for tensor in written:
            place = len(device.log.issued) - 2  # before the event
            self._unwaited[id(tensor.untyped_storage())] = event, read, place

    def _waited(self, result: Tensor) -> Tensor:
        """What a collective has made, for which the current stream waits."""
        event, _, place = self._unwaited.pop(id(result.untyped_storage()), (0, (), 0))
        if event:
            self._device.log.leave(place, place + 1)
            self._device.follow(self._device.current, event)
        return result

    def _issue(self, name: str, group: Group, read: Tensors, written: Tensors) -> str:
        """Note a collective; returns its stream."""
        device = self._device
        stream = device.current if self._issued is None else self._stream_of(group[0])
        device.touch(stream, name, read, written)
        moved = max(sum(map(size_of, tensors)) for tensors in (read, written))
        # The type and the number of elements that all ranks of a collective must have.
        types = {str(tensor.dtype).removeprefix("torch.") for tensor in (*read, *written)}
        size = f" of {' and '.join(sorted(types))}"
        if not _UNEVEN.search(name):
            size += (
                f", {max(sum(t.numel() for t in tensors) for tensors in (read, written))} elements"
            )
        device.log.collective(stream, group, len(group[1]), name, moved, size)
        return stream
