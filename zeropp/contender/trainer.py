"""The ZeroPP contender on one rank: builds this rank's pieces of the model and trains them with
ZeroPP's engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine.engine import Engine
from zeropp.engine.interpreter import Loss
from zeropp.engine.options import EngineOptions, Piece
from zeropp.engine.values import TensorShape
from zeropp.model import build_half, build_piece, cross_entropy
from zeropp.plan import Plan
from zeropp.timeline import Span
from zeropp.training import OptimizerConfig, StepResult


def build(plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int) -> ZeroppTrainer:
    """Build this rank's part of a plan. All ranks of the world must call it."""
    return ZeroppTrainer(plan, optimizer, device, seed)


def build_engine(plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int) -> Engine:
    """This rank's engine for a plan, with the suite's model and torch's optimizer in it. All ranks
    of the world must call it."""
    shape, layout = plan.shape, plan.layout
    last = shape.num_pieces - 1
    pieces = [
        piece
        for stage in plan.schedule.stages_of(layout.coordinates(dist.get_rank())["pp"])
        for piece in pieces_of(plan, stage, seed, device)
    ]
    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    size = torch.Size((plan.microbatch_size, shape.seq, shape.hidden))
    return Engine(
        pieces,
        plan.schedule,
        layout,
        loss=Loss(cross_entropy),
        boundary=lambda _: [TensorShape(size, dtype)],  # the same between all stages
        optimizer=optimizer,
        device=device,
        options=EngineOptions(
            precision=plan.precision,
            recompute=plan.recompute,
            tied=((0, "tokens.weight"), (last, "output.weight")) if shape.tied_embeddings else None,
            tied_stages=(0, plan.schedule.num_stages - 1) if shape.tied_embeddings else (),
            reduce_dtype=plan.reduce_dtype,
            dropout_seed=seed if shape.dropout else None,
            random=shape.dropout > 0,
            compile=plan.compile,
            recomputed=recomputed_of(plan),
        ),
    )


def recomputed_of(plan: Plan) -> tuple[int, ...]:
    """How many whole blocks of each stage are recomputed, which are its first ones."""
    return tuple(map(plan.recomputed_blocks, range(plan.schedule.num_stages)))


def pieces_of(plan: Plan, stage: int, seed: int, device: torch.device) -> Iterator[Piece]:
    """All that a stage of a plan computes: whole pieces, and halves of blocks at its ends."""
    shape = plan.shape
    for index in plan.pieces_of(stage):
        is_block = 0 < index < shape.num_pieces - 1
        yield Piece(index, stage, build_piece(shape, index, seed, device), deferrable=is_block)
    for index, half in plan.halves_of(stage):
        yield Piece(
            index,
            stage,
            build_half(shape, index, half, seed=seed, device=device),
            deferrable=True,
            half=True,
        )


class ZeroppTrainer:
    """A ``zeropp.training.Trainer`` that runs ZeroPP's engine."""

    def __init__(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> None:
        self._microbatch_size = plan.microbatch_size
        self._engine = build_engine(plan, optimizer, device, seed)

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """See ``Trainer.step``."""
        size = self._microbatch_size
        result = self._engine.step(torch.split(inputs, size), torch.split(targets, size))
        return StepResult(float(result.loss), float(result.grad_norm))

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Trainer.full_parameters``."""
        return self._engine.full_parameters()

    def counters(self) -> dict[str, int]:
        """See ``Trainer.counters``."""
        return self._engine.counters()

    def record_spans(self, enabled: bool) -> None:
        """See ``Trainer.record_spans``."""
        self._engine.record_spans(enabled)

    def spans(self) -> list[Span]:
        """See ``Trainer.spans``."""
        return self._engine.spans()
