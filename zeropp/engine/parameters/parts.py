"""Gradients of a chunk in parts: one buffer for a rank's chunks instead of two.

The weights of a chunk's linear layers are in several flat buffers, its *parts*, in the order in
which a backward makes their gradients. In the last backward before a reduction, each part is
reduced as soon as its last weight gradient is added. A part of the next chunk takes memory with its
first gradient. If by then the parts would take more than the rank's largest chunk does, compute
first waits for the oldest reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.ranks.lanes import Lanes


@dataclass
class GradientRoom:
    """The memory of the gradients of all parts of a rank."""

    lanes: Lanes
    chunks: list[Sequence[FlatParameters]] = field(default_factory=list)

    def make(self, flat: FlatParameters) -> None:
        """Wait for reductions of parts, the oldest first, as far as ``flat`` needs their room."""
        reducing = self.lanes.shard_reductions
        sizes = {f: f.gradient_bytes for chunk in self.chunks for f in chunk}
        most = max(sum(sizes[f] for f in chunk) for chunk in self.chunks)
        held = sum(size for f, size in sizes.items() if f.has_sums or f in reducing)
        for other in [f for f in reducing if f in sizes]:
            if held + sizes[flat] <= most:
                break
            self.lanes.join_reduction_of(other)
            held -= sizes[other]


class GradientParts:
    """The parts of a chunk, in the order in which they are reduced.

    A part is complete once as many of its products have been added as the microbatch's forward had
    layers. One with fewer (autograd makes the gradient, or there is none) is reduced at the
    end. All ranks reduce in the same order.
    """

    def __init__(self, flats: Sequence[FlatParameters], room: GradientRoom) -> None:
        self.flats = flats
        room.chunks.append(flats)
        for flat in flats:
            flat.room = room
        self._number = {id(p): n for n, flat in enumerate(flats) for p in flat.parameters}
        self._layers: dict[int, list[int]] = {}  # of a microbatch's forward, per part
        self._current: list[int] | None = None  # of a forward that runs
        self._left: list[int] | None = None  # of the last backward before a reduction
        self._next = 0  # the part that is reduced next

    def begin_forward(self, microbatch: int) -> None:
        """From now on count layers for ``microbatch``."""
        self._current = self._layers[microbatch] = [0] * len(self.flats)

    def count(self, weight: Tensor) -> None:
        """Count a layer in a forward, by its weight."""
        number = self._number.get(id(weight))
        if self._current is not None and number is not None:
            self._current[number] += 1

    def begin_backward(self, microbatch: int, *, is_last: bool) -> None:
        """From now on weight gradients of ``microbatch`` are added; ``is_last``: it is the last one
        before a reduction."""
        layers = self._layers.pop(microbatch)
        self._left = layers if is_last else None

    def add(self, weight: Tensor, work: Callable[[], None]) -> None:
        """Do ``work``, which adds to a weight's gradient, and reduce what is complete."""
        number = self._number.get(id(weight))
        if number is not None:
            self.flats[number].make_gradients()
        work()
        if self._left is not None and number is not None:
            self._left[number] -= 1
            while self._next < len(self.flats) and not self._left[self._next]:
                self._reduce_next()

    def finish(self) -> None:
        """Reduce what is left. Raises RuntimeError if a part was not complete."""
        for flat in self.flats[: self._next]:
            if not flat.has_sums and any(p.grad is not None for p in flat.parameters):
                names = [name for slot in flat.members for _, name in slot.names]
                raise RuntimeError(
                    f"gradient_parts: one of {names} is used outside of its linear layer, too, so "
                    "that its gradient is complete too late (take gradient_parts=1)"
                )
        while self._next < len(self.flats):
            self._reduce_next()
        self._next, self._left = 0, None

    def _reduce_next(self) -> None:
        self.flats[self._next].reduce()
        self._next += 1
