"""The same comparison with a launcher that runs: the best plans that the simulator finds, as
points of a sweep.

"3D, best known" is measured as torch's own pipelines, the public program that has those
schedules; what a contender's engine lacks is recorded as infeasible, with its reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from benchmarks.launch.points import Point, plan_point
from benchmarks.specification.run_spec import RunSpec
from benchmarks.studies.claim_33.cells import Cell, winners
from zeropp.plan import Settings
from zeropp.tune.space import Candidate

_ENGINES = {"best_3d": "torch_pp"}


def points_of(cells: Iterable[Cell], base: RunSpec, tolerance: float) -> list[Point]:
    """A point for every contender's best plan in every cell; ``base`` gives data, optimizer and
    what is timed."""
    points = []
    for cell in cells:
        for winner in winners(cell, tolerance).values():
            if winner is not None:
                points.append(plan_point(_spec(cell, winner.candidate, base)))
    return points


def _spec(cell: Cell, candidate: Candidate, base: RunSpec) -> RunSpec:
    return dataclasses.replace(
        base,
        model=cell.task.shape,
        cluster=cell.task.cluster,
        num_gpus=cell.task.num_gpus,
        global_batch=cell.task.global_batch,
        contender=settings_of(candidate),
        microbatch_size=candidate.microbatch_size,
        precision=cell.task.precision,
    )


def settings_of(candidate: Candidate) -> Settings:
    """The knobs that make a contender's own planner give this configuration."""
    layout = candidate.layout
    engine = _ENGINES.get(candidate.contender, candidate.contender)
    return Settings(
        name=engine,
        pp=layout.pp,
        tp=layout.tp,
        shard=layout.shard,
        replicate=layout.replicate,
        replicate_zero=layout.replicate_zero,
        chunks=layout.chunks,
        unit=candidate.unit or "auto",
        activation_cap=candidate.cap or "auto",
        schedule="auto" if candidate.schedule in ("zeropp", "fsdp") else candidate.schedule,
        sequence_parallel=layout.sequence_parallel,
        recompute=candidate.recompute,
        reduce_every=candidate.reduce_every,
        stage_style=candidate.stage_style,
        placement=layout.placement,
    )
