"""What stands in for streams, events, messages and asynchronous collectives of torch, so that a
step on a CPU tells a ``VirtualDevice`` in which order it would give its work to a GPU."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from zeropp.emulate.device import Observer, VirtualDevice, size_of
from zeropp.emulate.log import Message
from zeropp.emulate.private_names import COALESCING, DisableTorchFunction, is_known
from zeropp.emulate.races import Races
from zeropp.engine.errors import ErrorBarrier
from zeropp.engine.lanes import streams_on_cpu

_ASYNCHRONOUS = (  # those that take ``async_op``
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "broadcast", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor",
)  # fmt: skip
_READ_BY_HOST = ("tolist", "cpu", "numpy")


class _Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._number, self._stream = 0, ""

    def record(self, stream: _Stream | None = None) -> None:
        self._stream = self._device.current if stream is None else stream.name
        self._number = self._device.record(self._stream)

    def wait(self, stream: _Stream | None = None, *, ended: bool = False) -> None:
        if self._number:
            name = self._device.current if stream is None else stream.name
            self._device.follow(name, self._number, ended=ended)

    def synchronize(self) -> None:
        if self._number:
            self._device.wait_on_host(self._stream, "Event.synchronize", self._number)

    def query(self) -> bool:
        return True


class _Stream:
    """Stands for ``torch.cuda.Stream``; two of one name are the same stream."""

    def __init__(self, device: VirtualDevice, name: str) -> None:
        self._device, self.name = device, name

    def wait_stream(self, other: _Stream) -> None:
        other.record_event().wait(self)

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(self._device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._device.wait_on_host(self.name, f"Stream.synchronize of {self.name}")

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class _VirtualWork(dist.Work):
    """Stands for what ``isend``, ``irecv`` and asynchronous collectives return: as on NCCL, the
    current stream waits. It keeps the tensors until then."""

    def __init__(
        self, device: VirtualDevice, inner: Sequence[Any], event: _Event, kept: object
    ) -> None:
        super().__init__()
        self._device, self._inner, self._event, self._kept = device, inner, event, kept
        self._ended = False  # as far as the host knows

    def wait(self, *_: object) -> bool:
        self._event.wait(ended=self._ended)
        for work in self._inner:
            work.wait()
        self._kept = None
        return True

    def is_completed(self) -> bool:
        self._ended = all(work.is_completed() for work in self._inner)
        return self._ended


@contextmanager
def emulated(device: VirtualDevice | None = None) -> Iterator[VirtualDevice]:
    """Inside this context, streams and events of ``torch.cuda`` (and ``torch.cpu``, whose streams
    do nothing otherwise) are virtual, and messages and collectives run as on NCCL. While races are
    looked for, groups are connected when they are made (``init_process_group(device_id=...)``), so
    that all messages of a group share one stream; otherwise every pair of ranks has its own, as
    where no device is named. Lanes of the engine that are made here are streams, and its barrier
    runs on the CPU, as beside NCCL. Without a ``device`` there is one that looks for races."""
    device = device or VirtualDevice(Races())
    observer = Observer(device)
    resized = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        device.resize(storage, partial(resized, storage, size))
        return storage

    def record_stream(tensor: Tensor, stream: _Stream) -> None:
        device.record_stream(tensor, stream.name)

    of_tensors = {name: _read(device, name, getattr(Tensor, name)) for name in _READ_BY_HOST}
    exchange = ErrorBarrier.exchange

    def exchange_on_cpu(barrier: ErrorBarrier, numbers: Sequence[int]) -> list[list[int]]:
        with device.unseen():
            rows = exchange(barrier, numbers)
        device.log.meet("the barrier", dist.get_world_size())
        return rows

    functions = _messages(device)
    for name in _ASYNCHRONOUS:
        if hasattr(dist, name):
            functions[name] = _collective(device, observer, getattr(dist, name))
    functions[COALESCING] = _coalesced(device, observer)
    stand_ins: dict[Any, dict[str, Any]] = {
        **dict.fromkeys((torch.cuda, torch.cpu, torch.accelerator), _streams(device)),
        torch.UntypedStorage: {"resize_": resize},
        Tensor: {**of_tensors, "record_stream": record_stream},
        ErrorBarrier: {"exchange": exchange_on_cpu},
        **_wherever_imported(functions),
    }
    with ExitStack() as undo:
        for owner, by_name in stand_ins.items():
            for name, stand_in in by_name.items():
                if hasattr(owner, name):
                    undo.enter_context(mock.patch.object(owner, name, stand_in))
        undo.enter_context(streams_on_cpu())
        undo.enter_context(observer)
        yield device


def _wherever_imported(functions: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """The stand-ins for functions of ``torch.distributed`` in all modules that have them, by
    whatever name: a program may have imported them before emulation began."""
    originals = {id(getattr(distributed_c10d, name)): one for name, one in functions.items()}
    found: dict[Any, dict[str, Any]] = {}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in originals:
                found.setdefault(module, {})[name] = originals[id(value)]
    return found


def _streams(device: VirtualDevice) -> dict[str, Any]:
    """The stand-ins for what ``torch.cuda`` has."""
    made = iter(range(1, 1 << 30))

    @contextmanager
    def stream(entered: _Stream | None) -> Iterator[None]:
        if not isinstance(entered, _Stream | None):
            raise TypeError(
                f"stream: {entered} was made before emulation began, which cannot follow it "
                "(make it inside; FSDP2 makes its streams in a model's first step)"
            )
        before, device.current = device.current, device.current if entered is None else entered.name
        try:
            yield
        finally:
            device.current = before

    def synchronize(*_: object) -> None:
        device.wait_on_host(None, "synchronize")

    return {
        "Stream": lambda *_, **__: _Stream(device, f"stream {next(made)}"),
        "Event": lambda *_, **__: _Event(device),
        "current_stream": lambda *_: _Stream(device, device.current),
        "stream": stream,
        "synchronize": synchronize,
    }


def _read(device: VirtualDevice, name: str, original: Any) -> Any:
    def read(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if not is_known(tensor):
            device.read_by_host(f"Tensor.{name}", [tensor])
        return original(tensor, *arguments, **keywords)

    return read


def _collective(device: VirtualDevice, observer: Observer, original: Any) -> Any:
    signature = inspect.signature(original)

    def call(*arguments: Any, **keywords: Any) -> Any:
        if not signature.bind(*arguments, **keywords).arguments.get("async_op"):
            return original(*arguments, **keywords)
        with observer.asynchronously() as issued:
            inner = original(*arguments, **keywords)
        # By a rank that does not take part, or with others later; or an older name of the function,
        # which has called the stand-in of the newer one.
        if not issued or isinstance(inner, _VirtualWork):
            return inner
        with device.unseen():  # gloo copies where it ends
            inner.wait()  # if the program forgets to, its memory may be gone by then
        event = _Stream(device, issued[-1]).record_event()
        return _VirtualWork(device, [], event, arguments)

    return call


def _coalesced(device: VirtualDevice, observer: Observer) -> Any:
    """The stand-in for what makes one kernel of several collectives, which are several here."""

    @contextmanager
    def manager(group: Any = None, on: Any = None, async_ops: bool = False) -> Iterator[Any]:
        del group, on
        event = _Event(device)
        with observer.asynchronously(async_ops) as issued:
            yield _VirtualWork(device, [], event, None)
        if issued:
            event.record(_Stream(device, issued[-1]))

    return manager


def _messages(device: VirtualDevice) -> dict[str, Any]:
    """The stand-ins for functions of ``torch.distributed`` that send and receive, by name."""
    originals = {name: getattr(dist, name) for name in ("isend", "irecv")}

    def single(kind: str) -> Any:
        signature, end = inspect.signature(originals[kind]), "dst" if kind == "isend" else "src"

        def issue(*arguments: Any, **keywords: Any) -> _VirtualWork:
            bound = signature.bind(*arguments, **keywords).arguments
            group: Any = bound.get("group") or dist.group.WORLD
            peer = bound.get(end)
            if peer is None:
                peer = dist.get_global_rank(group, bound[f"group_{end}"])
            call = partial(originals[kind], bound["tensor"], peer, group, bound.get("tag", 0))
            return _issue(device, [(kind, bound["tensor"], peer, group, call)], alone=True)

        return issue

    singles = {kind: single(kind) for kind in originals}
    names = {function: kind for kind, function in singles.items()}

    def batch(operations: Sequence[Any]) -> list[_VirtualWork]:
        calls = []
        for operation in operations:
            kind, group = names[operation.op], operation.group or dist.group.WORLD
            call = partial(originals[kind], operation.tensor, operation.peer, group, operation.tag)
            calls.append((kind, operation.tensor, operation.peer, group, call))
        return [_issue(device, calls, alone=False)]

    return {
        **singles,
        "send": lambda *arguments, **keywords: singles["isend"](*arguments, **keywords).wait(),
        "recv": lambda *arguments, **keywords: singles["irecv"](*arguments, **keywords).wait(),
        "batch_isend_irecv": batch,
    }


def _issue(
    device: VirtualDevice,
    calls: Sequence[tuple[str, Tensor, int, Any, Callable[[], Any]]],
    *,
    alone: bool,
) -> _VirtualWork:
    """Messages of one kernel, each as (kind, tensor, peer, group, call). It runs on a stream of its
    group, after what the current stream holds, and keeps the tensors' memory by ``record_stream``,
    as in ``ProcessGroupNCCL::pointToPoint``. A message that is no part of a batch runs on that of
    its pair, in a group that was not connected when it was made."""
    group = calls[0][3]
    name, rank = f"{group.group_desc} {group.group_name}", dist.get_rank()
    stream, key = f"nccl {name}", (name, tuple(dist.get_process_group_ranks(group)))
    if alone and not device.races:
        stream += f" {sorted((rank, calls[0][2]))}"
    _Stream(device, stream).wait_stream(_Stream(device, device.current))
    messages = []
    tensors: dict[str, list[Tensor]] = {"isend": [], "irecv": []}
    for kind, tensor, peer, *_ in calls:
        device.record_stream(tensor, stream)
        tensors[kind].append(tensor)
        pair = (rank, peer) if kind == "isend" else (peer, rank)
        content = f"{tuple(tensor.shape)} {tensor.dtype}"
        messages.append(Message(key, *pair, content, size_of(tensor)))
    what = ", ".join(f"{kind} {peer}" for kind, _, peer, *_ in calls)
    device.touch(stream, what, tensors["isend"], tensors["irecv"])
    device.log.messages(stream, messages, what)
    with DisableTorchFunction():  # a mode would give these to their stand-ins once more
        inner = [call() for *_, call in calls]
    event = _Stream(device, stream).record_event()
    return _VirtualWork(device, inner, event, [tensor for _, tensor, *_ in calls])
