"""DeepSpeed without a pipeline on one rank: ``DeepSpeedEngine`` runs the step. Its ZeRO reduces
a bucket of gradients as soon as it is full, beside the last backward (ZeRO-1) or beside every one
(ZeRO-2)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import Tensor, nn

from baselines.deepspeed_3d.tensor_parallel import vocabulary_cross_entropy
from baselines.deepspeed_3d.trainer import DeepSpeedTrainer
from zeropp.schedule.program import Op


class OrdinaryTrainer(DeepSpeedTrainer):
    """Runs DeepSpeed's ordinary engine."""

    def _arguments(self, seed: int) -> dict[str, Any]:
        shape = self._plan.shape
        module = nn.Sequential(*(self._piece(index, seed) for index in range(shape.num_pieces)))
        if shape.tied_embeddings:
            module[-1].output.weight = module[0].tokens.weight  # type: ignore[union-attr]
        # What DeepSpeed calls an mpu: the groups of the topology, which says who is replicated.
        return {"model": module, "mpu": PipelineParallelGrid(self._topology)}

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return vocabulary_cross_entropy(logits, targets, self._group)

    def _train(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros((), device=self._device)
        for inputs, targets in batches:
            with self._action(Op.FORWARD):
                loss = self._loss(self._engine(inputs), targets)
            total += loss.detach()
            with self._action(Op.FULL_BACKWARD):
                self._engine.backward(loss)
            last = self._engine.is_gradient_accumulation_boundary()
            if last:
                self._clip()
            with self._action(Op.UPDATE) if last else nullcontext():
                self._engine.step()
        dist.all_reduce(total)
        return total / (len(batches) * self._plan.layout.world)
