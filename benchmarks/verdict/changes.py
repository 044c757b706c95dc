"""Which way each choice that programs were given moved the verdict.

The comparison lets every program choose what its maintainers would: compiled blocks, recomputation,
how gradients are summed, and so on. Here the best plans are searched again without one choice at a
time. A search begins with the best plan, changed so that it does without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.specification.contenders import Compared
from benchmarks.verdict.assumptions import write_step_times
from benchmarks.verdict.cells import Cell, candidate_of
from benchmarks.verdict.judge import plans_of
from zeropp.choose.search import search
from zeropp.choose.task import Candidate

CHANGES_TABLE = "changes.csv"  # seconds per step of every best plan without each choice
OPPONENTS = ("deepspeed_3d", "deepspeed_best", "megatron_core")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A choice without which plans are searched again: those of ``rows`` (of all, if there are
    none), among the knobs that the change ``allows``, from the best plan with the knobs
    ``instead``."""

    name: str
    label: str
    rows: tuple[str, ...] = ()
    allows: Callable[[Any], bool]
    instead: Mapping[str, object]

    def concerns(self, row: Compared) -> bool:
        """Whether the plans of a row are searched again."""
        return not self.rows or row.name in self.rows


CHANGES = (
    Change(
        name="compile",
        label="no compiled blocks (Megatron-Core's kernels are fused without)",
        allows=lambda knobs: not getattr(knobs, "compile", False),
        instead={"compile": False},
    ),
    Change(
        name="recompute",
        label="no recomputation",
        allows=lambda knobs: knobs.recompute == "none",
        instead={"recompute": "none", "recompute_blocks": "auto"},
    ),
    Change(
        name="recompute_modules",
        label="no recomputed MLPs (Megatron-Core's `recompute_modules`)",
        rows=("megatron_core",),
        allows=lambda knobs: knobs.recompute != "selective",
        instead={"recompute": "none", "recompute_blocks": "auto"},
    ),
    Change(
        name="bf16_sums",
        label="no sums in bf16 (DeepSpeed)",
        rows=("deepspeed_3d", "deepspeed_best"),
        allows=lambda knobs: knobs.grad_accum_dtype == "fp32",
        instead={"grad_accum_dtype": "fp32"},
    ),
    Change(
        name="zero2",
        label="no ZeRO-2 (DeepSpeed)",
        rows=("deepspeed_best", "deepspeed_best_fp32"),
        allows=lambda knobs: knobs.replicate_zero != 2,
        instead={"replicate_zero": 1},
    ),
    Change(
        name="one_rank",
        label="no plans with pp=1 (ZeroPP)",
        rows=("zeropp",),
        allows=lambda knobs: knobs.pp > 1,
        instead={},
    ),
)
_COLUMNS = tuple(change.name for change in CHANGES)


@dataclass(frozen=True)
class ChangedPlan:
    """The best plan of one row in one cell, for a process to search again without each choice."""

    cell: Cell
    setting: str
    tolerance: float

    def step_s(self) -> dict[str, float]:
        """Seconds per step by the names of ``CHANGES``; NaN where no plan fits."""
        row, candidate = candidate_of(self.setting)
        unchanged_s = row.contender.simulated(self.cell.priced, candidate).step_s
        return {
            change.name: self._searched_s(change, row, candidate)
            if change.concerns(row) and not change.allows(candidate.knobs)
            else unchanged_s
            for change in CHANGES
        }

    def _searched_s(self, change: Change, row: Compared, candidate: Candidate[Any]) -> float:
        def allows(knobs: Any) -> bool:
            return row.allows(knobs) and change.allows(knobs)

        begin = replace(candidate, knobs=replace(candidate.knobs, **change.instead))
        found = search(
            self.cell.priced,
            replace(row, allows=allows).searched,
            tolerance=self.tolerance,
            runner_up=False,
            known=[begin] if allows(begin.knobs) else [],
        )
        return found.winner.result.step_s if found.winner else math.nan


def price_changes(
    plans: pd.DataFrame, cells: Iterable[Cell], path: Path, *, tolerance: float, anew: bool
) -> None:
    """Search the best ``plans`` of ZeroPP and of its opponents again without each choice, and write
    the table ``path``, of which lines of the same plans are kept unless ``anew``."""
    rows = {"zeropp", *(row for name in OPPONENTS for row in plans_of(name))}
    write_step_times(
        plans[plans["contender"].isin(rows)],
        cells,
        path,
        job=partial(ChangedPlan, tolerance=tolerance),
        columns=_COLUMNS,
        words="plans without a choice",
        anew=anew,
    )
