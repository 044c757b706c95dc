"""Memory of one rank of a large job, alone on any machine: a contender's own code, no data.

The rank builds its trainer and runs a whole step in a ``fake_world``, with fake tensors: every
allocation happens, none holds memory. Exact but for what an allocator rounds, a kernel allocates
inside, and a network library keeps. A contender that fake tensors stop runs with real ones.

Kinds are known only when the step is over, so allocations are written down and sorted afterwards.
What the trainer is built with are parameters; what the optimizer's step leaves is its state, which
every later step has from its beginning; what FSDP2 gathers is unsharded; what the optimizer or
FSDP2's reduction takes are gradients. Of the rest, what outlives the pass that made it (a forward,
or one run of autograd) is an activation. What does not is workspace, and so is what a reduction
copies.
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
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from zeropp.engine import deferred, flat
from zeropp.engine.fake_world import fake_world
from zeropp.plan import MemoryBytes, Plan
from zeropp.training import OptimizerConfig, Trainer

Kind = Literal["parameters", "unsharded", "gradients", "optimizer", "activations", "workspace"]
Build = Callable[[Plan, OptimizerConfig, torch.device, int], Trainer]


@dataclass(frozen=True)
class Trace:
    """One rank's step: bytes by kind at the moment of its peak, and what the trace itself took."""

    rank: int
    memory: MemoryBytes
    seconds: float


@dataclass(eq=False)
class _Allocation:
    size: int
    kind: Kind | None
    first: int  # the pass that made it
    last: int = -1  # the pass in which it was freed; -1: it lives

    def sorted_kind(self) -> Kind:
        """What it turned out to be."""
        return self.kind or ("workspace" if self.first == self.last else "activations")


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every storage that is allocated, freed or resized.

    ``kind`` is that of what is allocated from now on; None: to be found out.
    """

    def __init__(self, *, fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self.kind: Kind | None = None
        self._live: dict[int, tuple[_Allocation, Any]] = {}
        self._events: list[tuple[_Allocation, int]] = []
        self._pass, self._graph_task = 0, -1

    def begin_step(self) -> None:
        """Forget what happened before; what lives, lives."""
        self._events = [(allocation, allocation.size) for allocation, _ in self._live.values()]

    def label(self, tensor: Tensor, kind: Kind) -> None:
        """Say what a tensor's storage is."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry[0].kind is None:
            entry[0].kind = kind

    def peak(self) -> MemoryBytes:
        """Bytes by kind at the highest total since ``begin_step``, with the optimizer's state that
        the step has left there from the beginning."""
        state = {allocation for allocation, _ in self._live.values()}
        state = {allocation for allocation in state if allocation.kind == "optimizer"}
        moves = sorted(self._events, key=lambda move: move[0] not in state)
        total = peak = at = 0
        for index, (_, size) in enumerate(moves):
            total += size
            if total > peak:
                peak, at = total, index
        kinds: Counter[str] = Counter()
        for allocation, size in moves[: at + 1]:
            kinds[allocation.sorted_kind()] += size
        return MemoryBytes(**kinds)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Take note of a resized storage; FSDP2 empties and refills gathered parameters."""
        self._forget(storage._cdata)
        self._add(storage, "unsharded")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with local tensors
        if self._fake and func is torch.ops.aten._local_scalar_dense.default:
            # Fake tensors hold no numbers. Torch's pipeline stages vote 1: shapes are known.
            return 0.0 if args[0].is_floating_point() else 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._live:
                    self._add(storage, self.kind)
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            self.label(args[1], "unsharded")
        elif func is torch.ops.fsdp.chunk_cat.default:
            assert kwargs is not None
            self.label(kwargs["out"], "workspace")
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            for gradient in args[:2]:
                self.label(gradient, "gradients")
        return result

    def _add(self, storage: torch.UntypedStorage, kind: Kind | None) -> None:
        key = storage._cdata
        allocation = _Allocation(storage.nbytes(), kind, self._current_pass())
        self._live[key] = allocation, weakref.ref(storage, lambda _: self._forget(key))
        self._events.append((allocation, allocation.size))

    def _forget(self, key: int) -> None:
        if key in self._live:
            allocation, _ = self._live.pop(key)
            allocation.last = self._current_pass()
            self._events.append((allocation, -allocation.size))

    def _current_pass(self) -> int:
        """Counts runs of autograd and what lies between them."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            self._graph_task = graph_task
            self._pass += 1
        return self._pass


def trace_ranks(
    plan: Plan,
    ranks: Sequence[int],
    optimizer: OptimizerConfig,
    build: Build,
    fill_integers: Callable[[Plan, Tensor], None] | None = None,
) -> Iterator[Trace]:
    """Trace some ranks of a plan, as many at a time as there are cores, in the order given.

    ``build`` makes the contender's trainer, as on a real rank. With ``fill_integers``, which writes
    what peers would have sent, tensors are real ones on the CPU. Each rank has a process of its
    own: what torch remembers of one rank's meshes would be wrong on another.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    workers = min(len(ranks), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        one = partial(
            _trace_rank, plan, optimizer=optimizer, build=build, fill_integers=fill_integers
        )
        yield from pool.map(one, ranks)


def _trace_rank(
    plan: Plan,
    rank: int,
    optimizer: OptimizerConfig,
    build: Build,
    fill_integers: Callable[[Plan, Tensor], None] | None,
) -> Trace:
    begin = time.perf_counter()
    fake = fill_integers is None
    fill = None if fill_integers is None else partial(fill_integers, plan)
    with (
        fake_world(rank, plan.layout.world, fill),
        FakeTensorMode() if fake else nullcontext(),
        Allocations(fake=fake) as allocations,
        _observed(allocations),
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


@contextmanager
def _observed(allocations: Allocations) -> Iterator[None]:
    """Let optimizers, FSDP2's gradients and resized storages tell what they are."""
    with ExitStack() as undo:
        for hook, register in (
            (_before_update, register_optimizer_step_pre_hook),
            (_after_update, register_optimizer_step_post_hook),
        ):
            handle = register(lambda o, *_, hook=hook: hook(allocations, o))
            undo.callback(handle.remove)
        for owner, name, wrapper in (
            (DeviceMesh, "__init__", _untraced),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", _untraced),
            (functional, "rms_norm", _fused_rms_norm),
            (torch.UntypedStorage, "resize_", _resize),
            (flat, "zeros", _sums),
            (deferred, "add_wide_product", _in_place),
            (FSDPParam, "init_all_gather_outputs", _gathered),
            (FSDPParam, "to_accumulated_grad_if_needed", _gradient),
            (FSDPParam, "accumulate_unsharded_grad_if_needed", _gradient),
        ):
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, wrapper(original, allocations))
        yield


def _before_update(allocations: Allocations, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        # As on CUDA: the step without temporaries. The other kinds read numbers, too.
        group.update(fused=True, foreach=False)
        for parameter in group["params"]:
            if parameter.grad is not None:
                allocations.label(parameter.grad, "gradients")
    allocations.kind = "optimizer"


def _after_update(allocations: Allocations, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    allocations.kind = None


def _untraced(original: Any, allocations: Allocations) -> Any:
    """Run on numbers that are there: meshes, and shapes that DTensor finds out by trial."""
    del allocations

    def run(*arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return original(*arguments, **keywords)

    return run


class _FusedRmsNorm(torch.autograd.Function):
    """What CUDA's ``_fused_rms_norm`` keeps and makes; on CPUs torch takes RMSNorm apart and keeps
    each part in fp32. Zeros, so that an optimizer that looks for overflows goes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


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
    """As CUDA's kernel: nothing is allocated, and the numbers are nobody's."""
    del original, allocations

    def add(*tensors: Tensor) -> None:
        del tensors

    return add


def _gathered(original: Any, allocations: Allocations) -> Any:
    def allocate(parameter: FSDPParam, *arguments: Any, **keywords: Any) -> None:
        original(parameter, *arguments, **keywords)
        for tensor in parameter.all_gather_outputs:
            allocations.label(tensor, "unsharded")

    return allocate


def _gradient(original: Any, allocations: Allocations) -> Any:
    def accumulate(parameter: FSDPParam) -> None:
        grad = parameter._unsharded_param.grad if hasattr(parameter, "_unsharded_param") else None
        if grad is not None:
            allocations.label(grad, "gradients")
        original(parameter)
        if parameter.unsharded_accumulated_grad is not None:
            allocations.label(parameter.unsharded_accumulated_grad, "gradients")

    return accumulate
