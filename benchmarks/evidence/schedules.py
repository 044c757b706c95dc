"""Writes the two tables on ZeroPP's schedule into results/reference.

``schedules.csv`` compares it with torch's own. Torch's orders are read from
``torch.distributed.pipelining.schedules`` (the order of compute, and torch's own lowering for the
gathers), ours come from ``zeropp.schedule``. Our event loop prices all of them with F = I = W = 1,
a full backward as I + W, and no communication. A forward and a backward that DualPipeV overlaps are
priced one after the other. It needs no process group.

``schedule_orders.json`` says how good ZeroPP's orders are over many sizes. ``bound``: with equal
durations, for every P up to a largest one, V from 1 to 4, U from P to 2P, one to four whole units
and every remainder: how many steps take longer than ``1 + (P-1)/(3 m V)`` times the ideal.
``durations``: for random plans of two models on the suite's clusters, the simulated step of the
order for equal durations divided by that of the order for the cost model's durations, minus 1.
``grid``: the same for plans drawn from everything that the tuner may try for ZeroPP in the cells of
the verdict (``experiment=claim_33``) and that may fit into memory.

    python -m benchmarks.evidence.schedules
"""

from __future__ import annotations

import csv
import json
import logging
import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress
from itertools import product, repeat
from pathlib import Path
from typing import Any

from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks import CHECKOUT
from benchmarks.records.environment import git_state
from benchmarks.specification.command import CommandParser, command, workers
from benchmarks.specification.compose import compose
from benchmarks.specification.progress import track
from benchmarks.specification.reading import preset
from benchmarks.verdict.cells import Cell, study_spec
from zeropp.choose.bounds import least_bytes
from zeropp.choose.contender import describe
from zeropp.choose.space import points
from zeropp.choose.task import Candidate, Task
from zeropp.price import price_plan
from zeropp.price.cluster import Cluster
from zeropp.price.simulator import simulate
from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.event_loop import run
from zeropp.schedule.legality import live_activations, resident_chunks
from zeropp.schedule.program import Op, Schedule, StageCost, parse_action
from zeropp.types.layout import InfeasibleError
from zeropp.types.shape import ModelShape

LARGEST_RANKS = 11  # P of the sizes that are held to the bound
PLANS = 150  # random ones
PLANS_PER_CELL = 4  # of the verdict's grid
RANKS = (4, 8, 16)
MICROBATCHES_PER_RANK = (1, 2, 4, 8)
PEERS = (
    ("ScheduleInterleaved1F1B", (2, 4)),
    ("ScheduleInterleavedZeroBubble", (2, 4)),
    ("ScheduleLoopedBFS", (2, 4)),
    ("ScheduleZBVZeroBubble", (2,)),
    ("ScheduleDualPipeV", (2,)),
)
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def torch_schedule(name: str, num_ranks: int, chunks: int, num_microbatches: int) -> Schedule:
    """Torch's order with the gathers of torch's lowering, but without transfers.

    Raises ValueError if torch has no order for these sizes.
    """
    from torch.distributed.pipelining import schedules as torch_schedules  # slow to import

    from baselines.torch_pp.private_names import PlannedStage

    count = num_ranks * chunks
    held = (0, count - 1) if name in V_SHAPED else range(0, count, num_ranks)
    stages = [PlannedStage(index, count, num_ranks) for index in held]
    source = getattr(torch_schedules, name)(stages, num_microbatches, loss_fn=lambda *_: None)
    programs = tuple(
        tuple(
            action
            for cell in source.pipeline_order_with_comms[rank]
            for action in (parse_action(str(part)) for part in cell.sub_actions or (cell,))
            if not action.op.is_transfer
        )
        for rank in range(num_ranks)
    )
    stage_rank = tuple(source.stage_index_to_group_rank[s] for s in range(count))
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        unit=num_microbatches,
        stage_rank=stage_rank,
        programs=programs,
    )


def measure(schedule: Schedule) -> dict[str, Any]:
    """The numbers of one row, each that of its worst rank."""
    ranks = range(schedule.num_ranks)
    chunks = schedule.num_stages // schedule.num_ranks
    result = run(schedule, [StageCost()] * schedule.num_stages)
    peak = max(max(live_activations(schedule, rank)) for rank in ranks)
    gathers = max(sum(a.op is Op.UNSHARD for a in program) for program in schedule.programs)
    resident = max(max(resident_chunks(schedule, rank)) for rank in ranks)
    return {
        "step_over_ideal": f"{result.over_ideal:.4f}",
        "activations_over_1f1b": f"{peak / (schedule.num_ranks * chunks):.3f}",
        "gathers_per_step": gathers,
        "parameter_passes_per_step": f"{gathers / chunks:.2f}",
        "resident_chunks": resident,
        "resident_share": f"{resident / chunks:.2f}",
    }


def rows_of_size(num_ranks: int, m: int) -> Iterator[dict[str, Any]]:
    """The rows of one size; torch's schedules without an order for it are left out."""
    for row in (*peer_rows(num_ranks, m), *unit_rows(num_ranks, m)):
        yield {"ranks": num_ranks, "microbatches": m, **row}


def peer_rows(num_ranks: int, m: int) -> Iterator[dict[str, Any]]:
    """The rows of torch's schedules."""
    for name, options in PEERS:
        for chunks in options:
            if name == "ScheduleDualPipeV" and m < 2 * num_ranks:
                continue
            schedule = torch_schedule(name, num_ranks, chunks, m)
            yield {"schedule": name, "chunks": chunks, **measure(schedule)}


def unit_rows(num_ranks: int, m: int) -> Iterator[dict[str, Any]]:
    """The rows of ZeroPP with units, with a cap of the activations of one unit."""
    for chunks in (2, 4):
        for unit in sorted({num_ranks, min(2 * num_ranks, m)}):
            # The cap is the default, U*V, and each gather starts one use ahead.
            order = build(
                "zeropp", num_ranks=num_ranks, chunks=chunks, num_microbatches=m, unit=unit
            )
            bound = f"{1 + (num_ranks - 1) / (3 * m * chunks):.4f}"
            named = {"schedule": "ZeroPP", "chunks": chunks, "unit": unit, "bound": bound}
            yield {**named, **measure(lower(order, gather=True))}


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
    gains: list[tuple[float, str]] = []
    while families and len(gains) < count:
        family, size = families.pop()
        with suppress(InfeasibleError):
            plan = ZEROPP.size(task, family, size)
            candidate = Candidate(draw.choice([*ZEROPP.space.members(asked, family, plan)]), size)
            plan = ZEROPP.size(task, candidate.knobs, size)
            if least_bytes(plan, price_plan(plan, task.cluster)) <= limit:
                gains.append((_gain_of(task, candidate), describe(plan)))
    return gains


def _bound(pool: Executor) -> dict[str, Any]:
    all_sizes = list(sizes(LARGEST_RANKS))
    ratios = pool.map(over_bound, all_sizes, chunksize=32)
    over = list(track(ratios, len(all_sizes), "sizes held to the bound"))
    return {
        "largest_ranks": LARGEST_RANKS,
        "sizes": len(over),
        "missed": sum(ratio > 1 + 1e-9 for ratio in over),
        "largest_over_bound": max(over),
    }


def _durations(pool: Executor) -> dict[str, Any]:
    seeds = range(2 * PLANS)
    drawn = track(pool.map(gain, seeds, chunksize=4), len(seeds), "random plans")
    gains = [value for value in drawn if value is not None][:PLANS]
    return {
        "plans": len(gains),
        "mean_gain": statistics.mean(gains),
        "smallest_gain": min(gains),
        "largest_gain": max(gains),
    }


def _grid(pool: Executor) -> dict[str, Any]:
    (config,) = compose("config", ["experiment=claim_33"])
    cells = study_spec("verdict", config["verdict"]).cells(config["precision"])
    per_cell = pool.map(grid_gains, cells, repeat(PLANS_PER_CELL))
    gains = [pair for of_cell in track(per_cell, len(cells), "cells") for pair in of_cell]
    return {
        "commit": git_state()[0],
        "cells": len(cells),
        "plans": len(gains),
        "mean_gain": statistics.mean(gain for gain, _ in gains),
        "largest_gain": max(gains)[0],
        "largest_gain_plan": max(gains)[1],
    }


@command
def main() -> int:
    """Command line; see ``--help``."""
    logging.disable(logging.WARNING)  # torch warns about microbatches that ZBV drops
    parser = CommandParser(
        description="Compare ZeroPP's schedule with torch's own, test its orders over many sizes, "
        "and write schedules.csv and schedule_orders.json.",
        epilog="example: python -m benchmarks.evidence.schedules --out /tmp",
    )
    default = CHECKOUT / "results" / "reference"
    parser.add_argument("--out", type=Path, default=default, metavar="DIR", help="(%(default)s)")
    out = parser.parse_args().out
    header = ["ranks", "microbatches", "schedule", "chunks", "unit"]
    header += ["step_over_ideal", "bound"]
    header += ["activations_over_1f1b", "gathers_per_step", "parameter_passes_per_step"]
    header += ["resident_chunks", "resident_share"]
    with (out / "schedules.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header, lineterminator="\n")
        writer.writeheader()
        counts = product(RANKS, MICROBATCHES_PER_RANK)
        rows = (row for ranks, factor in counts for row in rows_of_size(ranks, ranks * factor))
        writer.writerows(track(rows, None, "rows"))
    with workers(os.cpu_count() or 1) as pool:
        document = {
            "commit": git_state()[0],
            "bound": _bound(pool),
            "durations": _durations(pool),
            "grid": _grid(pool),
        }
    text = json.dumps(document, indent=1)
    (out / "schedule_orders.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
