"""The ZeroPP contender on one rank: the suite's model as a list of layers, given to
``zeropp.parallelize`` with a finished plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from baselines.model import build_piece, sliced_cross_entropy
from zeropp.schedule.plan import Plan
from zeropp.train.api import parallelize
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.shape import ModelShape
from zeropp.types.timeline import Span
from zeropp.types.training import OptimizerConfig, StepResult


def build(plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int) -> ZeroppTrainer:
    """Build this rank's part of a plan. All ranks of the world must call it."""
    shape, last = plan.shape, plan.shape.num_pieces - 1
    model = parallelize(
        [partial(_layer, shape, index, seed, device) for index in range(shape.num_pieces)],
        sliced_cross_entropy,
        plan=plan,
        sample=torch.zeros(plan.microbatch_size, shape.seq, dtype=torch.long),
        global_batch=plan.global_batch,
        optimizer=optimizer,
        tied=((0, "tokens.weight"), (last, "output.weight")) if shape.tied_embeddings else None,
        device=device,
        dropout_seed=seed if shape.dropout else None,
    )
    return ZeroppTrainer(model)


def _layer(shape: ModelShape, index: int, seed: int, device: torch.device) -> nn.Module:
    """One piece of the model with its initial values, which are drawn on the device; without
    values where only its sizes are asked for."""
    default = torch.get_default_device()
    return build_piece(shape, index, seed, default if default.type == "meta" else device)


class ZeroppTrainer:
    """A ``zeropp.types.training.Trainer`` of a model that ``parallelize`` has made."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """See ``Trainer.step``."""
        return self._model.train_step(inputs, targets)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Trainer.full_parameters``."""
        return self._model.full_parameters()

    def counters(self) -> dict[str, int]:
        """See ``Trainer.counters``."""
        return self._model.engine.interpreter.counters()

    def record_spans(self, enabled: bool) -> None:
        """See ``Trainer.record_spans``."""
        self._model.engine.interpreter.record_spans(enabled)

    def spans(self) -> list[Span]:
        """See ``Trainer.spans``."""
        return self._model.engine.interpreter.spans()
