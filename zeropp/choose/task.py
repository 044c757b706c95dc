"""What is trained and on what, and a contender's settings for it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zeropp.price.cluster import Cluster
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape

# The share by which a run may take more memory than its price, where nobody says another:
# ``benchmarks.report.ratio_errors.memory_room`` has that of every program.
MEMORY_MARGIN = 0.19


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained and on what: the same for every contender of a comparison."""

    shape: ModelShape
    cluster: Cluster
    num_gpus: int
    global_batch: int  # sequences per step, over all ranks
    precision: Precision = "bf16"
    memory_margin: float = MEMORY_MARGIN

    @property
    def limit_bytes(self) -> int:
        """The priced peak that a search allows: with ``memory_margin`` more, tensors still fit."""
        return int(self.cluster.device.usable_bytes / (1 + self.memory_margin))


class Knobs(Protocol):
    """A contender's settings: a frozen dataclass of its own.

    A field with the name of an axis (``pp``, ``tp``, ``shard``, ``replicate``) is that axis's
    degree; an axis without a field has degree 1.
    """

    @property
    def name(self) -> str:
        """The contender's name in the registry."""
        ...


K = TypeVar("K", bound=Knobs)


@dataclass(frozen=True)
class Candidate(Generic[K]):
    """What a search tries: a contender's knobs and the number of sequences per microbatch."""

    knobs: K
    microbatch_size: int
