"""Writes results/reference/schedule_orders.json: how good ZeroPP's orders are over many sizes.

``bound``: with equal durations, for every P up to a largest one, V from 1 to 4, U from P to 2P, one
to four whole units and every remainder: how many steps take longer than ``1 + (P-1)/(3 m V)`` times
the ideal. ``durations``: for random plans of two models on the suite's clusters, the simulated step
of the order for equal durations divided by that of the order for the cost model's durations, minus
1. ``grid``: the same for plans drawn from everything that the tuner may try for ZeroPP in the cells
of the verdict (``experiment=claim_33``) and that may fit into memory.

    python -m benchmarks.studies.schedule_orders --ranks 11 --plans 150 --grid 4
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

from benchmarks.records.environment import git_state
from benchmarks.specification.command import CommandParser, run_command, track, workers
from benchmarks.specification.compose import compose, preset
from benchmarks.studies.claim_33.cells import Cell, cells_of, verdict_spec
from zeropp.cluster import Cluster
from zeropp.contender.contender import ZEROPP, ZeroppKnobs
from zeropp.cost import price_plan
from zeropp.layout import InfeasibleError
from zeropp.plan import Candidate, Task
from zeropp.schedule import build
from zeropp.schedule.event_loop import run
from zeropp.schedule.program import StageCost
from zeropp.shape import ModelShape
from zeropp.sim.simulator import simulate
from zeropp.tune.bounds import least_bytes
from zeropp.tune.contender import describe
from zeropp.tune.space import points

OUT = Path("results/reference/schedule_orders.json")
Size = tuple[int, int, int, int]  # P, V, U, m


def sizes(largest: int) -> Iterator[Size]:
    """All sizes up to ``largest`` pipeline ranks."""
    for ranks in range(2, largest + 1):
        for chunks in range(1, 5):
            for unit in range(ranks, 2 * ranks + 1):
                for m in range(unit, 5 * unit):
                    yield ranks, chunks, unit, m


def over_bound(size: Size) -> float:
    """The step time of one size, divided by the bound."""
    ranks, chunks, unit, m = size
    order = build("zeropp", num_ranks=ranks, chunks=chunks, num_microbatches=m, unit=unit)
    bound = 1 + (ranks - 1) / (3 * m * chunks)
    return run(order, [StageCost()] * (ranks * chunks)).over_ideal / bound


def gain(seed: int) -> float | None:
    """What planning with durations gains on one random plan, as a share of the step; None if the
    plan is infeasible."""
    draw = random.Random(seed)
    model = preset("model", draw.choice(("gpt_14_6b", "llama_8b")), ModelShape)
    cluster = preset("cluster", draw.choice(("a100", "a800", "h100", "h200")), Cluster)
    pp, chunks = draw.choice((2, 4, 8, 16)), draw.choice((1, 2, 4))
    m = draw.randint(pp, 6 * pp)
    knobs = ZeroppKnobs(pp=pp, shard=64 // pp, chunks=chunks, unit=draw.randint(pp, m))
    task = Task(shape=model, cluster=cluster, num_gpus=64, global_batch=m * 64 // pp)
    try:
        return _gain_of(task, Candidate(knobs, 1))
    except InfeasibleError:
        return None


def _gain_of(task: Task, candidate: Candidate[ZeroppKnobs]) -> float:
    sized = ZEROPP.size(task, candidate.knobs, candidate.microbatch_size)
    price = price_plan(sized, task.cluster)
    plans = ZEROPP.plans(sized, price)
    equal, *others = (simulate(plan, task.cluster, price=price).step_s for plan in plans)
    return equal / min(equal, *others) - 1 if others else 0.0


def grid_gains(cell: Cell, count: int) -> list[tuple[float, str]]:
    """(gain, plan) of ``count`` plans drawn from all that the tuner may try in a cell and that may
    fit into memory."""
    task, limit = cell.priced, cell.task.cluster.device.usable_bytes
    draw, asked = random.Random(repr(cell.key)), ZeroppKnobs()
    families = [
        (family, size)
        for point, size in points(task, ZEROPP.space, asked, "auto", rejected=Counter())
        for family in ZEROPP.space.families(point)
    ]
    draw.shuffle(families)
    found: list[tuple[float, str]] = []
    while families and len(found) < count:
        family, size = families.pop()
        with suppress(InfeasibleError):
            plan = ZEROPP.size(task, family, size)
            candidate = Candidate(draw.choice([*ZEROPP.space.members(asked, family, plan)]), size)
            plan = ZEROPP.size(task, candidate.knobs, size)
            if least_bytes(plan, price_plan(plan, task.cluster)) <= limit:
                found.append((_gain_of(task, candidate), describe(plan)))
    return found


def main() -> int:
    """Command line; see ``--help``."""
    return run_command(_main)


def _main() -> int:
    parser = CommandParser(
        description="Test ZeroPP's orders over many sizes, with equal and with predicted "
        "durations, and write a JSON file.",
        epilog="example: python -m benchmarks.studies.schedule_orders --out orders.json --ranks 4",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file (%(default)s)")
    parser.add_argument("--ranks", type=int, default=11, help="largest P (%(default)s)")
    parser.add_argument("--plans", type=int, default=150, help="random plans (%(default)s)")
    parser.add_argument("--grid", type=int, default=4, help="plans per cell (%(default)s)")
    options = parser.parse_args()
    with workers(os.cpu_count() or 1) as pool:
        document = {
            "commit": git_state()[0],
            "bound": _bound(pool, options.ranks),
            "durations": _durations(pool, options.plans),
            "grid": _grid(pool, options.grid),
        }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(options.out.read_text())
    return 0


def _bound(pool: Executor, ranks: int) -> dict[str, Any]:
    all_sizes = list(sizes(ranks))
    ratios = pool.map(over_bound, all_sizes, chunksize=32)
    over = list(track(ratios, len(all_sizes), "sizes held to the bound"))
    return {
        "largest_ranks": ranks,
        "sizes": len(over),
        "missed": sum(ratio > 1 + 1e-9 for ratio in over),
        "largest_over_bound": max(over),
    }


def _durations(pool: Executor, plans: int) -> dict[str, Any]:
    seeds = range(2 * plans)
    drawn = track(pool.map(gain, seeds, chunksize=4), len(seeds), "random plans")
    gains = [found for found in drawn if found is not None][:plans]
    return {
        "plans": len(gains),
        "mean_gain": statistics.mean(gains),
        "smallest_gain": min(gains),
        "largest_gain": max(gains),
    }


def _grid(pool: Executor, plans_per_cell: int) -> dict[str, Any]:
    (config,) = compose("config", ["experiment=claim_33"])
    cells = cells_of(verdict_spec(config["verdict"]), config["precision"])
    per_cell = pool.map(grid_gains, cells, repeat(plans_per_cell))
    found = [pair for pairs in track(per_cell, len(cells), "cells") for pair in pairs]
    return {
        "commit": git_state()[0],
        "cells": len(cells),
        "plans": len(found),
        "mean_gain": statistics.mean(gain for gain, _ in found),
        "largest_gain": max(found)[0],
        "largest_gain_plan": max(found)[1],
    }


if __name__ == "__main__":
    sys.exit(main())
