"""The buffers in which the gradients of one flat buffer are summed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sums:
    """Makes buffers of ``size`` zeros.

    ``keeps``: one that was given back is used again. This is for jobs of one rank with one chunk,
    which hold a step's sums until the next step begins anyway: new memory of that size would cost a
    CPU a few percent of a step. With several chunks, the sums of those that come later in a step
    would add to the peak of the first backward; with more ranks a chunk's sums are freed as soon as
    they are reduced.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    keeps: bool
    _spare: Tensor | None = field(default=None, init=False)

    def make(self) -> Tensor:
        """A buffer of zeros."""
        spare, self._spare = self._spare, None
        return zeros(self.size, self.dtype, self.device) if spare is None else spare.zero_()

    def give_back(self, sums: Tensor | None) -> None:
        """Take a buffer that is not needed any more, if there is one."""
        if self.keeps and sums is not None:
            self._spare = sums


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer for gradients (a function of its own, so that traces can recognise the buffer)."""
    return torch.zeros(size, dtype=dtype, device=device)
