"""DeepSpeed's ZeRO-3 on one rank: ``DeepSpeedEngine`` gathers parameters ahead of their use, module
by module, and reduces gradients to the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import deepspeed
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from torch.nn import functional as F

from baselines.deepspeed_3d.ordinary import OrdinaryTrainer
from baselines.deepspeed_3d.private_names import neighbours, zero3_linear
from baselines.model import sliced_cross_entropy
from zeropp.price.programs import program_named


class Zero3Trainer(OrdinaryTrainer):
    """Runs DeepSpeed's ordinary engine with ZeRO-3.

    DeepSpeed replaces ``torch.nn.functional.linear`` of the whole process by one that saves a
    parameter, and not its gathered values. It has the replacement in its own steps alone here, as
    other models may be in the process.
    """

    def _arguments(self, seed: int) -> dict[str, Any]:
        """The model; each piece is cut before the next one is made."""
        shape = self._plan.shape
        mpu = PipelineParallelGrid(self._topology)
        arguments = {
            "config_dict_or_path": self._config(0),
            "data_parallel_group": mpu.get_data_parallel_group(),
            "mpu": mpu,
        }
        if (ranks := program_named(self._plan.program).zero_hpz_partition_size) > 1:
            arguments["zero_param_parallel_group"] = neighbours(ranks)
        pieces: list[nn.Module] = []
        with mock.patch.object(F, "linear", F.linear):
            for index in range(shape.num_pieces):
                piece = self._piece(index, seed)
                if shape.tied_embeddings and index == shape.num_pieces - 1:
                    piece.output.weight = pieces[0].tokens.weight  # type: ignore[union-attr]
                if self._plan.precision == "bf16":
                    piece.bfloat16()
                deepspeed.zero.Init(module=piece, **arguments)
                pieces.append(piece)
        return {"model": nn.Sequential(*pieces), "mpu": mpu}

    def _config(self, parameters: int) -> dict[str, Any]:
        program = program_named(self._plan.program)
        config = super()._config(parameters)
        config["communication_data_type"] = self._plan.reduce_dtype
        config["zero_optimization"] = {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": program.state(self._plan.precision).bucket,
            "stage3_allgather_sequential": not program.gathered_together,
            "stage3_prefetch_bucket_size": program.gathered_together or 50_000_000,
            "stage3_max_live_parameters": program.live_parameters,
            "stage3_max_reuse_distance": program.live_parameters,
            "stage3_param_persistence_threshold": program.persistent,
            "zero_hpz_partition_size": program.zero_hpz_partition_size,
        }
        return config

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return sliced_cross_entropy(logits, targets)

    def _train(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        with mock.patch.object(F, "linear", zero3_linear):
            return super()._train(batches)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Trainer.full_parameters``."""
        for name, parameter in self._engine.module.named_parameters():
            yield name, safe_get_full_fp32_param(parameter).cpu()
