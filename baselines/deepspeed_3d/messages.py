"""The integers that DeepSpeed's pipeline stages send each other, for a rank without its peers.

Before the first boundary its shape is sent (``PipelineEngine._send_tensor_meta``), and under tensor
parallelism every boundary is a part of one tensor behind the numbers that say which
(``PartitionedTensor.to_meta``). All boundaries of a plan are alike.
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from baselines.deepspeed_3d.private_names import DTYPE_CODES, partition_uniform
from zeropp.plan import Plan

_TENSOR, _TUPLE = 0, 2  # DeepSpeed's words for what is sent


def fill(plan: Plan, message: Tensor) -> None:
    """Write into a message of integers what a neighbour would have sent."""
    numbers = _partition(plan) if message.dtype == torch.int64 else _shapes(plan)
    message[: len(numbers)] = torch.tensor(numbers, dtype=message.dtype)


def _boundary(plan: Plan) -> list[int]:
    return [plan.microbatch_size, plan.shape.seq, plan.shape.hidden]


def _partition(plan: Plan) -> list[int]:
    shape, tp = _boundary(plan), plan.layout.tp
    rank = plan.layout.coordinates(dist.get_rank())["tp"]
    return [len(shape), *shape, tp, rank, *partition_uniform(prod(shape), tp)]


def _shapes(plan: Plan) -> list[int]:
    codes, shape = DTYPE_CODES, _boundary(plan)
    code = codes[torch.bfloat16 if plan.precision == "bf16" else torch.float32]
    if plan.layout.tp == 1:
        return [_TENSOR, code, len(shape), *shape]
    place, part = len(_partition(plan)), prod(shape) // plan.layout.tp
    return [_TUPLE, 2, codes[torch.int64], 1, place, code, 1, part]
