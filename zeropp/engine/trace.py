"""Memory of one rank of a large job, alone on any machine: the engine's own code, no data.

The rank runs two whole steps over torch's ``fake`` process group, with fake tensors: every
allocation happens, none holds memory. Exact but for what an allocator rounds and a network
library keeps. ``init_process_group`` must not have been called in this process.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeropp.engine.engine import make_mesh
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


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that live, by the ``kind`` that was set when they were allocated.

    Storages that are resized are gathered parameters: FSDP2 empties and refills them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind: Kind = "parameters"
        self._live: Counter[Kind] = Counter()
        self._entries: dict[int, tuple[Kind, int, Any]] = {}
        self._resize = torch.UntypedStorage.resize_
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget the peak that was seen."""
        self._peak, self._at_peak = 0, Counter(self._live)

    def keep_only(self, tensors: Iterable[Tensor]) -> None:
        """Count nothing but these tensors' storages from here on, and what is allocated later."""
        kept = {tensor.untyped_storage()._cdata for tensor in tensors}
        for key in set(self._entries) - kept:
            kind, _, reference = self._entries[key]
            self._live[kind] -= self._entries[key][1]
            self._entries[key] = (kind, 0, reference)

    def peak(self) -> MemoryBytes:
        """Bytes by kind at the highest total since ``reset_peak``."""
        return MemoryBytes(**{str(kind): size for kind, size in self._at_peak.items()})

    def __enter__(self) -> LiveBytes:
        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self._resize(storage, size)
            self._forget(storage._cdata)
            self._add(storage, "unsharded")
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

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
        mesh = make_mesh(plan.layout, torch.device("cpu"))  # reads numbers out of tensors
        pieces = [build_piece(plan.shape, i, 0, "meta") for i in range(plan.shape.num_pieces)]
        with FakeTensorMode(), LiveBytes() as live:
            memory = _two_steps(plan, optimizer, mesh, pieces, live)
    finally:
        dist.destroy_process_group()
    return Trace(rank, memory, time.perf_counter() - begin)


def _two_steps(
    plan: Plan,
    optimizer: OptimizerConfig,
    mesh: DeviceMesh,
    pieces: list[nn.Module],
    live: LiveBytes,
) -> MemoryBytes:
    engine = build_engine(
        plan, optimizer, torch.device("cpu"), 0, lambda index: _allocate(pieces[index]), mesh
    )
    # Real parameters are freed once they are cut into shards (seen with weak references); fake
    # ones are kept alive by the fake mode, so they are taken out of the count here.
    live.keep_only(engine.owned.values())
    live.kind = "activations"
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


def _allocate(piece: nn.Module) -> nn.Module:
    """Give a piece on the meta device parameters that are allocated and hold nothing."""
    for module in piece.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
    return piece
