"""Runs the code of some ranks of a large job, each alone, on an emulated device, and reads its
memory and, for its time, its log.

A rank builds its trainer and runs whole steps in a ``fake_world``, with fake tensors: every
allocation is made, but none takes memory.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zeropp.emulate.device import VirtualDevice
from zeropp.emulate.kernels import as_on_cuda, describe, without_values
from zeropp.emulate.log import STEP, Issued
from zeropp.emulate.memory import Allocations, observed
from zeropp.emulate.private_names import FakeTensorMode
from zeropp.emulate.stand_ins import emulated
from zeropp.emulate.timing import called
from zeropp.emulate.world import fake_world
from zeropp.plan import MemoryBytes, Plan
from zeropp.training import OptimizerConfig, Trainer


class Program(Protocol):
    """A contender, whose code is to be traced."""

    def build(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> Trainer:
        """Make this rank's trainer."""

    def fill_integers(self, plan: Plan, message: Tensor) -> None:
        """Fill a received message of integers as a peer would have."""


@dataclass(frozen=True)
class Trace:
    """The trace of one rank: bytes by kind at the peak of the first step, the seconds that it took
    to trace and, if its time is wanted, what its host has issued."""

    rank: int
    memory: MemoryBytes
    seconds: float
    log: Sequence[Issued] = ()


def trace_ranks(
    plan: Plan,
    ranks: Sequence[int],
    *,
    optimizer: OptimizerConfig,
    program: Program,
    steps: int = 1,
    here: bool = False,
) -> Iterator[Trace]:
    """Trace some ranks of a plan, one per core at a time; results come in the order of ``ranks``.
    With more than one of ``steps`` they have logs, in which places say where a step begins.

    With ``here`` kernels are those of the CPU that is here, with what they are called with, and not
    those of a GPU with what they compute. Each rank has a process of its own, because what
    torch caches of one rank's meshes would be wrong for another.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    workers = min(len(ranks), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        trace = partial(
            _trace_rank,
            plan,
            optimizer=optimizer,
            program=program,
            steps=steps,
            here=here,
            threads=max(1, (os.cpu_count() or 1) // workers),
        )
        yield from pool.map(trace, ranks)


def _trace_rank(
    plan: Plan,
    rank: int,
    *,
    optimizer: OptimizerConfig,
    program: Program,
    steps: int,
    here: bool,
    threads: int,
) -> Trace:
    begin = time.perf_counter()
    torch.set_num_threads(threads)  # other ranks have the other cores
    kernel = called if here else describe
    device = VirtualDevice(describe=kernel if steps > 1 else None)
    with (
        fake_world(rank, plan.layout.world, partial(program.fill_integers, plan)),
        FakeTensorMode(),
        Allocations() as allocations,
        observed(allocations),
        emulated(device),
        without_values(),
        nullcontext() if here else as_on_cuda(device),
    ):
        allocations.kind = "parameters"
        trainer = program.build(plan, optimizer, torch.device("cpu"), 0)
        gc.collect()  # whole parameters that were cut into shards hang in reference cycles
        allocations.kind = None
        size = (plan.num_microbatches * plan.microbatch_size, plan.shape.seq)
        batch = torch.zeros(size, dtype=torch.long)
        allocations.begin_step()
        device.log.place(STEP)
        trainer.step(batch, batch)
        memory = allocations.peak()
        for _ in range(steps - 1):
            device.log.place(STEP)
            trainer.step(batch, batch)
        device.log.place(STEP)
    log = device.log.issued if steps > 1 else ()
    return Trace(rank, memory, time.perf_counter() - begin, log)
