"""One rank of one attempt: gate, warm-up, timed steps, one recorded step, losses compared.

A rank reads a frozen spec and the usual environment variables (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT). It writes ``rank_NNN.jsonl`` into the attempt's directory, and prints a
line per step, which the launcher puts into the rank's log. Nothing here depends on Hydra or Slurm.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.records.environment import capture_environment
from benchmarks.records.events import EventWriter
from benchmarks.records.losses import beyond, distance
from benchmarks.records.metrics import step_line
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec, load_spec
from benchmarks.worker.data import local_batch, open_batches
from benchmarks.worker.gate import losses_of_one_process, run_gate
from benchmarks.worker.meters import LOADED, MemoryMeter, synchronise
from zeropp.engine.ranks.collectives import connect_lazily
from zeropp.types.layout import Layout
from zeropp.types.training import Trainer

# What is waited for before the clock is read at a span's start and end, for every contender alike:
# on a GPU the compute stream, because transfers that were posted early may not have ended.
SPAN_CLOCK = {"cuda": "compute stream", "cpu": "host"}
ONE_PROCESS = ".one_process"  # in the folder of all runs: what one process did, for other runs
Batch = Callable[[int], tuple[Tensor, Tensor]]  # this rank's inputs and targets of a step
EXIT_GATE = 3
EXIT_OOM = 4
EXIT_SIGNAL = 5


def main(words: Sequence[str] | None = None) -> int:
    """Run one rank with the words of a command line (default: this process's).

    The exit status is 0 only if everything was measured.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the attempt's directory")
    arguments = parser.parse_args(words)
    events = EventWriter(arguments.out, int(os.environ["RANK"]))
    _leave_on_signal(events)
    try:
        spec = load_spec(arguments.spec)
        os.environ.update(CONTENDERS[spec.contender.name].environment)
        return _run(spec, events, arguments.out.resolve().parents[1] / ONE_PROCESS)
    except Exception as error:
        refused = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        is_oom = refused or isinstance(error, MemoryError | torch.OutOfMemoryError)
        kind = "oom" if is_oom else "error"
        events.write(kind, type=type(error).__name__, message=str(error).strip()[:2000])
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_OOM if is_oom else 1


def _run(spec: RunSpec, events: EventWriter, known: Path) -> int:
    began = time.monotonic()
    device = _open_world(spec)
    events.write("environment", **capture_environment(), code=asdict(LOADED))
    contender = CONTENDERS[spec.contender.name]
    batches = open_batches(spec)
    if spec.measure.gate:
        result = run_gate(spec, contender, batches, device, known)
        events.write("gate", **result)
        if not result["passed"]:
            return EXIT_GATE
    plan = spec.plan()
    meter = MemoryMeter(device)
    trainer = contender.build(plan, spec.optimizer, device, spec.seed)
    batch = partial(local_batch, batches, plan.layout, device=device)
    losses = _measure(spec, trainer, batch, device=device, events=events, meter=meter)
    events.write("memory", **meter.peaks())
    events.write("counters", **trainer.counters())
    if spec.measure.timeline:
        _record_step(spec, trainer, batch, device=device, events=events, layout=plan.layout)
    # One process may be slower than all ranks together: it gets half of the time that is left.
    until = (time.monotonic() + began + spec.measure.timeout_s) / 2
    right = losses_of_one_process(spec, contender, batches, device, known, until=until)
    if right:
        events.write("losses", error=distance(losses[: len(right)], right), steps=len(right))
    if why := beyond(losses, right, spec.precision):
        raise RuntimeError(f"losses: {why}")
    events.write("done")
    dist.barrier()
    # Everything is on disk. With gloo, destroying the groups while peers exit could abort a rank.
    sys.stdout.flush()
    os._exit(0)


def _measure(
    spec: RunSpec,
    trainer: Trainer,
    batch: Batch,
    *,
    device: torch.device,
    events: EventWriter,
    meter: MemoryMeter,
) -> list[float]:
    """Warm-up and timed steps; each leaves an event, and a line in the rank's log. Returns their
    losses."""
    warmup = spec.measure.warmup_steps
    losses = []
    for index in range(warmup + spec.measure.steps):
        inputs, targets = batch(index)
        synchronise(device)
        start = time.perf_counter()
        result = trainer.step(inputs, targets)
        synchronise(device)
        seconds = time.perf_counter() - start
        losses.append(float(result.loss))  # read only now, so that no host waits in a timed step
        event = events.write(
            "warmup" if index < warmup else "step",
            index=index,
            seconds=seconds,
            loss=losses[-1],
            grad_norm=float(result.grad_norm),
            peak_bytes=meter.peak_bytes(),
        )
        print(step_line(spec, event), flush=True)
    return losses


def _record_step(
    spec: RunSpec,
    trainer: Trainer,
    batch: Batch,
    *,
    device: torch.device,
    events: EventWriter,
    layout: Layout,
) -> None:
    """Run one more step and record its spans, which may cost time, so it is not a timed one."""
    trainer.record_spans(True)
    trainer.step(*batch(spec.measure.warmup_steps + spec.measure.steps))
    if layout.is_first(dist.get_rank()):
        rows = [[s.rank, s.lane, s.action, s.start_s, s.end_s] for s in trainer.spans()]
        events.write("spans", clock=SPAN_CLOCK[device.type], rows=rows)
    trainer.record_spans(False)


def _open_world(spec: RunSpec) -> torch.device:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != spec.num_gpus:
        raise RuntimeError(f"WORLD_SIZE={world}, but the spec has num_gpus={spec.num_gpus}")
    timeout = timedelta(seconds=spec.measure.timeout_s)
    connect_lazily(world)
    if spec.cluster.device.is_cpu:
        device = torch.device("cpu")
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # Without a device, as in torchtitan: with one, all messages of a group share a stream.
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world, timeout=timeout)
    return device


def _leave_on_signal(events: EventWriter) -> None:
    """On SIGTERM or SIGUSR1 (preemption, time limit), write an event and exit at once.

    Every finished step is already on disk. A thread waits for the signal, because a handler does
    not run while the main thread is in a collective.
    """
    caught = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, caught)

    def wait() -> None:
        number = signal.sigwait(caught)
        events.write("signal", name=signal.Signals(number).name)
        os._exit(EXIT_SIGNAL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
