"""The integers that DeepSpeed's pipeline stages send each other, for a rank traced without peers.

A *boundary* is the activation that one stage sends to the next. Before the first one, its shape is
sent (``PipelineEngine._send_tensor_meta``). Under tensor parallelism a rank sends only its part of
each boundary, after integers that describe the part (``PartitionedTensor.to_meta``). A traced rank
has no peer that sends these integers, so they are computed here. All boundaries of a plan have one
shape.
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from baselines.deepspeed_3d.private_names import DTYPE_CODES, partition_uniform
from zeropp.plan import Plan

_TENSOR, _TUPLE = 0, 2  # DeepSpeed's codes for the kind of message


def fill(plan: Plan, message: Tensor) -> None:
    """Fill a received message of integers with what the neighbouring stage would have sent.

    An int64 ``message`` describes this rank's part of a boundary; any other one gives its shape.
    """
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
