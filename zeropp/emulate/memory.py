"""The memory of one rank: every storage that is allocated, freed or resized in a step, by kind.

The numbers are exact except for the allocator's rounding, what kernels allocate inside, and what
network libraries keep.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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
    autograd_run,
    is_fake,
    is_known,
    unsharded_gradient,
)
from zeropp.engine import flat
from zeropp.engine.private_names import TorchDispatchMode
from zeropp.plan import MemoryBytes

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

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        if func is NUMBER_OF and is_fake(args[0]) and not is_known(args[0]):
            return _taken_for_granted(args[0])
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self._live and tensor.device.type != "meta":
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


def _taken_for_granted(number: Tensor) -> float:
    """What a host reads where nobody knows the value: 0, but 1 of long integers. By one torch's
    pipeline stages ask whether their neighbour knows the shapes; flags are short."""
    if number.is_floating_point():
        return 0.0
    return int(number.dtype in (torch.int32, torch.int64))


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
    wrapped functions of torch and of the engine."""
    with ExitStack() as undo:
        for hook, register in (
            (_before_update, register_optimizer_step_pre_hook),
            (_after_update, register_optimizer_step_post_hook),
        ):
            handle = register(lambda o, *_, hook=hook: hook(allocations, o))
            undo.callback(handle.remove)
        for owner, name, wrapper in (
            (torch.UntypedStorage, "resize_", _resize),
            (flat, "zeros", _sums),
            (*FSDP_GATHERED, _gathered),
            *((owner, name, _gradient) for owner, name in FSDP_GRADIENTS),
        ):
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, wrapper(original, allocations))
        yield


def _before_update(allocations: Allocations, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                allocations.label(parameter.grad, "gradients")
    allocations.kind = "optimizer"


def _after_update(allocations: Allocations, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    allocations.kind = None


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
