"""DeepSpeed without a pipeline on one rank: ``DeepSpeedEngine`` runs the step. Its ZeRO reduces
a bucket of gradients as soon as it is full, beside the last backward (ZeRO-1) or beside every one
(ZeRO-2 and 3). With ZeRO-3 it gathers parameters ahead of their use, module by module, and reduces
gradients to the ranks that hold them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import Tensor, nn
from torch.nn import functional as F

from baselines.deepspeed_3d.private_names import neighbours, zero3_linear
from baselines.deepspeed_3d.tensor_parallel import vocabulary_cross_entropy
from baselines.deepspeed_3d.trainer import DeepSpeedTrainer
from baselines.model import sliced_cross_entropy
from zeropp.schedule.program import Op


class OrdinaryTrainer(DeepSpeedTrainer):
    """Runs DeepSpeed's ordinary engine.

    With ZeRO-3 DeepSpeed replaces ``torch.nn.functional.linear`` of the whole process by one that
    saves a parameter, and not its gathered values. It has the replacement in its own steps alone
    here, as other models may be in the process.
    """

    def _arguments(self, seed: int) -> dict[str, Any]:
        """The model; with ZeRO-3 each piece is sharded before the next one is made."""
        shape, pieces = self._plan.shape, list[nn.Module]()
        # What DeepSpeed calls an mpu: the groups of the topology, which says who is replicated.
        mpu = PipelineParallelGrid(self._topology)
        ranks = self._program.zero_hpz_partition_size
        near = neighbours(ranks) if ranks > 1 else None  # one group for all pieces
        with mock.patch.object(F, "linear", F.linear):
            for index in range(shape.num_pieces):
                piece = self._piece(index, seed)
                if shape.tied_embeddings and index == shape.num_pieces - 1:
                    piece.output.weight = pieces[0].tokens.weight  # type: ignore[union-attr]
                if self._zero3:
                    if self._plan.precision == "bf16":
                        piece.bfloat16()
                    groups = {"data_parallel_group": mpu.get_data_parallel_group(), "mpu": mpu}
                    groups |= {"zero_param_parallel_group": near} if near is not None else {}
                    deepspeed.zero.Init(module=piece, config_dict_or_path=self._config(0), **groups)
                pieces.append(piece)
        return {"model": nn.Sequential(*pieces), "mpu": mpu}

    def _train(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros((), device=self._device)
        with mock.patch.object(F, "linear", zero3_linear if self._zero3 else F.linear):
            for inputs, targets in batches:
                with self._action(Op.FORWARD):
                    logits = self._engine(inputs)
                    if self._zero3:
                        loss = sliced_cross_entropy(logits, targets)
                    else:
                        loss = vocabulary_cross_entropy(logits, targets, self._group)
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
