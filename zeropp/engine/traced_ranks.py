"""Traces the memory of one rank of a large job, alone on any machine, with the contender's own
code.

The rank builds its trainer and runs a whole step in a ``fake_world``, with fake tensors: every
allocation is made, but none takes memory. The numbers are exact except for the allocator's
rounding, what kernels allocate inside, and what network libraries keep. A contender that cannot run
with fake tensors gets real ones. ``zeropp.engine.allocations`` sorts allocations by kind.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeropp.engine.allocations import Allocations
from zeropp.engine.fake_world import fake_world
from zeropp.engine.private_names import FakeTensorMode
from zeropp.engine.trace_hooks import observed
from zeropp.plan import MemoryBytes, Plan
from zeropp.training import OptimizerConfig, Trainer

Build = Callable[[Plan, OptimizerConfig, torch.device, int], Trainer]


@dataclass(frozen=True)
class Trace:
    """The trace of one rank's step: bytes by kind at the peak, and the seconds that it took."""

    rank: int
    memory: MemoryBytes
    seconds: float


def trace_ranks(
    plan: Plan,
    ranks: Sequence[int],
    *,
    optimizer: OptimizerConfig,
    build: Build,
    fill_integers: Callable[[Plan, Tensor], None] | None = None,
) -> Iterator[Trace]:
    """Trace some ranks of a plan, one per core at a time; results come in the order of ``ranks``.

    ``build`` makes the contender's trainer, as on a real rank. If ``fill_integers`` is given, which
    fills messages as peers would, tensors are real ones on the CPU. Each rank has a process of its
    own, because what torch caches of one rank's meshes would be wrong for another.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    workers = min(len(ranks), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        one = partial(
            _trace_rank, plan, optimizer=optimizer, build=build, fill_integers=fill_integers
        )
        yield from pool.map(one, ranks)


def _trace_rank(
    plan: Plan,
    rank: int,
    *,
    optimizer: OptimizerConfig,
    build: Build,
    fill_integers: Callable[[Plan, Tensor], None] | None,
) -> Trace:
    begin = time.perf_counter()
    fake = fill_integers is None
    fill = None if fill_integers is None else partial(fill_integers, plan)
    with (
        fake_world(rank, plan.layout.world, fill),
        FakeTensorMode() if fake else nullcontext(),
        Allocations(fake=fake) as allocations,
        observed(allocations),
    ):
        memory = _run_step(plan, optimizer, build, allocations)
    return Trace(rank, memory, time.perf_counter() - begin)


def _run_step(
    plan: Plan, optimizer: OptimizerConfig, build: Build, allocations: Allocations
) -> MemoryBytes:
    allocations.kind = "parameters"
    trainer = build(plan, optimizer, torch.device("cpu"), 0)
    gc.collect()  # whole parameters that were cut into shards hang in reference cycles
    allocations.kind = None
    size = (plan.num_microbatches * plan.microbatch_size, plan.shape.seq)
    batch = torch.zeros(size, dtype=torch.long)
    allocations.begin_step()
    trainer.step(batch, batch)
    return allocations.peak()
