"""How far the opponents' settings move the verdict: their best plans, searched with one otherwise.

In: the variants of ``docs/opponents.yaml``, and the cells and the committed best plans of the
verdict (``results/reference/claim_33/plans.csv``), at which the searches begin. Out:
``results/reference/opponents/variants.csv``, one line per variant and cell, from which
``docs/opponents.md`` has its table of medians. A variant changes what a row asks for (``knobs``) or
how its programs are priced (``traits``). A search ends after some seconds: it begins nearby.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import CHECKOUT
from benchmarks.records.environment import git_state
from benchmarks.records.own_cache import Job, Line, fill, write
from benchmarks.records.simulated import TABLE, commit_of
from benchmarks.report.opponents import SETUP
from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.compose import compose
from benchmarks.specification.contenders import COMPARED
from benchmarks.verdict.cells import CELL, Cell, candidate_of, study_spec
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

    def lines(
        self, cell: Cell, known: str, tolerance: float, commit: str, before: list[Line]
    ) -> list[Line]:
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
        return [
            {
                "variant": self.name,
                "contender": self.row,
                **dict(zip(CELL, cell.key, strict=True)),
                "step_s": found.step_s if found else float("nan"),
                "plan": describe(found.plan) if found else "no plan fits",
                "commit": commit,
            }
        ]


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
    spec = study_spec("verdict", config["verdict"])
    cells = {cell.key: cell for cell in spec.cells("bf16") if cell.bandwidth == 1.0}
    plans = pd.read_csv(REFERENCE / "claim_33" / TABLE)
    best = plans[(plans["mode"] == "best") & plans["setting"].notna()]
    settings = best.set_index([*CELL, "contender"])["setting"].to_dict()
    commit, order = commit_of(*git_state()), [variant.name for variant in VARIANTS]
    chains: list[list[tuple[Hashable, Job]]] = []
    for variant in chosen:
        for key, cell in cells.items():
            if (known := settings.get((*key, variant.row))) is not None:
                job = partial(variant.lines, cell, known, spec.tolerance, commit)
                chains.append([((variant.name, *key), job)])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = fill(options.out, chains, _key_of, "variants of opponents")
    lines = [line for line in lines if line["variant"] in order]
    write(options.out, sorted(lines, key=lambda of: (order.index(of["variant"]), _key_of(of))))
    return 0


def _key_of(line: Line) -> tuple[Any, ...]:
    return (line["variant"], *(line[name] for name in CELL))


if __name__ == "__main__":
    sys.exit(main())
