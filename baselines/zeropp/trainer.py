"""The ZeroPP contender on one rank: the suite's model as a list of layers, given to
``zeropp.parallelize`` with a finished plan."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from baselines.model import build_piece, sliced_cross_entropy
from zeropp.schedule.plan import Plan
from zeropp.train.api import parallelize
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig


def build(plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int) -> ZeroppTrainer:
    """Build this rank's part of a plan. All ranks of the world must call it."""
    shape, last = plan.shape, plan.shape.num_pieces - 1
    in_slices, tokens = plan.logits_slices > 1, plan.global_batch * plan.shape.seq
    loss_fn = partial(sliced_cross_entropy, tokens=tokens) if in_slices else sliced_cross_entropy
    model = parallelize(
        [partial(_layer, shape, index, seed, device) for index in range(shape.num_pieces)],
        loss_fn,
        loss_reduction="sum" if in_slices else "mean",
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
        interpreter = model.engine.interpreter
        self.step, self.full_parameters = model.train_step, model.full_parameters
        self.counters, self.spans = interpreter.counters, interpreter.spans
        self.record_spans = interpreter.record_spans
