"""The parameters that lie in a flat buffer, and their values in and out of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeropp.engine.flat_layout import Slot, Stretch


@dataclass(frozen=True)
class Types:
    """Number types of one flat buffer; ``wire`` is what reductions send."""

    master: torch.dtype
    compute: torch.dtype
    wire: torch.dtype


@dataclass(frozen=True)
class Held:
    """Parameters that lie in one slot: usually one object, several where the model ties them."""

    slot: Slot
    parameters: tuple[nn.Parameter, ...]


def taken(held: Iterable[Held], stretch: Stretch, dtype: torch.dtype) -> Tensor:
    """A stretch of a buffer with the values that the parameters have now; zeros in between."""
    lot = list(held)
    (device,) = {parameter.device for one in lot for parameter in one.parameters}
    buffer = torch.zeros(len(stretch), dtype=dtype, device=device)
    for one in lot:
        mine = one.slot.stretch.meet(stretch)
        if len(mine):
            values = one.parameters[0].detach().flatten()
            buffer[mine.inside(stretch)] = values[mine.inside(one.slot.stretch)]
    return buffer


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """A parameter's part of a tensor that is as long as the buffer, in the parameter's shape."""
    return buffer[slot.stretch.begin : slot.stretch.end].view(slot.shape)
