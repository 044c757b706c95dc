"""The memory of one rank: every storage that is allocated, freed or resized in a step, by kind.

The numbers are exact except for the allocator's rounding, what kernels allocate inside, and what
network libraries keep.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    REDUCE_SCATTER,
    autograd_run,
    gathered_of,
    gradients_of,
)
from zeropp.emulate.world import replaced
from zeropp.engine.layers import offload
from zeropp.schedule.plan import MemoryBytes

Kind = Literal[
    "parameters", "unsharded", "gradients", "optimizer", "activations", "workspace", "host"
]


@dataclass(eq=False)
class _Allocation:
    """One storage, from its allocation until it is freed."""

    size: int
    kind: Kind | None
    first: int  # the pass (forward or run of autograd) that allocated it
    last: int = -1  # the pass in which it was freed; -1: not freed


class Allocations:
    """Records every storage that is allocated, freed or resized, and sorts it by kind.

    Storages that are allocated while the trainer is built are parameters. Those that are allocated
    in the optimizer's step are its state; it exists from the beginning of every later step, so it
    is counted from the beginning of this one. What FSDP2 gathers, and the engine's buffers, are
    unsharded parameters; what optimizers read, and reduce-scatters read and write, are gradients.
    Of the others, a storage that outlives the forward or the run of autograd that allocated it is
    an activation. All else, and the copies that reductions make, is workspace. The memory of the
    host, to which activations are offloaded, is apart. ``kind`` is the kind of storages that are
    allocated from now on; None: it is found out at the end of the step.
    """

    def __init__(self) -> None:
        self.kind: Kind | None = None
        # By the identity of the storage's Python object: torch keeps one while the storage lives.
        self._live: dict[int, tuple[_Allocation, Any]] = {}
        self._events: list[tuple[_Allocation, int]] = []
        self._pass, self._run = 0, -1

    @property
    def allocated(self) -> int:
        """Bytes that are allocated now."""
        return sum(allocation.size for allocation, _ in self._live.values())

    def begin_step(self) -> None:
        """Begin a step: storages that are still allocated count, and earlier events do not."""
        self._events = [(allocation, allocation.size) for allocation, _ in self._live.values()]

    def label(self, tensor: Tensor, kind: Kind) -> None:
        """Set the kind of a tensor's storage."""
        if isinstance(tensor, DTensor):
            with torch.no_grad():  # otherwise its part would be a new tensor in the graph
                tensor = tensor.to_local()
        entry = self._live.get(id(tensor.untyped_storage()))
        if entry is not None and entry[0].kind is None:
            entry[0].kind = kind

    def peak(self) -> MemoryBytes:
        """Bytes by kind at the highest total since ``begin_step``, with the optimizer's state,
        which counts from the beginning of the step."""
        state = {allocation for allocation, _ in self._live.values()}
        state = {allocation for allocation in state if allocation.kind == "optimizer"}
        host = sum(size for one, size in self._events if one.kind == "host")
        events = [event for event in self._events if event[0].kind != "host"]
        events.sort(key=lambda event: event[0] not in state)
        total = peak = at = 0
        for index, (_, size) in enumerate(events):
            total += size
            if total > peak:
                peak, at = total, index
        kinds: Counter[str] = Counter()
        for allocation, size in events[: at + 1]:
            passing = "workspace" if allocation.first == allocation.last else "activations"
            kinds[allocation.kind or passing] += size
        return MemoryBytes(**kinds, host=host)

    def returned(self, operator: object, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        """Record the storages that an operator has allocated, of the tensors that it returned."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self._live:
                self._add(storage, self.kind)
        if operator is FSDP_COPY_IN:
            self.label(args[1], "unsharded")
        elif operator is FSDP_REDUCED_COPY:
            self.label(kwargs["out"], "workspace")
        elif operator is REDUCE_SCATTER:
            for gradient in args[:2]:
                self.label(gradient, "gradients")

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized, as FSDP2 does to free gathered parameters."""
        self._forget(id(storage))
        self._add(storage, "unsharded")

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


@contextmanager
def observed(allocations: Allocations) -> Iterator[None]:
    """Inside this context, optimizers and FSDP2's tensors set their kinds."""

    def before_update(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    allocations.label(parameter.grad, "gradients")
        allocations.kind = "optimizer"

    def after_update(*_: object) -> None:
        allocations.kind = None

    def labelled(owner: Any, name: str, kind: Kind, tensors_of: Any) -> tuple[Any, str, Any]:
        """A method of a parameter of FSDP2, before and after which these tensors have a kind."""
        original = getattr(owner, name)

        def call(parameter: Any, *arguments: Any, **keywords: Any) -> None:
            for tensor in tensors_of(parameter):
                allocations.label(tensor, kind)
            original(parameter, *arguments, **keywords)
            for tensor in tensors_of(parameter):
                allocations.label(tensor, kind)

        return owner, name, call

    def of_host(*arguments: Any) -> Tensor:
        kind, allocations.kind = allocations.kind, "host"
        try:
            return new_slab(*arguments)
        finally:
            allocations.kind = kind

    new_slab = offload.new_slab
    hooks = (
        register_optimizer_step_pre_hook(before_update),
        register_optimizer_step_post_hook(after_update),
    )
    try:
        with replaced(
            (offload, "new_slab", of_host),
            labelled(*FSDP_GATHERED, "unsharded", gathered_of),
            *(labelled(*method, "gradients", gradients_of) for method in FSDP_GRADIENTS),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()
