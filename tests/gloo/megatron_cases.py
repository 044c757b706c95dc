"""What tests of Megatron-Core do on a rank, and the faults that they inject into its trainer.

Each fault is one that a careless adapter of Megatron-Core has, and that raises no error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baselines.megatron_core import trainer as megatron
from benchmarks.records.record import GateCheck
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import local_batch, open_batches
from benchmarks.worker.gate import ROUNDED, OneProcess, run_gate
from tests.gloo.gate_faults import FAULTS, find
from tests.gloo.gate_place import Fault, Place, Prepare
from zeropp.training import OptimizerConfig

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Curve:
    """What one rank saw of a run: whether the gate passed and its largest errors, losses, the
    actions of the last step, and how many collectives and messages the last step had, by name."""

    passed: bool
    errors: tuple[float, float, float]
    losses: list[float]
    actions: list[str]
    calls: Counter[str]


def curve(spec: RunSpec, steps: int, *, gate: bool = True) -> Curve:
    """On a rank: the gate, if it is asked for, then so many steps of a spec's run."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    contender, batches = CONTENDERS[spec.contender.name], open_batches(spec)
    result = run_gate(spec, contender, batches, CPU) if gate else {}
    plan = spec.plan()
    trainer = contender.build(plan, spec.optimizer, CPU, spec.seed)
    losses, calls = [], Counter[str]()
    for step in range(steps):
        trainer.record_spans(step == steps - 1)
        data = local_batch(batches, plan.layout, step, CPU)
        with counted_calls() as calls:
            losses.append(trainer.step(*data).loss)
    errors = tuple(result.get(f"{n}_error", 0.0) for n in ("loss", "grad_norm", "parameter"))
    actions = [span.action for span in trainer.spans()]
    return Curve(result.get("passed", False), errors, losses, actions, calls)  # type: ignore[arg-type]


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
    """Inside, calls of torch's collectives and messages are counted, by name and by the number of
    ranks of their group: ``all_reduce 2``."""
    calls = Counter[str]()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            group = keywords.get("group") or next(
                (a for a in arguments if isinstance(a, dist.ProcessGroup)), None
            )
            calls[f"{_LIKE.get(name, name)} {dist.get_world_size(group)}"] += 1
            return original(*arguments, **keywords)

        return call

    with ExitStack() as stack:
        for name in _COUNTED:
            if hasattr(dist, name):
                wrapped = counted(name, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, wrapped))
        yield calls
