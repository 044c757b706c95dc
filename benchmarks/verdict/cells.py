"""The cells of the verdict, and the simulated results of every row of the comparison in a cell.

A cell is a model, a cluster, a number of GPUs and a global batch. In each, every contender runs
with its best plan (``zeropp.choose``). In addition all are compared in two given settings
(``given_settings``): with equal degrees, and with the paper's setting as far as it is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

from benchmarks.records.own_cache import Line
from benchmarks.records.simulated import BASES, line_of, plan_record, prediction, shape_named
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
from zeropp.choose.search import Evaluated, search
from zeropp.choose.task import MEMORY_MARGIN, Candidate, Task
from zeropp.price.cluster import Cluster
from zeropp.types.literals import AT_LEAST_0, FROM_0_TO_1, MORE_THAN_0, Precision

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

    def lines(self, commit: str, before: list[Line]) -> list[Line]:
        """The lines of this part in the table, by the code of a ``commit``; ``before`` are those of
        nearby parts, at whose plans the search begins, too."""
        cell, name = self.cell, self.part
        if name in GIVEN:
            given = GIVEN[name](cell.priced)
            return [_line(cell, name, commit, plan.plan.contender, plan) for plan in given]
        known = [*self.known, *(str(line["setting"]) for line in before if line["setting"])]
        winner = winner_of(
            cell,
            self.tolerance,
            ROWS[name],
            known,
            own=self.mode == "own",
            budget_s=self.budget_s,
        )
        return [_line(cell, self.mode, commit, name, winner)]


def parts_of(cell: Cell) -> list[tuple[str, str]]:
    """The parts of a cell of the verdict: each a row and mode, or a given setting and itself.

    In mode "best" everybody adds and sends gradients in fp32; in mode "own", in cells with the
    clusters' own bandwidth, rows whose program's configuration has 16 bits, too, may choose them.
    """
    parts = [(name, "best") for name in COMPARED] + [(name, name) for name in GIVEN]
    if cell.bandwidth == 1.0:
        parts += [(name, "own") for name, row in COMPARED.items() if row.contender.gradient_types]
    return parts


def candidate_of(setting: str) -> tuple[Compared, Contender[Any], Candidate[Any]]:
    """The row, the contender and the plan that a ``setting`` of the table names. Raises SpecError
    if there is none."""
    values = json.loads(setting)
    return candidate_in(values["knobs"]["name"], values["knobs"], values["microbatch_size"])


def winner_of(
    cell: Cell,
    tolerance: float,
    row: Compared,
    known: Iterable[str] = (),
    *,
    own: bool = False,
    budget_s: float = float("inf"),
) -> Evaluated[Any] | None:
    """A row's best plan; None if none fits. The search begins with the settings ``known``, except
    those whose knobs the contender no longer has or the row does not allow. ``own``: the types of
    gradients are chosen, too. ``budget_s``: the CPU time after which the best so far is taken."""
    begin = []
    for setting in known:
        with suppress(SpecError):
            begin.append(candidate_of(setting)[2])
    winners = []
    for contender in row.searched:
        fixed = {} if own else dict.fromkeys(contender.gradient_types, "fp32")
        first = [
            each
            for each in begin
            if isinstance(each.knobs, contender.knobs)  # not of another row whose plan it took
            and row.allows(each.knobs)
            and fixed.items() <= vars(each.knobs).items()
        ]
        asked = contender.any_gradient_types if own else None
        found = search(
            cell.priced,
            contender,
            asked,
            tolerance=tolerance,
            runner_up=False,
            budget_s=budget_s,
            known=first,
        )
        winners += [found.winner] if found.winner else []
    return min(winners, key=lambda winner: winner.step_s, default=None)


def _line(
    cell: Cell, mode: str, commit: str, row: str, plan: Evaluated[Any] | None
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
        words=describe(plan.plan) if plan else "no plan fits",
        **known,
    )
    return line_of(record)


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """A model (``llama_8b_32k`` is llama_8b at 32,768 tokens) in all combinations of the rest."""

    model: str
    clusters: list[str]
    num_gpus: list[int]
    sequences_per_gpu: list[int]
    bandwidth: Annotated[float, MORE_THAN_0] = 1.0  # times that of the clusters' own network

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """The ``verdict`` or ``atlas`` mapping of an experiment, checked."""

    tolerance: Annotated[float, FROM_0_TO_1]
    grids: list[GridSpec]  # a search that is stopped has finished the first ones
    memory_margin: Annotated[float, AT_LEAST_0] = MEMORY_MARGIN
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
                    global_batch=gpus * sequences,
                    precision=precision,
                    memory_margin=self.memory_margin,
                )
                cells.append(Cell(task, grid.bandwidth))
        return list({cell.key: cell for cell in cells}.values())


def study_spec(name: str, values: Any) -> StudySpec:
    """The mapping ``name`` of an experiment, checked; raises SpecError with one line for a
    mistake."""
    return validated(StudySpec, values, name)
