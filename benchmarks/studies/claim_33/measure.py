"""Makes the comparison with a launcher that runs: the points of a sweep are the best plans, found
by the simulator, of every contender that can be run.

"3D, all public parts" is no program and cannot be run. Torch's own pipelines replace it, with their
own best plan, because they are the public program that has most of its schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from benchmarks.launch.points import Point, plan_point
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.studies.claim_33.cells import Cell, winners
from zeropp.plan import Candidate, Knobs


def points_of(cells: Iterable[Cell], base: RunSpec, tolerance: float) -> list[Point]:
    """One point per cell and contender with its best plan; ``base`` gives data, optimizer and what
    is timed."""
    points = []
    for cell in cells:
        for winner in winners(cell, tolerance, CONTENDERS.values()).values():
            if winner is not None:
                points.append(plan_point(_spec(cell, winner.candidate, base)))
    return points


def _spec(cell: Cell, candidate: Candidate[Knobs], base: RunSpec) -> RunSpec:
    return dataclasses.replace(
        base,
        model=cell.task.shape,
        cluster=cell.task.cluster,
        num_gpus=cell.task.num_gpus,
        global_batch=cell.task.global_batch,
        contender=candidate.knobs,
        microbatch_size=candidate.microbatch_size,
        precision=cell.task.precision,
    )
