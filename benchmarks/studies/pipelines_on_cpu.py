"""Measures ZeroPP and torch's pipeline side by side on CPU cores, and counts where the time goes.

Both train the demo's models with the same batch and the same degrees. The same ranks build all
trainers and step them in turn, so that other work on the machine slows all alike. All ranks share
the cores, so the cost of a step is the CPU time of all ranks together. The part of it that the main
threads take (Python, and the model's forwards and backwards) is also counted by itself. ``alone``
is one process that trains the same batch in a plain loop, which shows the cost of the arithmetic.

    python -m benchmarks.studies.pipelines_on_cpu --repeats 5 \
        --out results/reference/pipelines_on_cpu.json
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.launch.sweep import spec_of
from benchmarks.records.environment import git_state
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.compose import compose
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import local_batch, open_batches
from zeropp.engine.optimizer import build_optimizer
from zeropp.model import build_model, cross_entropy

WAYS: Mapping[str, tuple[str, ...]] = {
    "torch PP": ("contender=torch_pp",),
    "ZeroPP": ("contender=zeropp",),
    "ZeroPP, units of 2": ("contender=zeropp", "contender.unit=2"),
    "ZeroPP, units of 2, one reduction": (
        "contender=zeropp",
        "contender.unit=2",
        "contender.reduce_every=step",
    ),
}
CELLS = (("gpt_tiny", 4), ("gpt_mini", 4), ("gpt_tiny", 8), ("gpt_mini", 8))
_WARMUP = 2
_ROWS = "rows.json"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepSample:
    """One step on one rank: its duration, CPU seconds of the whole process and of its main
    thread."""

    step_s: float
    cpu_s: float
    main_s: float


# What one rank has found: samples per way to train, and the counters of every way but ``alone``.
Found = tuple[dict[str, list[StepSample]], dict[str, dict[str, int]]]


def measured(step: Callable[[], object]) -> StepSample:
    """One step, from a barrier of all ranks to the next."""
    dist.barrier()
    before, main, begin = _process_s(), time.thread_time(), time.perf_counter()
    step()
    main = time.thread_time() - main
    dist.barrier()
    return StepSample(time.perf_counter() - begin, _process_s() - before, main)


def _process_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _stepper(spec: RunSpec) -> tuple[Callable[[int], object], Callable[[], dict[str, int]]]:
    """(what trains step i of a contender on this rank, what counts its collectives)."""
    plan, batches = spec.plan(), open_batches(spec)
    trainer = CONTENDERS[spec.contender.name].build(plan, spec.optimizer, _CPU, spec.seed)
    return lambda i: trainer.step(*local_batch(batches, plan.layout, i, _CPU)), trainer.counters


def _alone(spec: RunSpec) -> Callable[[int], object]:
    """What trains step i in a plain loop over microbatches on rank 0, and nothing on others."""
    if dist.get_rank():
        return lambda i: None
    model, batches = build_model(spec.model, spec.seed, _CPU), open_batches(spec)
    optimizer, count = build_optimizer(model.parameters(), spec.optimizer), spec.global_batch

    def step(index: int) -> None:
        inputs, targets = map(torch.from_numpy, batches.batch(index))
        optimizer.zero_grad()
        for x, y in zip(torch.split(inputs, 1), torch.split(targets, 1), strict=True):
            (cross_entropy(model(x), y) / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _rank(rank: int, specs: dict[str, RunSpec], repeats: int, place: Path) -> None:
    """One rank of one cell: build everything, step in turn; rank 0 writes what all have found."""
    torch.set_num_threads(1)
    world, store = next(iter(specs.values())).num_gpus, f"file://{place}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    built = {way: _stepper(spec) for way, spec in specs.items()}
    steps = {way: step for way, (step, _) in built.items()}
    steps["alone"] = _alone(specs["torch PP"])
    samples: dict[str, list[StepSample]] = {way: [] for way in steps}
    for index in range(_WARMUP + repeats):
        for way, step in steps.items():
            samples[way].append(measured(lambda step=step, index=index: step(index)))  # type: ignore[misc]
    counts = {way: count() for way, (_, count) in built.items()}
    found: list[Any] = [None] * world
    dist.all_gather_object(found, ({w: s[_WARMUP:] for w, s in samples.items()}, counts))
    if rank == 0:
        (place / _ROWS).write_text(json.dumps(rows(found, _WARMUP + repeats)))
    dist.barrier()
    os._exit(0)  # gloo may abort a rank whose peers end while it destroys its groups


def rows(found: Sequence[Found], steps: int) -> list[dict[str, Any]]:
    """One row per way to train, from what each rank has found, in the order of ranks.

    ``steps`` is the number of steps that the counters have counted, with those of the warm-up.
    Durations are those of rank 0, because a barrier begins and ends every step. CPU seconds are
    added over the ranks. Collectives are those of rank 0.
    """
    by_rank, counts = [samples for samples, _ in found], found[0][1]
    made = []
    for way, mine in by_rank[0].items():
        pairs = zip(by_rank[0]["torch PP"], mine, strict=True)
        all_samples = [samples[way] for samples in by_rank]
        collectives = counts.get(way, {})
        made.append(
            {
                "way": way,
                "step_s": quartiles([one.step_s for one in mine]),
                "torch_pp_over_it": quartiles([base.step_s / one.step_s for base, one in pairs]),
                "cpu_s_of_all_ranks": _added(all_samples, "cpu_s"),
                "cpu_s_of_main_threads": _added(all_samples, "main_s"),
                "gathers_per_step": collectives.get("unshard", 0) / steps,
                "reductions_per_step": collectives.get("reduce_grad", 0) / steps,
            }
        )
    return made


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of at least two values, in their unit."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high}


def _added(all_samples: list[list[StepSample]], kind: str) -> float:
    """The sum over ranks of the median of one kind of seconds."""
    medians = [statistics.median([vars(one)[kind] for one in mine]) for mine in all_samples]
    return float(sum(medians))


def cell(model: str, ranks: int, repeats: int) -> dict[str, Any]:
    """All ways to train one model on so many ranks."""
    shared = ("contender.pp=2", f"model={model}", f"num_gpus={ranks}")
    specs = {way: spec_of(compose("config", [*words, *shared])[0]) for way, words in WAYS.items()}
    with tempfile.TemporaryDirectory() as name:
        place, start = Path(name), cast("Any", start_processes)
        start(_rank, (specs, repeats, place), nprocs=ranks, start_method="fork")
        found = json.loads((place / _ROWS).read_text())
    return {"model": model, "ranks": ranks, "repeats": repeats, "rows": found}


@command
def main() -> int:
    """Measure and write; see ``--help``."""
    parser = CommandParser(
        description="Measure ZeroPP and torch's pipeline side by side on this machine's CPU cores.",
        epilog="example: python -m benchmarks.studies.pipelines_on_cpu --out /tmp/pipelines.json",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON")
    parser.add_argument(
        "--repeats",
        type=int,
        choices=range(2, 1000),
        metavar="N",
        default=15,
        help="steps of each (%(default)s)",
    )
    arguments = parser.parse_args()
    result = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "commit": git_state()[0],
        "cells": [cell(model, ranks, arguments.repeats) for model, ranks in CELLS],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
