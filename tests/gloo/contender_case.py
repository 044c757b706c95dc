"""What every contender's test does: train a few steps and compare with one process."""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from baselines.model import build_model, cross_entropy
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.gloo.world import World
from tests.unit.toy_spec import mapping
from zeropp.engine.update_rules import build_optimizer
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Op
from zeropp.types.shape import ModelShape
from zeropp.types.timeline import Span
from zeropp.types.training import OptimizerConfig

SEED = 3
CPU = torch.device("cpu")
# Actions that DeepSpeed has no instructions for: ``ReduceGrads`` reduces over replicas, too, and
# ``OptimizerStep`` gathers what they have updated.
IN_DEEPSPEEDS_INSTRUCTIONS = (Op.REDUCE_REPLICAS, Op.GATHER_UPDATED)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    counters: dict[str, int]
    spans: list[Span]  # of the last step


def request(
    num_gpus: int,
    contender: dict[str, Any],
    *,
    global_batch: int = 8,
    precision: str = "fp32",
    model: dict[str, Any] | None = None,
) -> RunSpec:
    """A small request: 4 layers of width 32, microbatches of one sequence of 16 tokens."""
    values = mapping()
    values["model"] |= {"layers": 4, "hidden": 32, "ffn": 64, "vocab": 64, "seq": 16}
    values["model"] |= model or {}
    values["cluster"] = yaml.safe_load(Path("conf/cluster/cpu_gloo.yaml").read_text())
    values |= {"num_gpus": num_gpus, "contender": contender}
    return spec_from_mapping(values | {"global_batch": global_batch, "precision": precision})


def batch(shape: ModelShape, rows: int, step: int) -> tuple[Tensor, Tensor]:
    """Random tokens and their successors: int64 [rows, seq], views as the suite's data are."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(shape.vocab, (rows, shape.seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(builder: str, plan: Plan, optimizer: OptimizerConfig, steps: int) -> Outcome:
    """On a rank: build with ``module:function`` and train."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # DeepSpeed asks for it
    module, _, function = builder.partition(":")
    trainer = getattr(importlib.import_module(module), function)(plan, optimizer, CPU, SEED)
    rows = plan.num_microbatches * plan.microbatch_size
    first = plan.layout.dp_index(dist.get_rank()) * rows
    losses, norms = [], []
    for step in range(steps):
        trainer.record_spans(step == steps - 1)
        inputs, targets = batch(plan.shape, plan.global_batch, step)
        result = trainer.step(inputs[first : first + rows], targets[first : first + rows])
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    parameters = dict(trainer.full_parameters())
    return Outcome(losses, norms, parameters, trainer.counters(), trainer.spans())


def train_alone(plan: Plan, optimizer: OptimizerConfig, steps: int) -> Outcome:
    """The same in one process, the whole global batch at once."""
    model = build_model(plan.shape, SEED)
    update = build_optimizer(model.parameters(), optimizer)
    losses, norms = [], []
    for step in range(steps):
        inputs, targets = batch(plan.shape, plan.global_batch, step)
        update.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        limit = optimizer.clip_norm or math.inf
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        update.step()
        losses.append(loss.item())
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return Outcome(losses, norms, parameters, {}, [])


def check(
    world: World,
    builder: str,
    plan: Plan,
    *,
    steps: int = 2,
    optimizer: OptimizerConfig | None = None,
    tolerance: float = 1e-4,
) -> list[Outcome]:
    """Train on every rank of a plan; losses, norms and parameters must be those of one process."""
    # SGD: its update is proportional to the gradient, so a wrong scale cannot hide.
    optimizer = optimizer or OptimizerConfig(kind="sgd", lr=0.5)
    expected = train_alone(plan, optimizer, steps)
    outcomes = world.run(train, builder, plan, optimizer, steps, size=plan.layout.world)
    held: set[str] = set()
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerance)
        assert outcome.norms == pytest.approx(expected.norms, rel=tolerance)
        for name, parameter in outcome.parameters.items():
            difference = (parameter - expected.parameters[name]).norm()
            assert difference <= tolerance * expected.parameters[name].norm() + 1e-6, name
        held |= set(outcome.parameters)
    assert held == set(expected.parameters)
    return outcomes
