"""On which device this rank trains, and what must hold before ranks can meet at all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from zeropp.engine.ranks.collectives import connect_lazily
from zeropp.engine.ranks.errors import refusal
from zeropp.types.layout import InfeasibleError


def meet(keywords: Mapping[str, Any]) -> None:
    """Make the first collective possible; the keywords may be wrong still. Raises RuntimeError
    without a process group."""
    if not dist.is_initialized():
        raise RuntimeError("parallelize: call torch.distributed.init_process_group first")
    connect_lazily(dist.get_world_size())
    with suppress(Exception):  # ``device_of`` refuses what is no device
        # Which the collectives that compare arguments may need; without an index it raises.
        torch.cuda.set_device(keywords.get("device"))


def device_of(asked: torch.device | str | None) -> torch.device:
    """Where this rank trains: as asked, else where its process group's tensors live.

    A CUDA device becomes this process's current one, because streams and events are those of the
    current device where none is named. Raises InfeasibleError for a device that is not there.
    """
    way_out = "take cuda or cpu; CUDA_VISIBLE_DEVICES says which GPUs this process sees"
    with refusal(f"device={asked!r}", way_out):
        has_nccl = "nccl" in str(dist.get_backend_config())
        device = torch.device(asked or ("cuda" if has_nccl else "cpu"))
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.set_device(device := torch.device("cuda", index))
    known = sorted(entry.partition(":")[0] for entry in dist.get_backend_config().split(","))
    if device.type not in known:
        raise InfeasibleError(
            f"device={str(device)!r}: the process group has no backend for it, only for "
            f"{' and '.join(known)} (give init_process_group another backend, or take that device)"
        )
    return torch.device("cpu") if device.type == "cpu" else device  # on a CPU none has an index
