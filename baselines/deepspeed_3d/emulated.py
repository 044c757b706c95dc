"""What of DeepSpeed runs otherwise on an emulated device, where tensors have no values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from baselines.deepspeed_3d.private_names import ACCELERATOR, COMPARES_ORDERS, PARTS_AS_NUMBERS
from zeropp.emulate.device import VirtualDevice


def stand_ins(device: VirtualDevice) -> Iterator[tuple[Any, str, Any]]:
    """See ``Contender.stand_ins``: DeepSpeed sees a device with streams, and makes the numbers by
    which its stages describe a tensor's parts without ``torch.LongTensor``, which would leave fake
    tensors none. ZeRO-3 does not compare the order of its modules with other ranks'."""
    del device  # its streams are those of ``torch.cuda``
    yield *ACCELERATOR, _Emulated()
    yield (
        *PARTS_AS_NUMBERS,
        lambda part: torch.tensor(
            (len(part.orig_size), *part.orig_size, part.num_parts, part.rank, *part.partition)
        ),
    )
    yield *COMPARES_ORDERS, lambda order: None


class _Emulated(type(get_accelerator())):  # type: ignore[misc]
    """The CPU with what stands in for streams of ``torch.cuda``."""

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    def synchronize(self, device_index: object = None) -> None:
        torch.cuda.synchronize()

    Stream = property(lambda _: torch.cuda.Stream)
    Event = property(lambda _: torch.cuda.Event)

    def stream(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: object = None) -> Any:
        return torch.cuda.current_stream()

    def default_stream(self, device_index: object = None) -> Any:
        return torch.cuda.current_stream()
