"""Writes results/reference/schedules.csv, which compares ZeroPP's schedule with torch's own.

Torch's orders are read from ``torch.distributed.pipelining.schedules`` (the order of compute, and
torch's own lowering for the gathers), ours come from ``zeropp.schedule``. Our event loop prices all
of them with F = I = W = 1, a full backward as I + W, and no communication. A forward and a backward
that DualPipeV overlaps are priced one after the other. It needs no process group.

    python -m benchmarks.studies.schedule_table [results/reference/schedules.csv]
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from baselines.torch_pp.private_names import PlannedStage
from benchmarks.specification.command import CommandParser, run_command, track
from zeropp.schedule import build, lower
from zeropp.schedule.event_loop import run
from zeropp.schedule.legality import live_activations, resident_chunks
from zeropp.schedule.program import Op, Schedule, StageCost, parse_action

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


def main() -> int:
    """Command line; see ``--help``."""
    return run_command(_main)


def _main() -> int:
    logging.disable(logging.WARNING)  # torch warns about microbatches that ZBV drops
    parser = CommandParser(
        description="Compare ZeroPP's schedule with torch's own in step time over the ideal, "
        "activations and gathers, and write a CSV.",
        epilog="example: python -m benchmarks.studies.schedule_table /tmp/schedules.csv",
    )
    default = Path("results/reference/schedules.csv")
    parser.add_argument("out", nargs="?", type=Path, default=default, help="the CSV (%(default)s)")
    out = parser.parse_args().out
    header = ["ranks", "microbatches", "schedule", "chunks", "unit"]
    header += ["step_over_ideal", "bound"]
    header += ["activations_over_1f1b", "gathers_per_step", "parameter_passes_per_step"]
    header += ["resident_chunks", "resident_share"]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, header, lineterminator="\n")
        writer.writeheader()
        sizes = product(RANKS, MICROBATCHES_PER_RANK)
        rows = (row for ranks, factor in sizes for row in rows_of_size(ranks, ranks * factor))
        writer.writerows(track(rows, None, "rows"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
