"""The parameters of a flat buffer, and how their values are copied into it and viewed in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.engine.flat_layout import Name, Slot, Stretch


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


class _Noted(torch.autograd.Function):
    """Keeps tensors as if for a backward: reading them later raises RuntimeError if one of them was
    written to since, which is the public way to compare versions of tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()


def _noted(parameters: Iterable[Tensor]) -> Any:
    """A tensor whose ``grad_fn.saved_tensors`` raise once one of the parameters was written to.
    Torch 2.11 frees what was saved together with this tensor."""
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        return _Noted.apply(anchor, *(parameter.detach() for parameter in parameters))  # type: ignore[no-untyped-call]


def _is_written(noted: Any) -> bool:
    try:
        noted.grad_fn.saved_tensors  # noqa: B018 - reading it compares the versions
    except RuntimeError:
        return True
    return False


class Views:
    """Parameters that are views of a buffer, and, if it ``hides`` them, NaN outside of steps.

    Outside of steps such a buffer has no memory, and whoever read a view of it would end the
    process. Each parameter has a NaN of its own, so that a write to one does not show in another.
    ``is_master``: whether the buffer has the values that the optimizer updates, not a copy of them.
    """

    def __init__(
        self, held: Iterable[Held], buffer: Tensor, *, hides: bool, is_master: bool
    ) -> None:
        slots = [(one.slot, parameter) for one in held for parameter in one.parameters]
        self.hides, self._is_master = hides, is_master
        self._nothing = buffer.new_full((len(slots) if hides else 0,), torch.nan)
        insides = [view(buffer, slot) for slot, _ in slots]
        outsides = [
            nothing.expand(slot.shape)
            for (slot, _), nothing in zip(slots, self._nothing.unbind(), strict=hides)
        ]
        parameters = [parameter for _, parameter in slots]
        self._inside = list(zip(parameters, insides, strict=True))
        self._outside = list(zip(parameters, outsides, strict=True)) if hides else self._inside
        self._names = [slot.names[0] for slot, _ in slots]
        _put(self._inside)
        self._note()
        self.hide()

    def show(self) -> None:
        """Make the parameters views of the buffer."""
        if self.hides:
            _put(self._inside)

    def hide(self) -> None:
        """Make the parameters NaN, in their own shapes, if this hides them."""
        if self.hides:
            _put(self._outside)

    def first_written(self) -> Name | None:
        """The first parameter, if there is one, that was written to while it was hidden or was a
        copy of its master, or that was given another tensor (``.data``, ``.to``) at any time.

        It would reach no master, so training would go on without it. Torch itself refuses most
        writes, because a hidden parameter is one number that is expanded, but not those to
        parameters of one element, and not ``fill_``. Writes through ``.data`` are not found here
        (see ``overwritten``).
        """
        pairs = zip(self._names, self._outside, strict=True)
        for one, (parameter, expected) in pairs:
            if parameter.data_ptr() != expected.data_ptr() or parameter.dtype != expected.dtype:
                return one
        if self._is_master or not _is_written(self._noted):
            return None
        each = zip(self._names, self._each, strict=True)
        return next(one for one, noted in each if _is_written(noted))

    def overwritten(self) -> Tensor:
        """Whether each hidden parameter has another value than NaN: numbers on its device."""
        return ~self._nothing.isnan()

    def name_of(self, number: int) -> Name:
        """The name of a parameter by its place in ``overwritten``."""
        return self._names[number]

    def undo_writes(self) -> None:
        """Give parameters their own tensors again, and hidden ones their NaN. A copy that was
        written to stays so, and ``first_written`` finds it again."""
        _put(self._outside)
        if self.hides:
            self._nothing.fill_(torch.nan)
            self._note()

    def _note(self) -> None:
        if self._is_master:
            return
        parameters = [parameter for parameter, _ in self._outside]
        self._noted, self._each = _noted(parameters), [_noted([one]) for one in parameters]


def _put(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, tensor in pairs:
        parameter.data = tensor


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
