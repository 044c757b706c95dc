"""Checks, before anything is built, what CUDA was told and which GPU each rank has."""

from __future__ import annotations

import os
import socket
import warnings
from collections import defaultdict

import torch
import torch.distributed as dist

from zeropp.engine.ranks.cuda_settings import CUDA_MISSED
from zeropp.engine.ranks.errors import gathered
from zeropp.types.layout import InfeasibleError

_STREAMS = 8  # of a pipeline rank: compute, three lanes, messages to and from two neighbours


def check_cuda(pp: int) -> None:
    """Refuse what CUDA was told where a pipeline would hang; raises InfeasibleError. Warns of what
    may hang: settings that CUDA was initialised without, and blocking launches."""
    if pp == 1:
        return
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if not connections.isdecimal() or int(connections) < _STREAMS:
        raise InfeasibleError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: a pipeline rank has {_STREAMS} streams, "
            "and two that share a hardware queue wait for each other for ever (set 32 before CUDA "
            "is used, or pp=1)"
        )
    if os.environ.get("CUDA_MODULE_LOADING", "").upper() == "LAZY":
        raise InfeasibleError(
            "CUDA_MODULE_LOADING=LAZY: ranks that load kernels at their first use wait for "
            "messages of each other for ever (set EAGER before CUDA is used, or pp=1)"
        )
    if CUDA_MISSED:
        names = " and ".join(CUDA_MISSED)
        warnings.warn(
            f"CUDA was initialised without {names}: steps may hang (import zeropp earlier)",
            stacklevel=4,
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        warnings.warn(
            "CUDA_LAUNCH_BLOCKING is set: pipelines hang, because a rank that waits for its "
            "message to arrive never asks for its neighbour's (unset it, or pp=1)",
            stacklevel=4,
        )


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
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(gpus):
        ranks[gpu].append(rank)
    shared = next((same for gpu, same in ranks.items() if gpu and len(same) > 1), None)
    if shared is not None:
        raise InfeasibleError(
            f"device: ranks {shared} share GPU {gpus[shared[0]]} (call torch.cuda.set_device with "
            "the local rank, or give device= to parallelize)"
        )
