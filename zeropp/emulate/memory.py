"""Traces the memory of one rank of a large job, alone on any machine, with the contender's own
code.

The rank builds its trainer and runs a whole step in a ``fake_world``, with fake tensors: every
allocation is made, but none takes memory. The numbers are exact except for the allocator's
rounding, what kernels allocate inside, and what network libraries keep. A contender that cannot run
with fake tensors gets real ones.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zeropp.emulate.private_names import (
    FSDP_COPY_IN,
    FSDP_GATHERED,
    FSDP_GRADIENTS,
    FSDP_REDUCED_COPY,
    NUMBER_OF,
    REDUCE_SCATTER,
    SHAPES_BY_TRIAL,
    FakeTensorMode,
    autograd_run,
    unsharded_gradient,
    without_modes,
)
from zeropp.engine import deferred, flat, walk
from zeropp.engine.errors import ErrorBarrier
from zeropp.engine.interpreter import Evaluator, Passed
from zeropp.engine.lanes import inline_lanes
from zeropp.engine.private_names import TorchDispatchMode
from zeropp.plan import MemoryBytes, Plan
from zeropp.training import OptimizerConfig, Trainer

Fill = Callable[[Tensor], None]


@contextmanager
def fake_world(rank: int, size: int, fill_integers: Fill | None = None) -> Iterator[None]:
    """Inside this context the process is rank ``rank`` of ``size``, for torch and in the usual
    environment variables. The process group answers at once: a gather copies this rank's part into
    the place of every part, and a reduction returns this rank's part. What peers would say is what
    this rank says, and what would pass between stages is what the walk over the layers has found.

    ``fill_integers`` fills a received message of integers with what peers would have sent; messages
    of floating-point numbers are random, because products of zeros are faster on a GPU. With None,
    messages are not filled (fake tensors have no values).
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=rank, world_size=size)
    messages = ("recv", "irecv")
    originals = {n: getattr(distributed_c10d, n) for n in (*messages, "all_gather_object")}
    work: Any = type(dist.all_reduce(torch.zeros(1), async_op=True))
    completed = work.is_completed
    # A send ends at once; otherwise its tensor would be kept until the end of the step.
    work.is_completed = lambda _: True
    try:
        _replace({"all_gather_object": _same_everywhere})
        if fill_integers is not None:
            _replace({name: _filled(originals[name], fill_integers) for name in messages})
        with (
            inline_lanes(),
            mock.patch.object(ErrorBarrier, "exchange", lambda _, numbers: [list(numbers)] * size),
            mock.patch.object(Evaluator, "boundaries", _known_boundaries),
        ):
            yield
    finally:
        _replace(originals)
        work.is_completed = completed
        dist.destroy_process_group()


def _filled(original: Any, fill_integers: Fill) -> Any:
    def receive(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                fill_integers(tensor)
        return original(tensor, *arguments, **keywords)

    return receive


def _same_everywhere(objects: list[Any], local: Any, group: object = None) -> None:
    del group
    objects[:] = [local] * len(objects)


def _known_boundaries(evaluator: Evaluator, batch: object) -> Passed:
    """The shapes that the chunks were made for: there are no peers to run a microbatch with."""
    del batch
    passed: Passed = {}
    for stage, chunk in evaluator.chunks.items():
        passed |= {stage: chunk.arriving} if chunk.arriving else {}
        passed |= {stage + 1: chunk.leaving} if chunk.leaving else {}
    return passed


def _replace(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        for module in (dist, distributed_c10d):  # torch's batched messages compare them by identity
            setattr(module, name, function)


Kind = Literal["parameters", "unsharded", "gradients", "optimizer", "activations", "workspace"]


@dataclass(eq=False)
class _Allocation:
    """One storage, from its allocation until it is freed."""

    size: int
    kind: Kind | None
    first: int  # the pass (forward or run of autograd) that allocated it
    last: int = -1  # the pass in which it was freed; -1: not freed

    def sorted_kind(self) -> Kind:
        """The kind of the storage, once the step is over."""
        return self.kind or ("workspace" if self.first == self.last else "activations")


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that is allocated, freed or resized, and sorts it by kind.

    Storages that are allocated while the trainer is built are parameters. Those that are allocated
    in the optimizer's step are its state; it exists from the beginning of every later step, so it
    is counted from the beginning of this one. What FSDP2 gathers, and the engine's buffers, are
    unsharded parameters; what the optimizer or FSDP2's reduction reads are gradients. Of the
    others, a storage that outlives the forward or the run of autograd that allocated it is an
    activation. All else, and the copies that reductions make, is workspace. ``kind`` is the kind of
    storages that are allocated from now on; None: it is found out at the end of the step.
    """

    def __init__(self, *, fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self.kind: Kind | None = None
        # By the identity of the storage's Python object, of which torch keeps one while it lives.
        self._live: dict[int, tuple[_Allocation, Any]] = {}
        self._events: list[tuple[_Allocation, int]] = []
        self._pass, self._run = 0, -1

    def begin_step(self) -> None:
        """Begin a step: storages that are still allocated count, and earlier events do not."""
        self._events = [(allocation, allocation.size) for allocation, _ in self._live.values()]

    def label(self, tensor: Tensor, kind: Kind) -> None:
        """Set the kind of a tensor's storage."""
        entry = self._live.get(id(_local_part(tensor).untyped_storage()))
        if entry is not None and entry[0].kind is None:
            entry[0].kind = kind

    def peak(self) -> MemoryBytes:
        """Bytes by kind at the highest total since ``begin_step``, with the optimizer's state,
        which counts from the beginning of the step."""
        state = {allocation for allocation, _ in self._live.values()}
        state = {allocation for allocation in state if allocation.kind == "optimizer"}
        events = sorted(self._events, key=lambda event: event[0] not in state)
        total = peak = at = 0
        for index, (_, size) in enumerate(events):
            total += size
            if total > peak:
                peak, at = total, index
        kinds: Counter[str] = Counter()
        for allocation, size in events[: at + 1]:
            kinds[allocation.sorted_kind()] += size
        return MemoryBytes(**kinds)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized, as FSDP2 does to free gathered parameters."""
        self._forget(id(storage))
        self._add(storage, "unsharded")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with local tensors
        if self._fake and func is NUMBER_OF:
            # Fake tensors have no values. Torch's pipeline stages read a 1: shapes are known.
            return 0.0 if args[0].is_floating_point() else 1
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self._live:
                self._add(storage, self.kind)
        if func is FSDP_COPY_IN:
            self.label(args[1], "unsharded")
        elif func is FSDP_REDUCED_COPY:
            assert kwargs is not None
            self.label(kwargs["out"], "workspace")
        elif func is REDUCE_SCATTER:
            for gradient in args[:2]:
                self.label(gradient, "gradients")
        return result

    def _add(self, storage: torch.UntypedStorage, kind: Kind | None) -> None:
        key = id(storage)
        allocation = _Allocation(storage.nbytes(), kind, self._current_pass())
        self._live[key] = allocation, weakref.ref(storage, lambda _: self._forget(key))
        self._events.append((allocation, allocation.size))

    def _forget(self, key: int) -> None:
        if key in self._live:
            allocation, _ = self._live.pop(key)
            allocation.last = self._current_pass()
            self._events.append((allocation, -allocation.size))

    def _current_pass(self) -> int:
        """A number for the current run of autograd, or for the time between two runs."""
        run = autograd_run()
        if run != self._run:
            self._run = run
            self._pass += 1
        return self._pass


def _local_part(tensor: Tensor) -> Tensor:
    """The plain tensor inside a DTensor, or the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # otherwise it would be a new tensor in the graph
        return tensor.to_local()


def _tensors_in(result: object) -> Iterator[Tensor]:
    """The tensors that an operator returns: one, or any number in tuples and lists."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors_in(part)


@contextmanager
def observed(allocations: Allocations) -> Iterator[None]:
    """Inside this context, optimizers, FSDP2's gradients and resized storages set their kinds, by
    wrapped functions of torch and of the engine. Some are replaced, because fake tensors cannot run
    them, or because their CPU kernel allocates what the CUDA kernel does not."""
    with ExitStack() as undo:
        for hook, register in (
            (_before_update, register_optimizer_step_pre_hook),
            (_after_update, register_optimizer_step_post_hook),
        ):
            handle = register(lambda o, *_, hook=hook: hook(allocations, o))
            undo.callback(handle.remove)
        for owner, name, wrapper in (
            (DeviceMesh, "__init__", _untraced),
            (walk, "walk", _untraced),
            (*SHAPES_BY_TRIAL, _untraced),
            (functional, "rms_norm", _fused_rms_norm),
            (torch.UntypedStorage, "resize_", _resize),
            (flat, "zeros", _sums),
            (deferred, "add_wide_product", _in_place),
            (*FSDP_GATHERED, _gathered),
            *((owner, name, _gradient) for owner, name in FSDP_GRADIENTS),
        ):
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, wrapper(original, allocations))
        yield


def _before_update(allocations: Allocations, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        # As on CUDA, a step without temporaries. Other implementations also read values.
        group.update(fused=True, foreach=False)
        for parameter in group["params"]:
            if parameter.grad is not None:
                allocations.label(parameter.grad, "gradients")
    allocations.kind = "optimizer"


def _after_update(allocations: Allocations, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    allocations.kind = None


def _untraced(original: Any, allocations: Allocations) -> Any:
    """Run a function outside of the trace, because it needs values: meshes, shapes that DTensor
    finds by a trial, and the walk over layers, which has a trial of its own."""
    del allocations

    def run(*arguments: Any, **keywords: Any) -> Any:
        with without_modes():
            return original(*arguments, **keywords)

    return run


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what CUDA's ``_fused_rms_norm`` does; on CPUs torch computes RMSNorm in parts, and
    keeps each in fp32. The values are zeros, so that an optimizer finds no overflow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


def as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a GPU runs as one compiled kernel, and that is not compiled here: a trace
    counts the tensors that it returns, and not the temporaries on the way to them."""

    @wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with without_modes():
            result = function(*arguments, **keywords)
        for tensor in _tensors_in(result):
            tensor.detach()  # the operator by which a trace sees the tensor's storage
        return result

    return run


def _fused_rms_norm(original: Any, allocations: Allocations) -> Any:
    del original, allocations

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        del shape, eps
        return _FusedRmsNorm.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]

    return rms_norm


def _resize(original: Any, allocations: Allocations) -> Any:
    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        original(storage, size)
        allocations.resize(storage)
        return storage

    return resize


def _sums(original: Any, allocations: Allocations) -> Any:
    def make(*arguments: Any) -> Tensor:
        result: Tensor = original(*arguments)
        allocations.label(result, "gradients")
        return result

    return make


def _in_place(original: Any, allocations: Allocations) -> Any:
    """Add in place without an allocation, like CUDA's kernel; the values do not matter."""
    del original, allocations

    def add(*tensors: Tensor) -> None:
        del tensors

    return add


def _gathered(original: Any, allocations: Allocations) -> Any:
    def allocate(parameter: Any, *arguments: Any, **keywords: Any) -> None:
        original(parameter, *arguments, **keywords)
        for tensor in parameter.all_gather_outputs:
            allocations.label(tensor, "unsharded")

    return allocate


def _gradient(original: Any, allocations: Allocations) -> Any:
    def accumulate(parameter: Any) -> None:
        grad = unsharded_gradient(parameter)
        if grad is not None:
            allocations.label(grad, "gradients")
        original(parameter)
        if parameter.unsharded_accumulated_grad is not None:
            allocations.label(parameter.unsharded_accumulated_grad, "gradients")

    return accumulate


Build = Callable[[Plan, OptimizerConfig, torch.device, int], Trainer]


@dataclass(frozen=True)
class Trace:
    """The trace of one rank's step: bytes by kind at the peak, and the seconds that it took."""

    rank: int
    memory: MemoryBytes
    seconds: float


def trace_ranks(
    plan: Plan,
    ranks: Sequence[int],
    *,
    optimizer: OptimizerConfig,
    build: Build,
    fill_integers: Callable[[Plan, Tensor], None] | None = None,
) -> Iterator[Trace]:
    """Trace some ranks of a plan, one per core at a time; results come in the order of ``ranks``.

    ``build`` makes the contender's trainer, as on a real rank. If ``fill_integers`` is given, which
    fills messages as peers would, tensors are real ones on the CPU. Each rank has a process of its
    own, because what torch caches of one rank's meshes would be wrong for another.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    workers = min(len(ranks), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        trace = partial(
            _trace_rank,
            plan,
            optimizer=optimizer,
            build=build,
            fill_integers=fill_integers,
            threads=max(1, (os.cpu_count() or 1) // workers),
        )
        yield from pool.map(trace, ranks)


def _trace_rank(
    plan: Plan,
    rank: int,
    *,
    optimizer: OptimizerConfig,
    build: Build,
    fill_integers: Callable[[Plan, Tensor], None] | None,
    threads: int,
) -> Trace:
    begin = time.perf_counter()
    torch.set_num_threads(threads)  # other ranks have the other cores
    fake = fill_integers is None
    fill = None if fill_integers is None else partial(fill_integers, plan)
    with (
        fake_world(rank, plan.layout.world, fill),
        FakeTensorMode() if fake else nullcontext(),
        Allocations(fake=fake) as allocations,
        observed(allocations),
    ):
        memory = _run_step(plan, optimizer, build, allocations)
    return Trace(rank, memory, time.perf_counter() - begin)


def _run_step(
    plan: Plan, optimizer: OptimizerConfig, build: Build, allocations: Allocations
) -> MemoryBytes:
    allocations.kind = "parameters"
    trainer = build(plan, optimizer, torch.device("cpu"), 0)
    gc.collect()  # whole parameters that were cut into shards hang in reference cycles
    allocations.kind = None
    size = (plan.num_microbatches * plan.microbatch_size, plan.shape.seq)
    batch = torch.zeros(size, dtype=torch.long)
    allocations.begin_step()
    trainer.step(batch, batch)
    return allocations.peak()
