"""What the engine's tests run on ranks: small models, plans for them, and one process to match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.gloo.differences import largest
from zeropp.cluster import Cluster, Device, Link
from zeropp.contender.contender import ZEROPP, ZeroppKnobs
from zeropp.contender.trainer import pieces_of, recomputed_of
from zeropp.engine.chunk import seed_piece
from zeropp.engine.engine import Engine
from zeropp.engine.interpreter import Loss
from zeropp.engine.options import EngineOptions
from zeropp.engine.values import TensorShape
from zeropp.literals import Precision
from zeropp.model import build_model
from zeropp.plan import Candidate, Plan, Task
from zeropp.shape import Family, ModelShape
from zeropp.training import OptimizerConfig

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
    split_blocks: bool = False

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
        split_blocks=case.split_blocks,
    )
    task = Task(
        shape=case.shape,
        cluster=CLUSTER,
        num_gpus=case.world,
        global_batch=case.batch,
        precision=case.precision,
    )
    return replace(ZEROPP.plan(task, Candidate(knobs, 1)), recomputed=case.recomputed)


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in the type of the logits, so that fp64 stays fp64."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_engine(
    case: Case,
    dtype: torch.dtype,
    optimizer: OptimizerConfig = ADAMW,
    lr_schedule: Callable[[int], float] | None = None,
) -> Engine:
    """This rank's engine of a case."""
    plan, shape = case.plan(), case.shape
    last = shape.num_pieces - 1
    pieces = [
        replace(piece, module=piece.module.to(dtype))
        for stage in plan.schedule.stages_of(plan.layout.coordinates(dist.get_rank())["pp"])
        for piece in pieces_of(plan, stage, SEED, torch.device("cpu"))
    ]
    message = torch.bfloat16 if case.precision == "bf16" else dtype

    def boundary(stage: int) -> list[TensorShape]:
        del stage
        return [TensorShape(torch.Size((1, shape.seq, shape.hidden)), message)]

    return Engine(
        pieces,
        plan.schedule,
        plan.layout,
        loss=Loss(loss_function),
        boundary=boundary,
        optimizer=optimizer,
        device=torch.device("cpu"),
        options=EngineOptions(
            precision=plan.precision,
            recompute=plan.recompute,
            tied=((0, "tokens.weight"), (last, "output.weight")) if case.tied else None,
            tied_stages=(0, plan.schedule.num_stages - 1) if case.tied else (),
            reduce_dtype=plan.reduce_dtype,
            dropout_seed=SEED if case.dropout else None,
            lr_schedule=lr_schedule,
            compile=plan.compile,
            recomputed=recomputed_of(plan),
        ),
    )


def local_microbatches(case: Case, step: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """This rank's part of a global batch, cut into microbatches."""
    layout = case.plan().layout
    inputs, targets = (
        part.chunk(layout.dp)[layout.dp_index(dist.get_rank())] for part in case.data(step)
    )
    return torch.split(inputs, 1), torch.split(targets, 1)


@dataclass
class Outcome:
    """Loss, gradient norm, gradients and parameters after the last step."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train(case: Case, dtype: torch.dtype, steps: int, optimizer: OptimizerConfig) -> Outcome:
    """Train on this rank."""
    engine = build_engine(case, dtype, optimizer)
    results = [engine.step(*local_microbatches(case, step)) for step in range(steps)]
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
    from zeropp.engine.optimizer import build_optimizer

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
