"""This rank's part of a global batch, as tensors on its device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.worker.data.batches import BatchSource
from zeropp.layout import Layout


def local_batch(
    batches: BatchSource, layout: Layout, step: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of this rank, both int64 [global_batch / dp, seq]."""
    rows = batches.shard(step, layout.dp_index(dist.get_rank()), layout.dp)
    inputs, targets = (torch.from_numpy(part).to(device) for part in rows)
    return inputs, targets
