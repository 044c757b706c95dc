"""Private names of torch that FSDP2's trainers need (``fsdp`` and ``torch_pp``).

A release of torch may move or change them; for each one ``tests/gloo/test_private_names.py`` says
what no longer works without it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily as with_real_tensors
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

__all__ = ["DefaultAllGather", "DefaultReduceScatter", "scale_all", "with_real_tensors"]


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place, many per kernel; torch has no public call for this."""
    torch._foreach_mul_(tensors, factor.to(tensors[0].dtype))
