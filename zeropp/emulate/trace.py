"""Runs the code of some ranks of a large job, each alone in a process, with fake tensors on an
emulated device: every allocation is made, but none takes memory.

``trace_ranks`` runs a contender of the suite. ``trace_script`` runs a training script of anybody's,
which makes its process groups itself and asks for a GPU or a CPU: there are no peers here, and both
are the emulated device. A step is then what lies between two steps of its optimizer, or between the
ends of two backwards where it makes none.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeropp.emulate.device import Describe, VirtualDevice
from zeropp.emulate.emulation import as_on_cuda, emulated
from zeropp.emulate.kernels import describe
from zeropp.emulate.log import STEP, Issued, line_here
from zeropp.emulate.memory import Allocations, observed
from zeropp.emulate.private_names import FakeTensorMode
from zeropp.emulate.rendezvous import unmatched
from zeropp.emulate.script import Objects, ScriptError, UnknownObjectError, as_launched, why_not
from zeropp.emulate.world import Fill, fake_world, replaced, without_values
from zeropp.price.cluster import Cluster
from zeropp.schedule.plan import MemoryBytes, Plan
from zeropp.types.training import OptimizerConfig, Trainer

_STEPS = 2  # of a script's optimizer; the first one makes its state
_MOST_TRACED = 8  # ranks of a script that are all traced; of more, some of every kind


class Program(Protocol):
    """A contender, whose code is to be traced."""

    def build(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> Trainer:
        """Make this rank's trainer."""

    def fill_integers(self, plan: Plan, message: Tensor) -> None:
        """Fill a received message of integers as a peer would have."""

    def stand_ins(self, device: VirtualDevice) -> Iterable[tuple[Any, str, Any]]:
        """What runs otherwise on an emulated device, each as (owner, name, stand-in)."""


class _EnoughError(BaseException):
    """The script has done its steps; no ``except Exception`` of its own stops this."""


@dataclass(frozen=True)
class Trace:
    """The trace of one rank: bytes by kind at the peak of a step, the seconds that it took to trace
    and, if its time is wanted, what its host has issued. Of a script, ``sent``: the objects that it
    has sent; ``wants``: the object, its source and the script's line, for which it was cut off;
    ``by_backwards``: its steps end with backwards."""

    rank: int
    memory: MemoryBytes
    seconds: float
    log: Sequence[Issued] = ()
    sent: Mapping[Hashable, bytes] = field(default_factory=dict)
    wants: tuple[Hashable, int, str] | None = None
    by_backwards: bool = False

    @property
    def peers(self) -> set[int]:
        """The ranks with which it exchanges messages."""
        parts = [part for issued in self.log for part in issued.parts]
        return {end for part in parts if part.ends for end in part.ends} - {self.rank}

    @property
    def replicas(self) -> set[int]:
        """The second and the last rank of every group in whose collectives it takes part, without
        groups that have another one inside them, as all ranks have."""
        parts = [part for issued in self.log for part in issued.parts]
        groups = {part.among for part in parts if not part.ends and part.ranks > 1}
        smallest = [one for one in groups if not any({*other} < {*one} for other in groups)]
        return {rank for group in smallest for rank in (group[1], group[-1])}


def trace_ranks(
    plan: Plan,
    ranks: Sequence[int],
    *,
    optimizer: OptimizerConfig,
    program: Program,
    steps: int = 1,
) -> Iterator[Trace]:
    """Trace some ranks of a plan, one per core at a time; results come in the order of ``ranks``.
    Memory is that of the first step. With more than one of ``steps`` they have logs, in which
    places say where a step begins.
    """
    trace = partial(_trace_rank, plan, optimizer=optimizer, program=program, steps=steps)
    return _in_processes(trace, ranks)


def trace_script(
    path: str,
    arguments: Sequence[str],
    world: int,
    cluster: Cluster,
    tell: Callable[[int], None] = lambda _: None,
) -> list[Trace]:
    """Trace rank 0 of ``world`` and all ranks that messages connect it with, which are those of its
    pipeline. All others are traced to compare; of more than 8 ranks only the second and the last
    of every group in whose collectives rank 0 takes part, with their pipelines, and the rest is
    taken to do the same. Memory is that of the second step. ``tell`` is called with how many are
    traced. Raises ScriptError if the script does not get so far, if what these ranks exchange does
    not match, and for a pipeline without an optimizer, whose backwards are of microbatches."""
    traces: dict[int, Trace] = {}
    objects: dict[Hashable, bytes] = {}
    wants: dict[int, tuple[Hashable, int, str]] = {}
    trace_rank = partial(_trace_script, path, tuple(arguments), world, cluster, objects)

    def trace_all(wanted: set[int]) -> None:
        while missing := wanted - traces.keys():
            ready = [r for r in sorted(missing) if r not in wants or wants[r][0] in objects]
            if not ready:
                (rank, (_, source, where)), *_ = wants.items()
                line = f"rank {rank} waits for an object that rank {source} does not send{where}"
                raise ScriptError(f"{path}: {line}")
            for trace in _in_processes(trace_rank, ready):
                objects.update(trace.sent)
                if trace.wants:
                    wants[trace.rank] = trace.wants
                    wanted.add(trace.wants[1])
                else:
                    traces[trace.rank] = trace
                    wants.pop(trace.rank, None)
                    wanted |= trace.peers
                    tell(len(traces))

    wanted = {0}
    try:
        trace_all(wanted)
        pipeline = sorted(traces)
        if len(pipeline) > 1 and traces[0].by_backwards:
            raise ScriptError(f"{path}: a pipeline's step ends with an optimizer's (make one)")
        trace_all({*range(world)} if world <= _MOST_TRACED else traces[0].replicas)
    except BrokenProcessPool:
        ranks = ", ".join(map(str, sorted(wanted - traces.keys())))
        line = f"the process of rank {ranks} was killed (by os._exit, or for its memory)"
        raise ScriptError(f"{path}: {line}") from None
    if found := unmatched({rank: trace.log for rank, trace in traces.items()}):
        raise ScriptError(f"{path}: its ranks would wait for ever on GPUs: {found[0]}")
    return [traces[rank] for rank in pipeline]


def _in_processes(trace: Callable[[int], Trace], ranks: Sequence[int]) -> Iterator[Trace]:
    """Each rank has a process of its own, because what torch caches of one rank's meshes would be
    wrong for another."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(
        min(len(ranks), os.cpu_count() or 1), mp_context=context, max_tasks_per_child=1
    ) as pool:
        yield from pool.map(trace, ranks)


@contextmanager
def _alone(
    rank: int,
    world: int,
    kernel: Describe | None,
    fill: Fill | None = None,
    *,
    is_script: bool = False,
) -> Iterator[tuple[VirtualDevice, Allocations]]:
    """Inside this context the process is one rank of a job, with fake tensors on a device. A script
    may mix them with others."""
    torch.set_num_threads(1)  # other ranks have the other cores
    memory = Allocations()
    device = VirtualDevice(memory=memory, describe=kernel)
    device.is_faked = True
    with (
        fake_world(rank, world, fill),
        FakeTensorMode(allow_non_fake_inputs=is_script),
        observed(memory),
        emulated(device),
        without_values(),
        as_on_cuda(device),
    ):
        yield device, memory


def _trace_rank(
    plan: Plan,
    rank: int,
    *,
    optimizer: OptimizerConfig,
    program: Program,
    steps: int,
) -> Trace:
    begin = time.perf_counter()
    kernel = describe if steps > 1 else None
    fill = partial(program.fill_integers, plan)
    with (
        _alone(rank, plan.layout.world, kernel, fill) as (device, allocations),
        replaced(*program.stand_ins(device)),
    ):
        log = device.log
        allocations.kind = "parameters"
        trainer = program.build(plan, optimizer, torch.device("cpu"), 0)
        gc.collect()  # whole parameters that were cut into shards hang in reference cycles
        allocations.kind = None
        batch = torch.zeros(
            (plan.num_microbatches * plan.microbatch_size, plan.shape.seq), dtype=torch.long
        )
        allocations.begin_step()
        log.place(STEP)
        trainer.step(batch, batch)
        memory = allocations.peak()
        for _ in range(steps - 1):
            log.place(STEP)
            trainer.step(batch, batch)
        log.place(STEP)
    return Trace(rank, memory, time.perf_counter() - begin, log.issued if steps > 1 else ())


def _trace_script(
    path: str,
    arguments: Sequence[str],
    world: int,
    cluster: Cluster,
    known: Mapping[Hashable, bytes],
    rank: int,
) -> Trace:
    begin, objects = time.perf_counter(), Objects(known)
    peaks: list[MemoryBytes] = []
    stepped: list[object] = []

    backward = torch.autograd.backward

    running = [0]  # backwards; reentrant checkpoints run others inside

    def backward_to_count(*arguments: Any, **keywords: Any) -> None:
        running[0] += 1
        try:
            backward(*arguments, **keywords)
        finally:
            running[0] -= 1
        if not running[0] and not any(
            issubclass(type(held), torch.optim.Optimizer) for held in gc.get_objects()
        ):
            count(backward)

    def count(optimizer: object, *_: object) -> None:
        stepped.append(optimizer)
        if optimizer is not stepped[0]:
            return  # of several, the one that came first tells where a step ends
        log.place(STEP)
        peaks.append(allocations.peak())
        allocations.begin_step()
        if len(peaks) == _STEPS:
            raise _EnoughError

    with (
        _alone(rank, world, describe, is_script=True) as (device, allocations),
        as_launched(device, allocations, path, arguments, rank, world, cluster, objects),
        replaced((torch.autograd, "backward", backward_to_count)),
    ):
        log = device.log
        log.where = line_here
        if rank:  # the first one has given these warnings
            warnings.simplefilter("ignore")
        handle = register_optimizer_step_post_hook(count)
        try:
            runpy.run_path(path, run_name="__main__")
        except _EnoughError:
            seconds, ended = time.perf_counter() - begin, stepped[0] is backward
            return Trace(rank, peaks[-1], seconds, log.issued, objects.sent, None, ended)
        except UnknownObjectError as error:
            return Trace(rank, MemoryBytes(), 0.0, (), objects.sent, error.wants)
        except (Exception, SystemExit) as error:
            raise ScriptError(why_not(path, rank, error)) from None
        finally:
            handle.remove()
    raise ScriptError(
        f"{path}: ended on rank {rank} after {len(peaks)} steps of an optimizer (needed: {_STEPS}; "
        "of backwards, if it makes none); numbers that it computes are read as 0.0, or 1 for "
        "integers"
    )
