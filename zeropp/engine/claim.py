"""A parameter is trained by one model at a time.

A model puts its flat buffers in the place of its layers' parameters. If a second model were made
from the same layers, the first would go on with the second one's buffers and never see its own
updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from torch import nn

from zeropp.engine.options import Piece
from zeropp.layout import InfeasibleError

_claimed: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # by identity


class Claim:
    """Reserves parameters for one model, from ``take`` until ``end``."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def take(self, pieces: Sequence[Piece]) -> None:
        """Reserve the parameters of some pieces; raises InfeasibleError, and reserves none, if
        another model that was not closed has one of them."""
        wanted: list[nn.Parameter] = []
        for piece in pieces:
            for name, parameter in piece.module.named_parameters():
                if id(parameter) in _claimed:
                    raise InfeasibleError(
                        f"layers[{piece.index}]: {name!r} belongs to another model that "
                        "parallelize has made (close that model first, or give each its own layers)"
                    )
                wanted.append(parameter)
        self._parameters = wanted
        _claimed.update({id(parameter): parameter for parameter in wanted})

    def end(self) -> None:
        """Let other models have the parameters."""
        for parameter in self._parameters:
            _claimed.pop(id(parameter), None)
        self._parameters.clear()
