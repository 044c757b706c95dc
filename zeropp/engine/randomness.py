"""Random numbers of dropout as a function of the step alone, so that no topology changes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


def seed_piece(seed: int, step: int, microbatch: int, piece: int) -> None:
    """Seed torch for one piece and microbatch of a step.

    ``microbatch`` counts over the whole global batch: with m microbatches a rank and step, the
    data-parallel rank d has numbers d*m .. (d+1)*m-1. One process that calls this before every
    piece draws the numbers that any pipeline draws.
    """
    mixed = seed
    for part in (step, microbatch, piece):
        mixed = (mixed * 1_000_003 + part) % 2**63
    torch.manual_seed(mixed)


@dataclass
class StepSeeds:
    """The seeds of one rank; ``step`` is the number of steps done before."""

    seed: int
    first_microbatch: int
    device: torch.device
    step: int = 0

    def set(self, piece: int, microbatch: int) -> None:
        """Seed for one piece of the model and one of this rank's microbatches."""
        seed_piece(self.seed, self.step, self.first_microbatch + microbatch, piece)

    @contextmanager
    def drawing(self, step: int) -> Iterator[None]:
        """A step's draws; afterwards torch's generators are as they were, so that whatever else a
        rank draws from them (a batch, say) does not depend on the model's place in the pipeline."""
        self.step = step
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield
