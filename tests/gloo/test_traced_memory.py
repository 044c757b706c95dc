"""The peak of a traced rank is that of the same step on real ranks.

On them nothing stands in for torch: gloo's works hold what they send for as long as they live, as
those of NCCL do (``WorkNCCL::outputs_``), and memory is counted from what operators return.
"""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.specification.contenders import CONTENDERS
from tests.gloo.cases import CPU, SEED, batch, request
from tests.gloo.world import World
from zeropp.emulate import trace
from zeropp.emulate.kernels import tensors_in
from zeropp.emulate.memory import Allocations, observed
from zeropp.emulate.world import replaced
from zeropp.engine.private_names import TorchDispatchMode
from zeropp.schedule.plan import Plan
from zeropp.types.training import OptimizerConfig

SGD = OptimizerConfig(kind="sgd", lr=0.5)  # on a CPU, AdamW makes temporaries that no GPU makes
SIZES = {"hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 512, "seq": 128, "vocab": 512}


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


def measured(name: str, plan: Plan) -> int:
    """On a rank: the most bytes that it holds in the first step."""
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
        trainer = CONTENDERS[name].build(plan, SGD, CPU, SEED)
        gc.collect()  # as in a trace
        allocations.kind = None
        inputs, targets = inputs.clone(), targets.clone()
        allocations.begin_step()
        trainer.step(inputs, targets)
        return allocations.peak().total


def traced(name: str, plan: Plan, rank: int) -> trace.Trace:
    """In a process of its own: a rank that allocates what a CPU does, and not what a GPU does."""
    program = replace(CONTENDERS[name], emulation="")
    with replaced((trace, "as_on_cuda", lambda _: nullcontext())):
        return trace._trace_rank(plan, rank, optimizer=SGD, program=program, steps=1)


@pytest.mark.parametrize(
    "contender",
    [
        {"name": "torch_pp", "pp": 2, "schedule": "1f1b"},
        {"name": "torch_pp", "pp": 2, "chunks": 2, "schedule": "interleaved_zb"},
        {"name": "deepspeed_3d", "replicate": 2, "replicate_zero": 2},
    ],
)
def test_a_trace_has_the_peak_of_real_ranks(world: World, contender: dict[str, Any]) -> None:
    name = contender["name"]
    precision = "bf16" if name == "deepspeed_3d" else "fp32"
    plan = request(2, contender, global_batch=8, model=SIZES, precision=precision).plan()
    real = world.run(measured, name, plan, size=2)
    traces = trace._in_processes(partial(traced, name, plan), plan.layout.pipeline(0))
    for each in traces:  # the difference is that of tokens and flags; a message is 1 % of all
        assert each.memory.total == pytest.approx(real[each.rank], rel=0.002)
