"""The memory of a traced rank, held against the same step on real ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.specification.contenders import CONTENDERS
from tests.gloo.contender_case import CPU, SEED, batch, request
from tests.gloo.engine_cases import ADAMW
from tests.gloo.world import World
from zeropp.emulate.device import tensors_in
from zeropp.emulate.memory import Allocations, observed
from zeropp.emulate.trace import trace_ranks
from zeropp.emulate.world import replaced
from zeropp.engine.private_names import TorchDispatchMode
from zeropp.plan import MemoryBytes, Plan


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells what counts allocations of every operator that runs inside this context."""

    def __init__(self, allocations: Allocations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocations = allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._allocations.returned(func, args, kwargs or {}, tensors_in(result))
        return result


def measured(name: str, plan: Plan) -> MemoryBytes:
    """On a rank: the bytes by kind at the peak of the first step."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    allocations = Allocations()
    resized = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        resized(storage, size)
        allocations.resized(storage)

    rows = plan.num_microbatches * plan.microbatch_size
    inputs, targets = batch(plan.shape, rows, 0)
    with (
        observed(allocations),
        replaced((torch.UntypedStorage, "resize_", resize)),
        Counting(allocations),
    ):
        allocations.kind = "parameters"
        trainer = CONTENDERS[name].build(plan, ADAMW, CPU, SEED)
        gc.collect()
        allocations.kind = None
        inputs, targets = inputs.clone(), targets.clone()
        allocations.begin_step()
        trainer.step(inputs, targets)
        return allocations.peak()
