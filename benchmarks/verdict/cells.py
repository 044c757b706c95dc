"""The cells of the verdict, and the simulated results of every row of the comparison in a cell.

A cell is a model, a cluster, a number of GPUs and a global batch. In each, every contender runs
with its best plan (``zeropp.choose``). In addition all are compared in two given settings
(``given_settings``): with equal degrees, and with the paper's setting as far as it is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

from benchmarks.records.own_cache import Line
from benchmarks.records.simulated import BASES, line_of, plan_record, prediction, shape_named
from benchmarks.report.searches import Best, best_of
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import (
    COMPARED,
    ROWS,
    Compared,
    candidate_in,
    setting_of,
)
from benchmarks.specification.reading import preset, validated
from benchmarks.verdict.given_settings import GIVEN
from zeropp.choose.contender import Contender, describe
from zeropp.choose.outcome import Evaluated
from zeropp.choose.task import Candidate, Task
from zeropp.price.cluster import Cluster
from zeropp.types.literals import AT_LEAST_0, FROM_0_TO_1, MORE_THAN_0, Precision, Settings

# The types of gradients by the modes of the tables: as users run each program, and equal.
SETTINGS: dict[str, Settings] = {"own": "users", "best": "equal"}
# The columns of the tables that name a cell: ``Cell.key``.
CELL = ["model", "cluster", "num_gpus", "global_batch", "bandwidth"]


@dataclass(frozen=True)
class Cell:
    """One comparison; ``bandwidth`` multiplies the cluster's inter-node bandwidth."""

    task: Task
    bandwidth: float = 1.0

    @property
    def key(self) -> tuple[str, str, int, int, float]:
        """Model, cluster, GPUs, global batch, bandwidth factor: the columns of the tables."""
        task = self.task
        names = (task.shape.name, task.cluster.name)
        return (*names, task.num_gpus, task.global_batch, self.bandwidth)

    @property
    def priced(self) -> Task:
        """The task on the cluster with the cell's bandwidth."""
        inter = self.task.cluster.inter
        scaled = replace(inter, bandwidth_gb_s=inter.bandwidth_gb_s * self.bandwidth)
        return replace(self.task, cluster=replace(self.task.cluster, inter=scaled))


@dataclass(frozen=True)
class CellPart:
    """The part of a cell that one process computes: the best plan of the row named ``part``, in
    mode "best" or "own", or the plans of the given setting named ``part``."""

    cell: Cell
    part: str
    mode: str
    tolerance: float
    known: tuple[str, ...] = ()  # settings of best plans that earlier searches found
    budget_s: float = float("inf")  # CPU time after which the best plan so far is taken
    memory_margin: float | None = None  # what plans must leave; None: by their program's errors

    def lines(self, commit: str, before: list[Line]) -> list[Line]:
        """The lines of this part in the table, by the code of a ``commit``; ``before`` are those of
        nearby parts, at whose plans the search begins, too."""
        cell, name = self.cell, self.part
        if name in GIVEN:
            given = GIVEN[name](cell.priced)
            return [_line(cell, name, commit, plan.plan.contender, plan) for plan in given]
        known = [*self.known, *(str(line["setting"]) for line in before if line["setting"])]
        best = best_in(
            cell,
            ROWS[name],
            known,
            settings=SETTINGS[self.mode],
            memory_margin=self.memory_margin,
            tolerance=self.tolerance,
            budget_s=self.budget_s,
        )
        found = {"gap": best.gap, "memory_margin": best.room.share}
        return [_line(cell, self.mode, commit, name, best.winner, found, best.none)]


def parts_of(cell: Cell) -> list[tuple[str, str]]:
    """The parts of a cell of the verdict: each a row and mode, or a given setting and itself.

    In mode "best" everybody adds and sends gradients in fp32; in mode "own", in cells with the
    clusters' own bandwidth, rows whose documents recommend other types have these.
    """
    parts = [(name, "best") for name in COMPARED] + [(name, name) for name in GIVEN]
    if cell.bandwidth == 1.0:
        parts += [(name, "own") for name, row in COMPARED.items() if as_users(row)]
    return parts


def as_users(row: Compared) -> bool:
    """Whether its users run a row's program with other types of gradients than fp32."""
    return any(kind != "fp32" for kind in row.contender.gradient_types.values())


def candidate_of(setting: str) -> tuple[Compared, Contender[Any], Candidate[Any]]:
    """The row, the contender and the plan that a ``setting`` of the table names. Raises SpecError
    if there is none."""
    values = json.loads(setting)
    return candidate_in(values["knobs"]["name"], values["knobs"], values["microbatch_size"])


def best_in(cell: Cell, row: Compared, known: Iterable[str] = (), **options: Any) -> Best:
    """A row's best plan in a cell. The search begins with the settings ``known``, except those
    whose knobs the contender no longer has or the row does not allow; ``options`` are those of
    ``best_of``."""
    begin = []
    for setting in known:
        with suppress(SpecError):
            begin.append(candidate_of(setting)[2])
    return best_of(cell.priced, row, known=begin, runner_up=False, **options)


def _line(
    cell: Cell,
    mode: str,
    commit: str,
    row: str,
    plan: Evaluated[Any] | None,
    found: Mapping[str, float] | None = None,
    none: str = "no plan fits",
) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if plan is not None:
        known = {"setting": setting_of(plan.candidate), "predicted": prediction(plan.result)}
    record = plan_record(
        cell.task,
        row,
        BASES[mode],
        bandwidth=cell.bandwidth,
        commit=commit,
        words=describe(plan.plan) if plan else none,
        found=found,
        **known,
    )
    return line_of(record)


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """A model (``llama_8b_32k`` is llama_8b at 32,768 tokens) in all combinations of the rest."""

    model: str
    clusters: list[str]
    num_gpus: list[int]
    sequences_per_gpu: list[Annotated[float, MORE_THAN_0]]
    bandwidth: Annotated[float, MORE_THAN_0] = 1.0  # times that of the clusters' own network
    precision: Precision | None = None  # None: the study's

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """The ``verdict`` or ``atlas`` mapping of an experiment, checked."""

    tolerance: Annotated[float, FROM_0_TO_1]
    grids: list[GridSpec]  # a search that is stopped has finished the first ones
    # What a plan must leave free, as a share of its priced peak; null: the measured error of its
    # program's memory (``ratio_errors.memory_room``).
    memory_margin: Annotated[float, AT_LEAST_0] | None = None
    budget_s: Annotated[float, MORE_THAN_0] = float("inf")
    clusters: list[str] = field(default_factory=list)  # those on which best plans are run for real

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    def cells(self, precision: Precision) -> list[Cell]:
        """The cells of all grids, each once."""
        cells = []
        for grid in self.grids:
            numbers = product(grid.clusters, grid.num_gpus, grid.sequences_per_gpu)
            for name, gpus, sequences in numbers:
                task = Task(
                    shape=shape_named(grid.model),
                    cluster=preset("cluster", name, Cluster),
                    num_gpus=gpus,
                    global_batch=_batch(grid.model, gpus, sequences),
                    precision=grid.precision or precision,
                )
                cells.append(Cell(task, grid.bandwidth))
        return list({(cell.key, cell.task.precision): cell for cell in cells}.values())


def _batch(model: str, gpus: int, sequences: float) -> int:
    if (gpus * sequences) % 1:
        raise SpecError(
            f"grids: {model}: {sequences:g} sequences per GPU on num_gpus={gpus} are no whole batch"
        )
    return int(gpus * sequences)


def study_spec(name: str, values: Any) -> StudySpec:
    """The mapping ``name`` of an experiment, checked; raises SpecError with one line for a
    mistake."""
    return validated(StudySpec, values, name)
