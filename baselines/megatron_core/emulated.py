"""What of Megatron-Core runs otherwise on an emulated device, where tensors have no values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from baselines.megatron_core import private_names
from zeropp.emulate.device import VirtualDevice
from zeropp.emulate.emulation import as_one_kernel
from zeropp.emulate.world import wherever_imported


def stand_ins(device: VirtualDevice) -> Iterator[tuple[Any, str, Any]]:
    """See ``Contender.stand_ins``: fused functions run, each as one kernel, and ``torch.cuda`` has
    streams, as its own module has."""
    yield private_names, "has_fused_functions", lambda *_: True
    yield private_names, "run_on_cpu", _run_on_emulated_device
    yield from wherever_imported(
        {each: as_one_kernel(device, each) for each in private_names.NOT_COMPILED}
    )


def _run_on_emulated_device() -> None:
    state = torch.tensor([0])  # a generator's own has no values; made here, it is a parameter
    private_names.give_torch(lambda: state, private_names.nothing)
