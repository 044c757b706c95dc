"""How far the opponents' settings move the verdict: their best plans, searched with one otherwise.

In: the variants of ``docs/opponents.yaml``, and the cells and the committed best plans of the
verdict (``results/reference/claim_33/plans.csv``), at which the searches begin. Out:
``results/reference/opponents/variants.csv``, one line per variant and cell, from which
``docs/opponents.md`` has its table of medians. A variant changes what a row asks for (``knobs``) or
how its programs are priced (``traits``). A search ends after some seconds: it begins nearby.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import CHECKOUT
from benchmarks.records.environment import git_state
from benchmarks.records.record import write_atomically
from benchmarks.records.simulated import TABLE, commit_of
from benchmarks.report.opponents import SETUP
from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, command, workers
from benchmarks.specification.compose import compose
from benchmarks.specification.contenders import COMPARED
from benchmarks.specification.progress import track
from benchmarks.verdict.cells import CELL, Cell, candidate_of, cells_of, verdict_spec
from zeropp.choose.contender import describe
from zeropp.choose.search import search
from zeropp.choose.task import Task
from zeropp.schedule.plan import SizedPlan

REFERENCE = CHECKOUT / "results" / "reference"
OUT = REFERENCE / "opponents" / "variants.csv"
_BUDGET_S = 5.0  # CPU time of a search, which ends earlier where the bounds settle it


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the verdict with one setting otherwise."""

    name: str  # as the page shows it
    row: str
    knobs: Mapping[str, Any] = field(default_factory=dict)  # not searched, but these
    traits: str = ""  # behind the name of every plan's program, as ``entry_named`` reads it

    def step(self, cell: Cell, known: str, tolerance: float) -> dict[str, Any]:
        """The best plan in a cell, from the setting ``known`` on, as a line of the table."""
        row = COMPARED[self.row]
        contender = row.searched[0]  # of DeepSpeed's, that of stages 1 and 2
        contender = replace(contender, size=partial(_sized, contender.size, self.traits))
        _, other, candidate = candidate_of(known)
        begin = []
        if other is row.contender:
            begin = [replace(candidate, knobs=replace(candidate.knobs, **self.knobs))]
        asked = replace(row.contender.knobs(), **self.knobs)
        found = search(
            cell.task,
            contender,
            asked,
            tolerance=tolerance,
            runner_up=False,
            budget_s=_BUDGET_S,
            known=begin,
        ).winner
        return {
            "variant": self.name,
            "contender": self.row,
            **dict(zip(CELL, cell.key, strict=True)),
            "step_s": found.step_s if found else float("nan"),
            "plan": describe(found.plan) if found else "no plan fits",
        }


def _sized(size: Any, traits: str, task: Task, knobs: Any, microbatch: int) -> SizedPlan:
    plan: SizedPlan = size(task, knobs, microbatch)
    return replace(plan, program=plan.program + traits)


VARIANTS = tuple(Variant(**values) for values in SETUP["variants"])


@command
def main() -> int:
    """Command line; see ``--help``."""
    parser = CommandParser(
        prog="python -m benchmarks.evidence.variants",
        description="Search the opponents' best plans again in all cells of the verdict, with one "
        "setting otherwise each, and write a CSV. Variants that it has are left as they are.",
    )
    parser.add_argument("out", nargs="?", type=Path, default=OUT, help="the CSV (the committed)")
    parser.add_argument("--only", default="", metavar="PART", help="variants with this in a name")
    options = parser.parse_args()
    chosen = [variant for variant in VARIANTS if options.only in variant.name]
    if not chosen:
        names = ", ".join(variant.name for variant in VARIANTS)
        raise SpecError(f"--only={options.only}: no such variant (known: {names})")
    (config,) = compose("config", ["experiment=claim_33"])
    spec = verdict_spec(config["verdict"])
    cells = {cell.key: cell for cell in cells_of(spec, "bf16") if cell.bandwidth == 1.0}
    plans = pd.read_csv(REFERENCE / "claim_33" / TABLE)
    best = plans[(plans["mode"] == "best") & plans["setting"].notna()]
    table = pd.read_csv(options.out) if options.out.exists() else pd.DataFrame({"variant": []})
    todo = [variant for variant in chosen if variant.name not in set(table["variant"])]
    commit = commit_of(*git_state())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for variant in todo:
        jobs = {
            key: str(row["setting"])
            for row in best[best["contender"] == variant.row].to_dict("records")
            if (key := (*(row[name] for name in CELL),)) in cells
        }
        with workers(os.cpu_count() or 1) as pool:
            running = [
                pool.submit(variant.step, cells[key], known, spec.tolerance)
                for key, known in jobs.items()
            ]
            done = track(as_completed(running), len(running), variant.name)
            lines = [future.result() | {"commit": commit} for future in done]
        table = pd.concat([table, pd.DataFrame(lines).sort_values(CELL)], ignore_index=True)
        write_atomically(options.out, table.to_csv(index=False, float_format="%.6g"))
    print(f"{len(todo)} variants searched, {len(chosen) - len(todo)} were there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
