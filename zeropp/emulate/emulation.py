"""``emulated`` and ``watch``: streams, events, messages and asynchronous collectives of torch have
stand-ins, so that a step on a CPU tells a ``VirtualDevice`` in which order it would give its work
to a GPU. ``as_on_cuda``: so have operators that a GPU has otherwise than a CPU (RMSNorm, products
that add in fp32, what is compiled into one kernel). They allocate what they would there."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain, count
from types import FunctionType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from zeropp.emulate.device import Observer, VirtualDevice
from zeropp.emulate.kernels import Tensors, tensors_in
from zeropp.emulate.log import COMPUTE, Issued, Log, line_here
from zeropp.emulate.private_names import COALESCING, MANY_IN_ONE_KERNEL, is_known, without_modes
from zeropp.emulate.races import Races
from zeropp.emulate.rendezvous import hanging_waits, mismatches, stuck
from zeropp.emulate.world import like, replaced, wherever_imported
from zeropp.engine.layers import deferred
from zeropp.engine.ranks.errors import ErrorBarrier
from zeropp.engine.ranks.lanes import StreamLane, ThreadLane, Ticket, Work

_QUIET_S = 20.0  # a rank that issues nothing for so long tells what it waits for
_RETURN_WORK = ["isend", "irecv", "send", "recv"]
_RETURN_WORK += [
    name
    for name, function in vars(distributed_c10d).items()
    if type(function) is FunctionType and "async_op" in inspect.signature(function).parameters
]
_READ_BY_HOST = ("tolist", "cpu", "numpy")
_cpu_dropout, _cpu_attention = functional.dropout, functional.scaled_dot_product_attention


class _Event:
    """Stands for ``torch.cuda.Event``. Each device has a class of its own, as programs annotate
    with it."""

    _device: ClassVar[VirtualDevice]

    def __init__(self, *_: object, **__: object) -> None:
        self._number, self._stream = 0, ""

    def record(self, stream: _Stream | None = None) -> None:
        self._stream = self._device.current if stream is None else stream.name
        self._number = self._device.record(self._stream)

    def wait(self, stream: _Stream | None = None) -> None:
        if self._number:
            self._device.follow(
                self._device.current if stream is None else stream.name, self._number
            )

    def synchronize(self) -> None:
        if self._number:
            self._device.wait_on_host(self._stream, "Event.synchronize", self._number)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _Event) -> float:
        """Milliseconds, which are not known here; not 0, by which programs divide."""
        del end_event
        return 1.0


class _Stream:
    """Stands for ``torch.cuda.Stream``, with a class per device as well; two of one name are the
    same stream."""

    _device: ClassVar[VirtualDevice]
    _numbers: ClassVar[Iterator[int]]
    _event: ClassVar[type[_Event]]

    def __init__(self, *_: object, name: str = "", **__: object) -> None:
        self.name = name or f"stream {next(self._numbers)}"

    def wait_stream(self, stream: _Stream) -> None:
        stream.record_event().wait(self)

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or self._event()
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
        self,
        device: VirtualDevice,
        event: int = 0,
        kept: object = None,
    ) -> None:
        super().__init__()
        self._device, self.event, self.kept = device, event, kept
        self.inner: Sequence[Any] = ()
        self.places = 0, 0  # in the log, of what it stands for
        self._ended = False  # as far as the host knows

    def wait(self, *_: object) -> bool:
        if self.event:
            self._device.follow(self._device.current, self.event, ended=self._ended)
        for work in self.inner:
            work.wait()
        self._device.log.leave(*self.places)
        self.kept = None
        return True

    def is_completed(self) -> bool:
        self._ended = all(work.is_completed() for work in self.inner)
        return self._ended


@contextmanager
def emulated(device: VirtualDevice | None = None) -> Iterator[VirtualDevice]:
    """Inside this context, streams and events of ``torch.cuda`` (and ``torch.cpu``, whose streams
    do nothing otherwise) are virtual, and messages and collectives run as on NCCL. While races are
    looked for, and where a script says so, groups are connected when they are made
    (``init_process_group(device_id=...)``), so that all messages of a group share one stream;
    otherwise every pair of ranks has its own. Lanes of the engine that are made here are streams,
    and its barrier runs on the CPU, as beside NCCL. Without a ``device`` there is one that looks
    for races."""
    device = device or VirtualDevice(Races())
    observer = Observer(device)
    resized = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        device.resize(storage, partial(resized, storage, size))
        return storage

    def record_stream(tensor: Tensor, stream: _Stream) -> None:
        device.record_stream(tensor, stream.name)

    exchange = ErrorBarrier.exchange

    def exchange_on_cpu(barrier: ErrorBarrier, numbers: Sequence[int]) -> list[list[int]]:
        with device.unseen():
            rows = exchange(barrier, numbers)
        device.log.meet("the barrier", dist.get_world_size())
        return rows

    functions = {
        original: _with_work(device, observer, original)
        for original in [getattr(dist, name) for name in _RETURN_WORK]
    }
    functions[getattr(dist, COALESCING)] = coalesced = _coalesced(device, observer)
    functions[dist.batch_isend_irecv] = _batch(coalesced, dist.batch_isend_irecv)
    streams = [
        (module, name, call if isinstance(call, type) else like(getattr(module, name), call))
        for name, call in _streams(device).items()
        for module in (torch.cuda, torch.cpu, torch.accelerator)
        if hasattr(module, name)
    ]
    stand_ins = (
        *streams,
        (torch.UntypedStorage, "resize_", resize),
        (Tensor, "record_stream", record_stream),
        *((Tensor, name, _read(device, getattr(Tensor, name))) for name in _READ_BY_HOST),
        (ErrorBarrier, "exchange", exchange_on_cpu),
        *wherever_imported(functions),
        *_lanes(),
    )
    with replaced(*stand_ins), observer:
        yield device


def _lanes() -> Iterator[tuple[Any, str, Any]]:
    """What lets lanes of a CPU run their work on streams, also those that were made before."""
    run, close, streams = ThreadLane.run, ThreadLane.close, dict[ThreadLane, StreamLane]()

    def stream_of(lane: ThreadLane) -> StreamLane:
        if lane not in streams:
            run(lane, lambda: None).wait()  # what the thread has yet to do comes first
            streams[lane] = StreamLane(torch.device("cpu"), lane.name)
        return streams[lane]

    def on_stream(lane: ThreadLane, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
        return stream_of(lane).run(work, after)

    def closed(lane: ThreadLane) -> None:
        stream_of(lane).close()
        close(lane)

    yield ThreadLane, "run", on_stream
    yield ThreadLane, "close", closed


@dataclass(frozen=True)
class Report:
    """What ``watch`` has found on all ranks. ``faults``: races and reuse of memory, as text;
    ``unmatched``: messages and collectives that do not match; ``hangs``: by rank what it waits for
    without an end; ``hanging_waits``: by rank at how many of its places the host must not wait
    for its device (the allocator's retry, a kernel's first use), and at how many it may.
    ``host_waits``: by rank, what the host has waited for in the last run, in order; a number that
    it reads counts, also where it lies on the CPU. They are no fault."""

    faults: tuple[str, ...]
    unmatched: tuple[str, ...]
    hangs: dict[int, str]
    hanging_waits: dict[int, tuple[int, int]]
    host_waits: dict[int, tuple[str, ...]]

    @property
    def is_clean(self) -> bool:
        """Whether nothing races and everything ends, also where one host waits for its device."""
        return not (
            self.faults
            or self.unmatched
            or self.hangs
            or any(bad for bad, _ in self.hanging_waits.values())
        )

    def __str__(self) -> str:
        lines = [*self.faults, *(f"does not match: {mismatch}" for mismatch in self.unmatched)]
        lines += [f"hang: rank {rank}: {what}" for rank, what in self.hangs.items()]
        lines += [
            f"rank {rank}: a wait for the device would hang at {bad} of {bad + good} places"
            for rank, (bad, good) in self.hanging_waits.items()
            if bad
        ]
        return "\n".join(lines) or "no race, no hang"


@contextmanager
def _told_where_it_hangs(log: Log) -> Iterator[None]:
    """Inside this context a thread looks whether the log grows, and says once if it does not."""
    has_ended, rank = threading.Event(), dist.get_rank()
    log.where = line_here

    def say(why: str) -> None:
        print(f"rank {rank}: {why}; {log.last_entered()}", file=sys.stderr, flush=True)

    def look() -> None:
        seen, said = -1, -1
        while not has_ended.wait(_QUIET_S):
            now = len(log.issued)
            if now == seen != said:
                say(f"nothing has moved for {_QUIET_S:g} s")
                said = now
            seen = now

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    except Exception as error:
        say(type(error).__name__)
        raise
    finally:
        has_ended.set()


def watch(work: Callable[[], object], *, times: int = 1) -> Report:
    """Run ``work`` ``times`` times under emulation, on all ranks of the default process group
    (gloo, tensors on CPUs), and report what was found on any of them; every rank gets the
    same report.

    A rank on which nothing moves for 20 seconds, or whose ``work`` fails, prints to standard error
    which collectives and messages it has entered and not left, and goes on waiting.

    Streams that ``work`` uses must be made in it, except those of a ``zeropp.ParallelModel``, such
    as the one whose ``train_step`` it calls. All ranks must call this together.
    """
    begin, device = 0, VirtualDevice(Races())
    with _told_where_it_hangs(device.log):
        with emulated(device):
            for _ in range(times):
                begin = len(device.log.issued)
                work()
        log = device.log.issued
        last = tuple(issued.what for issued in log[begin:] if issued.kind == "sync")
        seen = ([f"rank {dist.get_rank()}: {fault}" for fault in device.faults], log, last)
        gathered: list[tuple[list[str], list[Issued], tuple[str, ...]]] = [([], [], ())]
        gathered *= dist.get_world_size()
        dist.all_gather_object(gathered, seen)
    texts, issued_by, waited = zip(*gathered, strict=True)
    logs = dict(enumerate(issued_by))
    hangs = stuck(logs)
    bad = {} if hangs else {rank: len(hanging_waits(logs, rank)) for rank in logs}
    waits = {rank: (count, len(logs[rank]) + 1 - count) for rank, count in bad.items()}
    return Report(
        tuple(chain.from_iterable(texts)),
        tuple(mismatches(logs)),
        hangs,
        waits,
        dict(enumerate(waited)),
    )


def as_on_cuda(device: VirtualDevice) -> AbstractContextManager[None]:
    """Inside this context, what differs on a GPU runs as there."""

    def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add in place without an allocation, like CUDA's kernel; the values do not matter."""
        device.kernel("aten::addmm_", [left, right], [total])

    return replaced(
        (functional, "rms_norm", partial(_rms_norm, device)),
        (functional, "dropout", _dropout),
        (functional, "scaled_dot_product_attention", _drops_inside),
        (deferred, "add_wide_product", add_wide_product),
        (*MANY_IN_ONE_KERNEL, _in_one_kernel),
    )


def _as_one(
    device: VirtualDevice, name: str, reads: Tensors, run: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What ``run`` gives, for which one kernel is noted, and none of its own."""
    with device.unseen():
        writes = run()
    device.kernel(name, reads, writes)
    return writes


def as_one_kernel(device: VirtualDevice, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a GPU runs as one compiled kernel, and that is not compiled here: a trace
    counts the tensors that it takes and returns, and not the temporaries on the way to them."""

    @wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with without_modes():
            result = function(*arguments, **keywords)
        reads, writes = tensors_in([arguments, keywords]), tensors_in(result)
        # An operator, by which a trace sees the storages of what was made.
        _as_one(device, function.__name__, reads, lambda: tuple(t.detach() for t in writes))
        return result

    return run


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what CUDA's ``_fused_rms_norm`` does; on CPUs torch computes RMSNorm in parts, and
    keeps each in fp32. The values are zeros, so that an optimizer finds no overflow."""

    @staticmethod
    def forward(ctx: Any, device: VirtualDevice, x: Tensor, weight: Tensor) -> Tensor:
        ctx.device = device
        ctx.save_for_backward(x, weight)
        return _as_one(
            device, "aten::_fused_rms_norm", [x, weight], lambda: (torch.zeros_like(x),)
        )[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once, because a recomputed block runs again for it

        def make() -> tuple[Tensor, ...]:
            return tuple(map(torch.zeros_like, saved))

        return None, *_as_one(ctx.device, "aten::_fused_rms_norm_backward", [grad, *saved], make)


def _rms_norm(
    device: VirtualDevice,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    del eps
    if isinstance(input, DTensor):  # each rank's part; gradients of its scales are partial sums
        if isinstance(weight, DTensor):
            sums = [Partial() if place.is_shard() else place for place in input.placements]
            weight = weight.to_local(grad_placements=sums)
        return DTensor.from_local(
            _rms_norm(device, input.to_local(), normalized_shape, weight),
            input.device_mesh,
            input.placements,
        )
    if weight is None:
        weight = input.detach().new_empty(normalized_shape)
    return _FusedRmsNorm.apply(device, input, weight)  # type: ignore[no-any-return, no-untyped-call]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One kernel, which also writes a mask of a byte per element; a CPU has three."""
    if not training or not 0 < p < 1 or inplace:
        return _cpu_dropout(input, p, training, inplace)
    dropped: Tensor = torch.ops.aten.native_dropout(input, p, True)[0]
    return dropped


def _drops_inside(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A GPU's kernel of attention drops scores itself; with dropout a CPU has no such kernel. Of
    DTensors, whose rules are for GPUs, it is what torch chooses for these types and masks."""
    if not isinstance(query, DTensor):
        return _cpu_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    inputs = query, key, value
    if attn_mask is None and query.dtype != torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(*inputs, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if attn_mask is not None and not attn_mask.is_floating_point():
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    keeps = torch.is_grad_enabled()
    result = kernel(*inputs, attn_mask, keeps, dropout_p, is_causal, scale=scale)
    return result[0]  # type: ignore[no-any-return]


def _in_one_kernel(tensors: Tensors, device: torch.device) -> bool:
    """Whether a GPU takes the norms of all of these in one kernel, as it does of plain tensors."""
    del device
    return not any(isinstance(tensor, DTensor) for tensor in tensors)


def _streams(device: VirtualDevice) -> dict[str, Any]:
    """The stand-ins for what ``torch.cuda`` has."""
    event: Any = type("Event", (_Event,), {"_device": device})
    stream: Any = type(
        "Stream", (_Stream,), {"_device": device, "_numbers": count(1), "_event": event}
    )

    @contextmanager
    def enter(stream: Any) -> Iterator[None]:
        if not isinstance(stream, _Stream | None):
            raise TypeError(
                f"stream: {stream} was made before emulation began, which cannot follow it "
                "(make it inside; FSDP2 makes its streams in a model's first step)"
            )
        with replaced((device, "current", stream.name if stream else device.current)):
            yield

    def set_stream(stream: _Stream) -> None:
        device.current = stream.name

    def synchronize() -> None:
        device.wait_on_host(None, "synchronize")

    return {
        "Stream": stream,
        "Event": event,
        "current_stream": lambda: stream(name=device.current),
        "default_stream": lambda: stream(name=COMPUTE),
        "stream": enter,
        "StreamContext": enter,
        "set_stream": set_stream,
        "synchronize": synchronize,
    }


def _read(device: VirtualDevice, original: Any) -> Any:
    """The stand-in for a method with which the host reads a tensor."""

    def read(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if not (is_known(tensor) or device.has_values(tensor)):
            device.read_by_host(f"Tensor.{original.__name__}", [tensor])
        return original(tensor, *arguments, **keywords)

    return read


def _with_work(device: VirtualDevice, observer: Observer, original: Any) -> Any:
    """The stand-in for a message, or for a collective that may be asynchronous."""
    signature = inspect.signature(original)
    is_collective = "async_op" in signature.parameters
    is_blocking = original.__name__ in ("send", "recv")

    @wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given, begin = signature.bind(*arguments, **keywords).arguments, len(device.log.issued)
        if is_blocking or (is_collective and not given.get("async_op")):
            result = original(*arguments, **keywords)
            device.log.leave(begin)
            return result
        with observer.asynchronously() as issued:
            inner = original(*arguments, **keywords)
        # By a rank that does not take part, or with others later; or this has called a stand-in
        # once more: that of a function's newer name, or its own in a mode for functions of torch.
        if not issued or isinstance(inner, _VirtualWork):
            return inner
        work = _VirtualWork(device, device.record(issued[-1]), (arguments, keywords))
        if not is_collective:
            work.inner, work.places = [inner], (begin, len(device.log.issued))
            return work
        with device.unseen():  # gloo copies where it ends
            inner.wait()  # if the program forgets to, its memory may be gone by then
        device.log.leave(begin)
        return work

    return call


def _coalesced(device: VirtualDevice, observer: Observer) -> Any:
    """The stand-in for what makes one kernel of several messages, or of several collectives, which
    are several here."""

    @contextmanager
    def manager(async_ops: bool) -> Iterator[_VirtualWork]:
        work = _VirtualWork(device)
        beside: AbstractContextManager[list[str]] = nullcontext([])
        if async_ops:
            beside = observer.asynchronously()
        begin = len(device.log.issued)
        with beside as issued, observer.in_one_kernel():
            yield work
        work.places = begin, len(device.log.issued)
        if issued:
            work.event = device.record(issued[-1])

    return like(getattr(dist, COALESCING), manager)


def _batch(coalesced: Any, original: Any) -> Any:
    def batch(p2p_op_list: Sequence[Any]) -> list[_VirtualWork]:
        with coalesced(async_ops=True) as work:
            work.inner, work.kept = original(p2p_op_list), p2p_op_list
        return [work]

    return like(original, batch)
