"""On which device this rank trains, and what must hold before ranks can meet at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from zeropp.engine.ranks.collectives import connect_lazily
from zeropp.engine.ranks.errors import gathered, refusal
from zeropp.types.layout import InfeasibleError


def meet(keywords: Mapping[str, Any]) -> None:
    """Make the first collective possible; the keywords may be wrong still. Raises RuntimeError
    without a process group, and InfeasibleError on all ranks where two share a GPU."""
    if not dist.is_initialized():
        raise RuntimeError("parallelize: call torch.distributed.init_process_group first")
    connect_lazily(dist.get_world_size())
    asked = keywords.get("device")
    with suppress(Exception):  # ``device_of`` refuses what is no device
        if asked is not None and torch.device(asked).index is not None:
            torch.cuda.set_device(asked)  # which the collectives that compare arguments may need
    if "nccl" in str(dist.get_backend_config()):  # on all ranks, as it is collective
        check_own_gpu(on_cuda=on_cuda(asked))


def on_cuda(asked: Any) -> bool:
    """Whether this rank trains on a GPU; the arguments may be wrong still."""
    if asked is not None:
        return str(asked).startswith("cuda")
    return "nccl" in str(dist.get_backend_config())


def device_of(asked: torch.device | str | None) -> torch.device:
    """Where this rank trains: as asked, else where its process group's tensors live.

    A CUDA device becomes this process's current one, because streams and events are those of the
    current device where none is named. Raises InfeasibleError for a device that is not there.
    """
    way_out = "take cuda or cpu; CUDA_VISIBLE_DEVICES says which GPUs this process sees"
    with refusal(f"device={asked!r}", way_out):
        device = torch.device(asked or ("cuda" if on_cuda(None) else "cpu"))
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


def check_own_gpu(*, on_cuda: bool) -> None:
    """Refuse ranks that share a GPU, on all ranks; raises InfeasibleError. All ranks must call it,
    also those that do not train ``on_cuda``. They compare on the CPU, because NCCL's first
    collective would fail with less to read. Ranks with hosts of their own by NCCL_HOSTID share one
    on purpose, and NCCL lets them."""
    own_gpu = ""
    if on_cuda and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        own_gpu = f"{device.uuid} of {os.environ.get('NCCL_HOSTID') or socket.gethostname()}"
    group = dist.new_group(backend="gloo", group_desc="zeropp devices")
    gpus = gathered(own_gpu, group)
    dist.destroy_process_group(group)
    for gpu in filter(None, gpus):
        ranks = [rank for rank, other in enumerate(gpus) if other == gpu]
        if len(ranks) > 1:
            raise InfeasibleError(
                f"device: ranks {ranks} share GPU {gpu} (call torch.cuda.set_device with the local "
                "rank, or give device= to parallelize)"
            )
