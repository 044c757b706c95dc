"""What of Megatron-Core runs otherwise on an emulated device, where tensors have no values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from baselines.megatron_core import private_names
from zeropp.emulate.device import VirtualDevice
from zeropp.emulate.emulation import as_one_kernel
from zeropp.emulate.world import wherever_imported


def stand_ins(device: VirtualDevice) -> Iterator[tuple[Any, str, Any]]:
    """See ``Contender.stand_ins``: fused functions run, each as one kernel, and ``torch.cuda`` has
    streams, as its own module has."""
    yield private_names, "has_fused_functions", lambda *_: True
    yield private_names, "run_on_cpu", _run_on_emulated_device
    yield *private_names.L2_NORM, _l2_norm
    fused = private_names.NOT_COMPILED
    yield from wherever_imported({each: as_one_kernel(device, each) for each in fused})


def _run_on_emulated_device() -> None:
    state = torch.tensor([0])  # a generator's own has no values
    private_names.give_torch(lambda: state, private_names.nothing)


def _l2_norm(size: int, flag: Tensor, lists: list[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """``local_multi_tensor_l2_norm``, which makes a tensor of tensors and so reads each on the
    host; fake ones can only be read one by one."""
    del size, flag
    norms = [float(torch.norm(tensor)) for tensor in lists[0]]
    return torch.tensor([float(torch.norm(torch.tensor(norms)))]), None
