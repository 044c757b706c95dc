"""Plans of small models, and their training on a rank and in one process: by the engine, and by
every contender of the suite."""

from __future__ import annotations

import os
import pkgutil
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from baselines.model import build_model, build_piece
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs, size
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.gloo.models import largest
from tests.gloo.world import World
from tests.unit.toy_spec import mapping
from zeropp.choose.planner import fastest
from zeropp.choose.task import Task
from zeropp.engine.layers.chunk import seed_piece
from zeropp.engine.loss import Microbatches
from zeropp.engine.update.update_rules import build_optimizer
from zeropp.price.cluster import Cluster, Device, Host, Link
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Op
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.literals import Precision
from zeropp.types.shape import Family, ModelShape
from zeropp.types.timeline import Span
from zeropp.types.training import OptimizerConfig

SEED, STEPS = 3, 2
CPU = torch.device("cpu")
LLAMA = {"family": "llama", "kv_heads": 2}
TIED = {"tied_embeddings": True}
TEXT = {"kind": "text", "path": "benchmarks/worker/kjv_genesis_psalms.txt"}
ADAMW = OptimizerConfig(kind="adamw", lr=1e-2, weight_decay=0.1)
# An update of SGD is proportional to the gradient, so that a wrong scale cannot hide.
SGD = OptimizerConfig(kind="sgd", lr=0.5)
# Actions that DeepSpeed has no instructions for: ``ReduceGrads`` reduces over replicas, too, and
# ``OptimizerStep`` gathers what they have updated.
IN_DEEPSPEEDS_INSTRUCTIONS = (Op.REDUCE_REPLICAS, Op.GATHER_UPDATED)
_LINK = Link(bandwidth_gb_s=1.0, latency_us=10.0)
CLUSTER = Cluster(
    name="cpu",
    device=Device(
        name="cpu",
        memory_gib=4.0,
        memory_bandwidth_gb_s=10.0,
        matmul_bf16_tflops=0.05,
        matmul_fp32_tflops=0.05,
    ),
    gpus_per_node=8,
    nics_per_node=1,
    intra=_LINK,
    inter=_LINK,
    host=Host(bandwidth_gb_s=1.0, memory_gib=4.0),
)


@dataclass(frozen=True)
class Case:
    """A plan of the engine; ``batch`` is sequences per step over all ranks, one per microbatch."""

    pp: int
    shard: int = 1
    replicate: int = 1
    zero: bool = False
    chunks: int = 2
    unit: int = 2
    batch: int = 8
    recompute: str = "none"
    recomputed: tuple[int, ...] = ()
    reduce_every: str = "unit"
    tied: bool = False
    family: Family = "gpt"
    dropout: float = 0.0
    placement: str = "dp_inner"
    precision: Precision = "fp32"
    layers: int = 4
    cap: int | str = "auto"
    compile: bool = False
    split_backward: bool = True
    offload: int = 0
    parts: int = 1
    merged: int = 1

    def __str__(self) -> str:
        """What sets it apart from the plainest one."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return " ".join(f"{n}={v}" for n, v in own.items() if v != getattr(Case, n, None))

    @property
    def world(self) -> int:
        return self.pp * self.shard * self.replicate

    @property
    def shape(self) -> ModelShape:
        kv_heads = 2 if self.family == "llama" else 4
        return ModelShape(
            name="test",
            family=self.family,
            layers=self.layers,
            hidden=32,
            heads=4,
            kv_heads=kv_heads,
            ffn=64,
            vocab=61,
            seq=12,
            tied_embeddings=self.tied,
            dropout=self.dropout,
        )

    def plan(self) -> Plan:
        """The plan of this case, which a process makes once."""
        return _plan(self)

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step."""
        return batch(self.shape, self.batch, step)


@cache
def _plan(case: Case) -> Plan:
    knobs = ZeroppKnobs(
        pp=case.pp,
        shard=case.shard,
        replicate=case.replicate,
        replicate_zero=1 if case.zero else 0,
        chunks=case.chunks,
        unit=case.unit,
        recompute=case.recompute,  # type: ignore[arg-type]
        reduce_every=case.reduce_every,  # type: ignore[arg-type]
        placement=case.placement,  # type: ignore[arg-type]
        activation_cap=case.cap,  # type: ignore[arg-type]
        compile=case.compile,
        split_backward=case.split_backward,
        offload_blocks=case.offload,
        gradient_parts=case.parts,
        merged_microbatches=case.merged,
    )
    task = Task(
        shape=case.shape,
        cluster=CLUSTER,
        num_gpus=case.world,
        global_batch=case.batch,
        precision=case.precision,
    )
    sized = replace(
        size(task, knobs, 1),
        recomputed=case.recomputed,
        split_backward=case.split_backward,  # also without a pipeline, where no knob asks for it
    )
    price = ZEROPP.prices.of(sized, CLUSTER)
    return fastest(ZEROPP.plans(sized, price), CLUSTER, price).plan


def request(
    num_gpus: int,
    contender: dict[str, Any],
    *,
    model: dict[str, Any] | None = None,
    **other: Any,
) -> RunSpec:
    """A small request: 4 layers of width 32, microbatches of one sequence of 16 tokens."""
    values = mapping()
    values["model"] |= {"layers": 4, "hidden": 32, "ffn": 64, "vocab": 64, "seq": 16}
    values["model"] |= model or {}
    values["cluster"] = yaml.safe_load(Path("conf/cluster/cpu_gloo.yaml").read_text())
    return spec_from_mapping(values | {"num_gpus": num_gpus, "contender": contender} | other)


def batch(shape: ModelShape, rows: int, step: int) -> tuple[Tensor, Tensor]:
    """Random tokens and their successors: int64 [rows, seq], views as the suite's data are."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(shape.vocab, (rows, shape.seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in the type of the logits, so that fp64 stays fp64."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model_of(
    case: Case, dtype: torch.dtype = torch.float32, optimizer: OptimizerConfig = ADAMW
) -> ParallelModel:
    """This rank's part of a case."""
    shape = case.shape
    last = shape.num_pieces - 1
    return zeropp.parallelize(
        [partial(_piece, shape, index, dtype) for index in range(shape.num_pieces)],
        loss_function,
        plan=case.plan(),
        sample=case.data(0)[0][:1],
        global_batch=case.batch,
        optimizer=optimizer,
        tied=((0, "tokens.weight"), (last, "output.weight")) if case.tied else None,
        dropout_seed=SEED if case.dropout else None,
    )


def _piece(shape: ModelShape, index: int, dtype: torch.dtype) -> nn.Module:
    return build_piece(shape, index, SEED, torch.get_default_device()).to(dtype)


def local_microbatches(case: Case, step: int) -> Microbatches:
    """This rank's part of a global batch."""
    inputs, targets = local_batch(case.plan(), step)
    return Microbatches(torch.split(inputs, 1), torch.split(targets, 1))


def local_batch(plan: Plan, step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a step."""
    rows = plan.num_microbatches * plan.microbatch_size
    first = plan.layout.dp_index(dist.get_rank()) * rows
    inputs, targets = batch(plan.shape, plan.global_batch, step)
    return inputs[first : first + rows], targets[first : first + rows]


@dataclass(frozen=True)
class Outcome:
    """Losses and gradient norms of some steps, parameters and, of some, gradients after the last
    one; with what a contender's trainer has counted, and its last step."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    counters: dict[str, int]
    spans: list[Span]


def train(case: Case, dtype: torch.dtype, steps: int, optimizer: OptimizerConfig) -> Outcome:
    """Train with the engine on this rank."""
    engine = build_model_of(case, dtype, optimizer).engine
    results = [engine.step(local_microbatches(case, step)) for step in range(steps)]
    return Outcome(
        [float(r.loss) for r in results],
        [float(r.grad_norm) for r in results],
        dict(engine.full_parameters()),
        dict(engine.full_gradients()),
        {},
        [],
    )


def train_contender(
    plan: Plan, optimizer: OptimizerConfig, steps: int, builder: str | None
) -> Outcome:
    """On a rank: build a contender's trainer, or what ``module:function`` makes, and train."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # DeepSpeed asks for it
    build: Any = pkgutil.resolve_name(builder) if builder else CONTENDERS[plan.contender].build
    trainer = build(plan, optimizer, CPU, SEED)
    results = []
    for step in range(steps):
        trainer.record_spans(step == steps - 1)
        results.append(trainer.step(*local_batch(plan, step)))
    return Outcome(
        [float(r.loss) for r in results],
        [float(r.grad_norm) for r in results],
        dict(trainer.full_parameters()),
        {},
        trainer.counters(),
        trainer.spans(),
    )


@cache
def train_alone(
    shape: ModelShape,
    rows: int,
    optimizer: OptimizerConfig,
    steps: int,
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    """Train the whole model in this process, row by row; what differs in its topology alone shares
    the result."""
    model = build_model(shape, SEED).to(dtype)
    update = build_optimizer(model.parameters(), optimizer)
    losses, norms = [], []
    for step in range(steps):
        update.zero_grad()
        total = 0.0
        parts = (torch.split(part, 1) for part in batch(shape, rows, step))
        for number, (x, y) in enumerate(zip(*parts, strict=True)):
            hidden = x
            for index, piece in enumerate(model):
                if shape.dropout:
                    seed_piece(SEED, step, number, index)
                hidden = piece(hidden)
            loss = loss_function(hidden, y) / rows
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_norm or torch.inf)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        update.step()
        losses.append(total)
        norms.append(float(norm))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return Outcome(losses, norms, parameters, gradients, {}, [])


def check(
    world: World,
    plan: Plan,
    *,
    optimizer: OptimizerConfig = SGD,
    tolerance: float = 1e-4,
    builder: str | None = None,
) -> list[Outcome]:
    """Train two steps on every rank of a contender's plan; losses, norms and parameters must be
    those of one process."""
    expected = train_alone(plan.shape, plan.global_batch, optimizer, STEPS)
    asked = plan, optimizer, STEPS, builder
    outcomes = world.run(train_contender, *asked, size=plan.layout.world)
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


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference over the largest magnitude, the worst parameter's.

    Some gradients are zero except rounding (a key's bias): a thousandth of the model's largest
    magnitude is the least to divide by.
    """
    magnitudes = {name: float(value.abs().max()) for name, value in expected.items()}
    floor = 1e-3 * largest(magnitudes.values())
    return largest(
        float((found[name] - expected[name]).abs().max()) / max(magnitudes[name], floor)
        for name in found
    )
