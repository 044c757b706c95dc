"""What the engine's tests run on ranks: small models, plans for them, and one process to match."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from baselines.model import build_model, build_piece
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs, size
from tests.gloo.differences import largest
from zeropp.choose.planner import fastest
from zeropp.choose.task import Task
from zeropp.engine.chunk import seed_piece
from zeropp.engine.loss import Microbatches
from zeropp.price.cluster import Cluster, Device, Link
from zeropp.schedule.plan import Plan
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.literals import Precision
from zeropp.types.shape import Family, ModelShape
from zeropp.types.training import OptimizerConfig

SEED = 11
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
)
ADAMW = OptimizerConfig(kind="adamw", lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """One configuration; ``batch`` is sequences per step over all ranks, one per microbatch."""

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
        generator = torch.Generator().manual_seed(100 + step)
        size = (self.batch, self.shape.seq + 1)
        tokens = torch.randint(self.shape.vocab, size, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


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


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in the type of the logits, so that fp64 stays fp64."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model_of(
    case: Case, dtype: torch.dtype, optimizer: OptimizerConfig = ADAMW
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
    layout = case.plan().layout
    inputs, targets = (
        part.chunk(layout.dp)[layout.dp_index(dist.get_rank())] for part in case.data(step)
    )
    return Microbatches(torch.split(inputs, 1), torch.split(targets, 1))


@dataclass
class Outcome:
    """Loss, gradient norm, gradients and parameters after the last step."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train(case: Case, dtype: torch.dtype, steps: int, optimizer: OptimizerConfig) -> Outcome:
    """Train on this rank."""
    engine = build_model_of(case, dtype, optimizer).engine
    results = [engine.step(local_microbatches(case, step)) for step in range(steps)]
    return Outcome(
        [float(r.loss) for r in results],
        [float(r.grad_norm) for r in results],
        dict(engine.full_gradients()),
        dict(engine.full_parameters()),
    )


def train_alone(case: Case, dtype: torch.dtype, steps: int, config: OptimizerConfig) -> Outcome:
    """Train the whole model in this process, microbatch by microbatch; cases that differ in their
    topology alone share the result."""
    alone = Case(
        pp=1,
        batch=case.batch,
        layers=case.layers,
        tied=case.tied,
        family=case.family,
        dropout=case.dropout,
    )
    return _train_alone(alone, dtype, steps, config)


@cache
def _train_alone(case: Case, dtype: torch.dtype, steps: int, config: OptimizerConfig) -> Outcome:
    from zeropp.engine.update_rules import build_optimizer

    model = build_model(case.shape, SEED).to(dtype)
    optimizer = build_optimizer(model.parameters(), config)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        rows = (torch.split(part, 1) for part in case.data(step))
        for number, (x, y) in enumerate(zip(*rows, strict=True)):
            hidden = x
            for index, piece in enumerate(model):
                if case.dropout:
                    seed_piece(SEED, step, number, index)
                hidden = piece(hidden)
            loss = loss_function(hidden, y) / case.batch
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or torch.inf)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(total)
        norms.append(norm.item())
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return Outcome(losses, norms, gradients, parameters)


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference over the largest magnitude, the worst parameter's.

    Some gradients are zero but for rounding (a key's bias): a thousandth of the model's largest
    magnitude is the least to divide by.
    """
    magnitudes = {name: float(value.abs().max()) for name, value in expected.items()}
    floor = 1e-3 * largest(magnitudes.values())
    return largest(
        float((found[name] - expected[name]).abs().max()) / max(magnitudes[name], floor)
        for name in found
    )
