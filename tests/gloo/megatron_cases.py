"""What tests of Megatron-Core do on a rank."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from baselines.megatron_core import trainer as megatron
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import local_batch, open_batches
from benchmarks.worker.gate import run_gate
from benchmarks.worker.one_process import ROUNDED, OneProcess

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Curve:
    """What one rank saw of a run: whether the gate passed, losses, the actions of the last step,
    and how many collectives and messages the last step had, by name."""

    passed: bool
    losses: list[float]
    actions: list[str]
    calls: Counter[str]


def curve(spec: RunSpec, steps: int, gate: bool) -> Curve:
    """On a rank: the gate, if it is asked for, then so many steps of a spec's run."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    contender, batches = CONTENDERS[spec.contender.name], open_batches(spec)
    passed = gate and run_gate(spec, contender, batches, CPU)["passed"]
    plan = spec.plan()
    trainer = contender.build(plan, spec.optimizer, CPU, spec.seed)
    losses = []
    with counted_calls() as calls:
        for step in range(steps):
            trainer.record_spans(step == steps - 1)
            calls.clear()
            losses.append(float(trainer.step(*local_batch(batches, plan.layout, step, CPU)).loss))
    return Curve(passed, losses, [span.action for span in trainer.spans()], calls)


def curve_of_one_process(spec: RunSpec, steps: int) -> list[float]:
    """The losses of one process with the number types of the spec's run."""
    alone = OneProcess(spec, open_batches(spec), CPU, ROUNDED[spec.precision])
    return alone.train(spec.optimizer, steps).losses


_COUNTED = (
    *("all_reduce", "reduce_scatter_tensor", "_reduce_scatter_base"),
    *("all_gather_into_tensor", "_all_gather_base", "isend", "irecv"),
)
_LIKE = {"_reduce_scatter_base": "reduce_scatter_tensor"}
_LIKE |= {"_all_gather_base": "all_gather_into_tensor"}


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Inside, calls of torch's collectives and messages are counted by name."""
    calls = Counter[str]()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[_LIKE.get(name, name)] += 1
            return original(*arguments, **keywords)

        return call

    with ExitStack() as stack:
        for name in _COUNTED:
            wrapped = counted(name, getattr(dist, name))
            for module in (dist, distributed_c10d):  # batched messages compare them by identity
                stack.enter_context(mock.patch.object(module, name, wrapped))
        for module, name in _of_megatron():
            original = getattr(module, name)
            wrapped = counted(original.__name__, original)
            stack.enter_context(mock.patch.object(module, name, wrapped))
        yield calls


def _of_megatron() -> Iterator[tuple[Any, str]]:
    """Where Megatron-Core's modules have torch's collectives under names of their own."""
    for module in [m for n, m in sys.modules.items() if n.startswith("megatron.core.")]:
        for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
            if hasattr(module, name):
                yield module, name


def actions_in_other_groups(spec: RunSpec, group: int) -> list[str]:
    """The actions of a step whose interleaving sends so many microbatches through a chunk before
    the next one, instead of the planner's number."""
    batches, plan = open_batches(spec), spec.plan()
    trainer = megatron.MegatronTrainer(plan, spec.optimizer, CPU, spec.seed)
    trainer._config.microbatch_group_size_per_vp_stage = group
    trainer.record_spans(True)
    trainer.step(*local_batch(batches, plan.layout, 0, CPU))
    return [span.action for span in trainer.spans()]
