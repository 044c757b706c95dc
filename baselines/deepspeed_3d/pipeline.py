"""DeepSpeed with a pipeline on one rank: its ``PipelineEngine`` runs the step. ``build`` begins
all of DeepSpeed's runs, those on its other engine, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe import schedule as instructions
from torch import Tensor, nn

from baselines.deepspeed_3d.ordinary import OrdinaryTrainer
from baselines.deepspeed_3d.private_names import (
    DTYPE_CODES,
    OPS,
    CutPipeline,
    observe_instructions,
    partition_uniform,
)
from baselines.deepspeed_3d.tensor_parallel import cut_logits, vocabulary_cross_entropy
from baselines.deepspeed_3d.trainer import TIED, DeepSpeedTrainer
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Op
from zeropp.types.training import OptimizerConfig

_TENSOR, _TUPLE = 0, 2  # DeepSpeed's codes for the kind of message


class Factory(nn.Module):
    """A layer type for DeepSpeed's ``LayerSpec``, which builds the layers of a ``PipelineModule``
    from a type and arguments: making one calls ``make(index)`` and returns that module."""

    def __new__(cls, make: Callable[[int], nn.Module], index: int) -> Any:
        return make(index)


def tie(
    layers: list[LayerSpec], make: Callable[[int], nn.Module], group: dist.ProcessGroup
) -> list[LayerSpec]:
    """The layers for tied embeddings: the head computes its logits with the embedding's weight.

    As always with DeepSpeed's tied layers, every stage that uses the embedding holds a copy, and
    the copies' gradients are summed.
    """

    def make_norm(index: int) -> nn.Module:
        head = make(index)
        del head.output
        head.forward = head.norm.forward  # type: ignore[union-attr]
        return head

    def logits(embedding: nn.Module, x: Tensor) -> Tensor:
        return cut_logits(x, embedding.tokens.weight, group)  # type: ignore[union-attr, arg-type]

    tied = {"tied_weight_attr": ["tokens.weight"]}
    return [
        TiedLayerSpec(TIED, Factory, make, 0, **tied),
        *layers[1:-1],
        LayerSpec(Factory, make_norm, len(layers) - 1),
        TiedLayerSpec(TIED, Factory, make, 0, forward_fn=logits, **tied),
    ]


def fill(plan: Plan, message: Tensor) -> None:
    """Fill a received message of integers with what the neighbouring stage would have sent, for a
    rank that is traced without its peers.

    A *boundary* is the activation that one stage sends to the next; all boundaries of a plan have
    one shape, which is sent before the first one (``PipelineEngine._send_tensor_meta``). Under
    tensor parallelism a rank sends only its part of each boundary, after integers that describe the
    part (``PartitionedTensor.to_meta``): these are an int64 ``message``, any other is the shape.
    """
    shape, tp = [plan.microbatch_size, plan.shape.seq, plan.shape.hidden], plan.layout.tp
    rank = plan.layout.coordinates(dist.get_rank())["tp"]
    numbers = [len(shape), *shape, tp, rank, *partition_uniform(prod(shape), tp)]
    if message.dtype != torch.int64:
        code = DTYPE_CODES[torch.bfloat16 if plan.precision == "bf16" else torch.float32]
        part = [DTYPE_CODES[torch.int64], 1, len(numbers), code, 1, prod(shape) // tp]
        numbers = [_TENSOR, code, len(shape), *shape] if tp == 1 else [_TUPLE, 2, *part]
    message[: len(numbers)] = torch.tensor(numbers, dtype=message.dtype)


class PipelineTrainer(DeepSpeedTrainer):
    """Runs DeepSpeed's ``PipelineEngine``."""

    def __init__(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> None:
        super().__init__(plan, optimizer, device, seed)
        observe_instructions(self._engine, self._observed)

    def _arguments(self, seed: int) -> dict[str, Any]:
        shape, group = self._plan.shape, self._group

        def make(index: int) -> nn.Module:
            return self._piece(index, seed)

        layers = [LayerSpec(Factory, make, index) for index in range(shape.num_pieces)]
        module = CutPipeline(
            self._plan.cuts,
            layers=tie(layers, make, group) if shape.tied_embeddings else layers,
            topology=self._topology,
            loss_fn=lambda logits, labels: vocabulary_cross_entropy(logits, labels, group),
        )
        return {"model": module}

    def _train(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        loss: Tensor = self._engine.train_batch(iter(batches))
        return loss

    def _observed(self, kind: type, run: Callable[..., None]) -> Callable[..., None]:
        """Wrap DeepSpeed's handler of an instruction, so that instructions which are actions of a
        schedule are counted and timed; handlers of others are returned as they are."""
        op = OPS.get(kind)
        if op is Op.REDUCE_TIED and self._engine.stage_id not in self._plan.tied_stages:
            op = None  # DeepSpeed gives every stage the instruction

        def observed(engine: Any, **arguments: Any) -> None:
            if kind is instructions.OptimizerStep:
                self._clip()
            with nullcontext() if op is None else self._action(op):
                MethodType(run, engine)(**arguments)

        return observed


def build(
    plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
) -> DeepSpeedTrainer:
    """Build this rank's part of a plan, on the engine that runs it. All ranks of the world must
    call it."""
    kind = PipelineTrainer if plan.layout.pp > 1 else OrdinaryTrainer
    return kind(plan, optimizer, device, seed)
