"""Memory of one rank of a large job, alone on any machine: the engine's own code, no data.

The rank runs two whole steps over torch's ``fake`` process group, with fake tensors: every
allocation happens, none holds memory. Exact but for what an allocator rounds and a network
library keeps. ``init_process_group`` must not have been called in this process.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeropp.engine.trainer import build_engine
from zeropp.model import build_piece
from zeropp.plan import MemoryBytes, Plan
from zeropp.schedule.action import Action, Op
from zeropp.training import OptimizerConfig

Kind = Literal["parameters", "unsharded", "gradients", "optimizer", "activations", "workspace"]

_KINDS: dict[Op, Kind] = {
    Op.UNSHARD: "unsharded",
    Op.BACKWARD_WEIGHT: "gradients",
    Op.REDUCE_GRAD: "gradients",
}


@dataclass(frozen=True)
class Trace:
    """One rank's step: bytes by kind at the moment of its peak, and what the trace itself took."""

    rank: int
    memory: MemoryBytes
    seconds: float


class LiveBytes(TorchDispatchMode):
    """Counts the storages that live, by the ``kind`` that was set when they were allocated.

    Storages that are resized are gathered parameters: FSDP2 empties and refills them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind: Kind = "parameters"
        self._live: Counter[Kind] = Counter()
        self._entries: dict[int, tuple[Kind, int, Any]] = {}
        self._resize = torch.UntypedStorage.resize_
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget the peak that was seen."""
        self._peak, self._at_peak = 0, Counter(self._live)

    def peak(self) -> MemoryBytes:
        """Bytes by kind at the highest total since ``reset_peak``."""
        return MemoryBytes(**self._at_peak)

    def __enter__(self) -> LiveBytes:
        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = self._resize(storage, size)
            self._forget(storage._cdata)
            self._add(storage, "unsharded")
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._entries:
                    self._add(storage, self.kind)
        return result

    def _add(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._entries[key] = (kind, size, weakref.ref(storage, lambda _: self._forget(key)))
        self._live[kind] += size
        total = self._live.total()
        if total > self._peak:
            self._peak, self._at_peak = total, Counter(self._live)

    def _forget(self, key: int) -> None:
        kind, size, _ = self._entries.pop(key, ("workspace", 0, None))
        self._live[kind] -= size


def trace_rank(plan: Plan, rank: int, optimizer: OptimizerConfig) -> Trace:
    """Run two steps of one rank of a plan with fake tensors; memory is that of the second."""
    begin = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.layout.world)
    try:
        with FakeTensorMode(), LiveBytes() as live:
            memory = _two_steps(plan, optimizer, live)
    finally:
        dist.destroy_process_group()
    return Trace(rank, memory, time.perf_counter() - begin)


def _two_steps(plan: Plan, optimizer: OptimizerConfig, live: LiveBytes) -> MemoryBytes:
    device = torch.device("cpu")
    engine = build_engine(plan, optimizer, device, 0, lambda index: _empty_piece(plan, index))
    size = (plan.microbatch_size, plan.shape.seq)
    batch = [torch.zeros(size, dtype=torch.long) for _ in range(plan.num_microbatches)]

    def label(action: Action) -> None:
        live.kind = _KINDS.get(action.op, "activations")

    engine.interpreter.on_action = label
    for group in engine.optimizer.param_groups:
        # The step without temporaries: the other kinds read numbers, which fake tensors lack.
        # Its temporaries would come when activations are gone, so they do not make the peak.
        group.update(fused=True, foreach=False)
    for _ in range(2):
        live.reset_peak()
        engine.accumulate(batch, batch)
        live.kind = "optimizer"
        engine.update()
    return live.peak()


def _empty_piece(plan: Plan, index: int) -> nn.Module:
    """A piece whose parameters are allocated under the current mode and hold nothing."""
    piece = build_piece(plan.shape, index, 0, "meta")
    for module in piece.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device="cpu")
                module._parameters[name] = nn.Parameter(empty)
    return piece
