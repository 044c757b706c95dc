"""What is trained and on what, and a contender's settings for it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zeropp.price.cluster import Cluster
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained and on what: the same for every contender of a comparison."""

    shape: ModelShape
    cluster: Cluster
    num_gpus: int
    global_batch: int  # sequences per step, over all ranks
    precision: Precision = "bf16"


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
