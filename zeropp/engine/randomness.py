"""Seeds dropout by step, microbatch and piece, so that its masks are the same in every topology."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


def seed_piece(seed: int, step: int, microbatch: int, piece: int) -> None:
    """Seed torch's generators, of the CPU and of the current CUDA device, for one piece and
    microbatch of a step.

    ``microbatch`` is an index in the whole global batch: with m microbatches per rank and step, the
    data-parallel rank d has the indices d*m .. (d+1)*m-1. A single process that calls this before
    every piece draws the same numbers as any pipeline.
    """
    mixed = seed
    for part in (step, microbatch, piece):
        mixed = (mixed * 1_000_003 + part) % 2**63
    # Not ``torch.manual_seed``: before CUDA is in use it keeps a stack trace of every call, which
    # takes longer than a small layer.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed)


@dataclass
class StepSeeds:
    """The seeds of one rank; ``step`` is the number of steps that are done."""

    seed: int
    first_microbatch: int
    device: torch.device
    step: int = 0

    def set(self, piece: int, microbatch: int) -> None:
        """Seed torch for one piece of the model and one of this rank's microbatches."""
        seed_piece(self.seed, self.step, self.first_microbatch + microbatch, piece)

    @contextmanager
    def drawing(self, step: int) -> Iterator[None]:
        """Inside this context a step draws its random numbers; afterwards torch's generators are as
        before. So what else a rank draws (a batch, for example) does not depend on its stages."""
        self.step = step
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield
