"""The parameters of a flat buffer, and how their values are copied into it and viewed in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeropp.engine.flat_layout import Slot, Stretch


@dataclass(frozen=True)
class Types:
    """The number types of one flat buffer; ``wire`` is the type that reductions send."""

    master: torch.dtype
    compute: torch.dtype
    wire: torch.dtype


@dataclass(frozen=True)
class Held:
    """The parameters in one slot: one object, or several that the model ties."""

    slot: Slot
    parameters: tuple[nn.Parameter, ...]


def taken(held: Iterable[Held], stretch: Stretch, dtype: torch.dtype) -> Tensor:
    """A stretch of a buffer with the current values of the parameters, and zeros between them."""
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
    """The view, in a tensor of the buffer's size, of one parameter in its own shape."""
    return buffer[slot.stretch.begin : slot.stretch.end].view(slot.shape)


class Views:
    """Parameters that are views of a buffer inside steps, and NaN outside of them.

    Outside of steps the buffer has no memory, and whoever read a view of it would end the process.
    """

    def __init__(self, held: Iterable[Held], buffer: Tensor) -> None:
        nothing = buffer.new_full((), torch.nan)
        self._all = [
            (parameter, view(buffer, one.slot), nothing.expand(one.slot.shape))
            for one in held
            for parameter in one.parameters
        ]

    def show(self) -> None:
        """Make the parameters views of the buffer."""
        for parameter, inside, _ in self._all:
            parameter.data = inside

    def hide(self) -> None:
        """Make the parameters NaN, in their own shapes."""
        for parameter, _, outside in self._all:
            parameter.data = outside


def check_kept(held: Iterable[Held], gradients: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a parameter no longer has the gradient that it was given, to which
    backwards add."""
    for one, gradient in zip(held, gradients, strict=True):
        if any(parameter.grad is not gradient for parameter in one.parameters):
            piece, name = one.slot.names[0]
            raise RuntimeError(
                f"layers[{piece}]: something has replaced the gradient of {name!r} during the step "
                "(leave .grad as it is)"
            )
