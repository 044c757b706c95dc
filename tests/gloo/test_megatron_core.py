"""Megatron-Core on real processes: the losses of one process on real text, actions and collectives
as planned, and the gate where test_gate.py has none like it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

pytest.importorskip("megatron.core")

from baselines.megatron_core import trainer as megatron
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import local_batch, open_batches
from benchmarks.worker.gate import run_gate
from benchmarks.worker.one_process import OneProcess, types_of
from tests.gloo.cases import CPU, LLAMA, TEXT, TIED, request
from tests.gloo.world import World
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Op

STEPS = 4
ALL_AXES = {"tp": 2, "pp": 2, "chunks": 2, "schedule": "interleaved_1f1b"}
SEQUENCE = {"sequence_parallel": True}
SHARDED = {"replicate_zero": 1}


@dataclass(frozen=True)
class Case:
    """A configuration of Megatron-Core; what is left of the ranks is data parallelism."""

    ranks: int
    knobs: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"

    def spec(self) -> RunSpec:
        """Its run on real text, with four microbatches of a sequence per pipeline."""
        degrees = self.knobs.get("tp", 1) * self.knobs.get("pp", 1)
        return request(
            self.ranks, {"name": "megatron_core", "pp": 1, **self.knobs}, data=TEXT,
            model={"vocab": 256, **self.model}, global_batch=4 * self.ranks // degrees,
            optimizer={"weight_decay": 0.1, "clip_norm": 1.0}, precision=self.precision,
        )  # fmt: skip


IN_BF16 = {"grad_accum_dtype": "bf16"}
GATED = ("TP2 DP2 Llama, sequence parallel, sharded, bf16", "DP2 sharded, gradients in bf16")
INTERLEAVED = Case(4, ALL_AXES | SEQUENCE)
CASES = {
    "TP2 PP2 V2 DP2, sequence parallel, sharded": Case(8, ALL_AXES | SEQUENCE | SHARDED),
    "TP2 PP2 V2, tied, recomputed": Case(4, ALL_AXES | {"recompute": "full"}, TIED),
    "TP2 PP2, sequence parallel, MLPs recomputed": Case(
        4, {"tp": 2, "pp": 2, "recompute": "selective"} | SEQUENCE
    ),
    "PP2 DP2 uneven, sharded": Case(4, {"pp": 2} | SHARDED, {"layers": 5}),
    GATED[0]: Case(4, {"tp": 2} | SEQUENCE | SHARDED, LLAMA | {"layers": 2}, "bf16"),
    GATED[1]: Case(2, SHARDED | IN_BF16, {"layers": 2}, "bf16"),
    "DP2": Case(2, {}, {"layers": 2}),
}


@dataclass(frozen=True)
class Curve:
    """What one rank saw of a run: whether the gate passed, losses, the actions of the last step,
    and how many collectives and messages the last step had, by name."""

    passed: bool
    losses: list[float]
    actions: list[str]
    calls: Counter[str]


def curve(spec: RunSpec, steps: int, gate: bool) -> Curve:
    """On a rank: the gate, if it is asked for, then this many steps of a spec's run."""
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
    alone = OneProcess(spec, open_batches(spec), CPU, types_of(spec))
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
    """The actions of a step whose interleaving sends this many microbatches through a chunk before
    the next one, instead of the planner's number."""
    batches, plan = open_batches(spec), spec.plan()
    trainer = megatron.MegatronTrainer(plan, spec.optimizer, CPU, spec.seed)
    trainer._config.microbatch_group_size_per_vp_stage = group
    trainer.record_spans(True)
    trainer.step(*local_batch(batches, plan.layout, 0, CPU))
    return [span.action for span in trainer.spans()]


@pytest.mark.parametrize("name", CASES)
def test_losses_actions_and_messages(world: World, name: str) -> None:
    case = CASES[name]
    spec = case.spec()
    plan = spec.plan()
    expected = curve_of_one_process(spec, STEPS)
    assert expected[-1] < expected[0] - 0.05  # it learns
    found = world.run(curve, spec, STEPS, name in GATED, size=case.ranks)
    for rank, seen in enumerate(found):
        assert seen.passed == (name in GATED)
        assert seen.losses == pytest.approx(expected, rel=1e-4)
        program = plan.schedule.programs[plan.layout.coordinates(rank)["pp"]]
        assert seen.actions == [str(action) for action in program if action.op.is_compute]
        assert seen.calls == planned_calls(plan, rank)


def planned_calls(plan: Plan, rank: int) -> dict[str, int]:
    """The messages of a step on a rank, which are the plan's, and the collectives that the cost
    model prices (``zeropp/price``), with the few small ones that it does not."""
    layout, m = plan.layout, plan.num_microbatches
    program = plan.schedule.programs[layout.coordinates(rank)["pp"]]
    ops = Counter(action.op for action in program)
    stages = {action.stage for action in program}
    first, last = 0 in stages, plan.schedule.num_stages - 1 in stages
    blocks = sum(plan.blocks[stage] for stage in stages)
    # Two sums of hidden states per block and pass, one of them in the MLP; embedding and head
    # have one each.
    again = sum(plan.recomputed_per_stage[s] for s in stages) * (
        1 if plan.recompute == "selective" else 2
    )
    forward, backward = 2 * blocks + again + first, 2 * blocks + last
    calls = Counter(isend=ops[Op.SEND_F] + ops[Op.SEND_B], irecv=ops[Op.RECV_F] + ops[Op.RECV_B])
    if layout.tp > 1 and layout.sequence_parallel:
        if first and plan.shape.family == "gpt":  # learned positions are added before the split
            calls["all_reduce"] += m
            calls["reduce_scatter_tensor"] -= m
        # A sum is a reduce-scatter, whose opposite is an all-gather; products' inputs are gathered
        # once more for their weight gradients.
        calls["reduce_scatter_tensor"] += m * (forward + backward)
        calls["all_gather_into_tensor"] += m * (forward + backward + 2 * blocks + last)
        calls["all_reduce"] += 1  # the gradients of norms
    elif layout.tp > 1:
        calls["all_reduce"] += m * (forward + backward)
    if layout.replicate_zero:
        calls["reduce_scatter_tensor"] += ops[Op.REDUCE_GRAD]
        calls["all_gather_into_tensor"] += len(stages)  # what the last step has updated
    else:  # also where there is one data-parallel rank
        calls["all_reduce"] += ops[Op.REDUCE_GRAD]
    calls["all_reduce"] += 3 * m * last  # numbers per token: maximum, sum, the target's logit
    calls["all_reduce"] += 2  # the gradient's norm and the loss
    calls["all_reduce"] += plan.shape.tied_embeddings and layout.pp > 1 and (first or last)
    return +calls


def test_other_groups_of_microbatches_are_another_order(world: World) -> None:
    spec = INTERLEAVED.spec()
    programs = spec.plan().schedule.programs
    seen = world.run(actions_in_other_groups, spec, 4, size=INTERLEAVED.ranks)
    planned = [str(action) for action in programs[0] if action.op.is_compute]
    assert seen[0] != planned
    assert sorted(seen[0]) == sorted(planned)
