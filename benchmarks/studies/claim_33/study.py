"""Runs the study: searches all cells on all cores, keeps the rows, judges them, draws the maps.

``plans.csv`` has one row per contender, cell and mode, with the commit that simulated it; every
table, figure and sentence of the verdict is derived from it.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.launch.points import Point, plan_point
from benchmarks.launch.sweep import run_points, spec_of
from benchmarks.records.environment import git_state
from benchmarks.records.record import RunRecord, write_atomically
from benchmarks.records.simulated import TABLE, commit_of, line_of
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.write import make_table, write_table_forms
from benchmarks.specification import SpecError
from benchmarks.specification.command import check_writable, workers
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.progress import progress_line
from benchmarks.specification.run_spec import RunSpec
from benchmarks.studies.claim_33.cells import (
    COMPARED,
    Cell,
    CellPart,
    VerdictSpec,
    cells_of,
    jobs_of,
    verdict_spec,
    winner_of,
)
from benchmarks.studies.claim_33.given_settings import GIVEN
from benchmarks.studies.claim_33.judge import CELL, judge, summary
from benchmarks.studies.claim_33.pages import draw, draw_losses

COMMITTED = CHECKOUT / "results" / "reference" / "claim_33" / TABLE


def points_of(cells: Iterable[Cell], base: RunSpec, tolerance: float) -> list[Point]:
    """One point per cell and contender that can be run, with the best plan that the simulator
    finds; ``base`` gives data, optimizer and what is timed."""
    points = []
    for cell in cells:
        for contender in CONTENDERS.values():
            winner = winner_of(cell, tolerance, contender)
            if winner is not None:
                spec = dataclasses.replace(
                    base,
                    model=cell.task.shape,
                    cluster=cell.task.cluster,
                    num_gpus=cell.task.num_gpus,
                    global_batch=cell.task.global_batch,
                    contender=winner.candidate.knobs,
                    microbatch_size=winner.candidate.microbatch_size,
                    precision=cell.task.precision,
                )
                points.append(plan_point(spec))
    return points


def run(config: dict[str, Any]) -> int:
    """Write plans.csv, verdict.csv, verdict.md and the maps into ``report_dir``. With a launcher
    other than ``simulate``, run the best plans on ``verdict.clusters`` instead.

    Cells that are in plans.csv are not simulated again unless ``rerun=all``, which is needed after
    a change of the cost model or of the schedules.
    """
    spec = verdict_spec(config["verdict"])
    cells = cells_of(spec, config["precision"])
    if config["launcher"]["kind"] != "simulate":
        return _measure(config, spec, cells)
    if config["precision"] != "bf16":  # a line of the table does not say it
        raise SpecError(
            f"precision={config['precision']}: the verdict's table is of bf16 (use bf16)"
        )
    out = Path(config["report_dir"])
    check_writable("report_dir", out)
    simulate_cells(spec, cells, out / TABLE, anew=config["rerun"] == "all")
    write_verdict(pd.read_csv(out / TABLE), spec, out)
    return 0


def _measure(config: dict[str, Any], spec: VerdictSpec, cells: list[Cell]) -> int:
    real = [c for c in cells if c.bandwidth == 1.0 and c.task.cluster.name in spec.clusters]
    points = points_of(real, spec_of(config), spec.tolerance)
    return run_points(points, [config] * len(points))


def write_verdict(plans: pd.DataFrame, spec: VerdictSpec, out: Path) -> None:
    """Write everything that is derived from the rows."""
    verdicts = judge(plans)
    verdicts.to_csv(out / "verdict.csv", index=False, float_format="%.4g")
    text = summary(verdicts)
    (out / "verdict.md").write_text(text, encoding="utf-8")
    paths = draw(verdicts, spec, out) + draw_losses(plans, spec, out)
    console = Console()
    console.print(text, markup=False)
    rows = latest_ok(load_frame([out / TABLE])[0])
    paper = write_table_forms(make_table("paper", rows), out / "paper")
    names = [TABLE, "verdict.csv", "verdict.md", *(path.name for path in paths)]
    names += [f"paper/{path}" for path in paper]
    console.print(f"Written to {out}: " + ", ".join(names))


def simulate_cells(spec: VerdictSpec, cells: list[Cell], path: Path, *, anew: bool) -> None:
    """Simulate the parts of cells that are missing in the file ``path``, with one process per core,
    and add their rows, sorted. A cell is written when all of its missing parts are done."""
    rows: list[dict[str, Any]] = []
    if path.exists() and not anew:
        rows = pd.read_csv(path).to_dict("records")  # type: ignore[assignment]
    todo = missing_jobs(rows, cells, spec.tolerance, _committed_settings())
    commit = commit_of(*git_state())
    jobs = [job for missing in todo.values() for job in missing]
    parts: dict[Cell, dict[str, list[RunRecord]]] = defaultdict(dict)
    with workers(os.cpu_count() or 1) as pool, progress_line() as bar:
        line = bar.add_task("cells", total=len(todo))
        running = {pool.submit(job.records, commit): job for job in jobs}
        for done in as_completed(running):
            job = running[done]
            of_cell = parts[job.cell]
            of_cell[job.part] = done.result()
            if len(of_cell) < len(todo[job.cell]):
                continue
            rows += [line_of(record) for records in of_cell.values() for record in records]
            rows.sort(key=_order)
            table = pd.DataFrame(rows)
            write_atomically(path, table.to_csv(index=False, float_format="%.6g"))
            bar.advance(line)


def _committed_settings() -> dict[object, str]:
    """The settings of the committed best plans, by cell and contender. Searches begin with them,
    because whatever has a bound above their time need not be tried."""
    if not COMMITTED.exists():
        return {}
    plans = pd.read_csv(COMMITTED)
    best = plans[(plans["mode"] == "best") & plans["setting"].notna()]
    keys = best[[*CELL, "contender"]].itertuples(index=False, name=None)
    return dict(zip(keys, best["setting"], strict=True))


def missing_jobs(
    rows: list[dict[str, Any]], cells: list[Cell], tolerance: float, known: Mapping[object, str]
) -> dict[Cell, list[CellPart]]:
    """The parts without rows, by cell. A given setting in which nothing fits leaves no rows, and is
    tried again."""
    have = {
        (*(row[name] for name in CELL), row["mode"] if row["mode"] in GIVEN else row["contender"])
        for row in rows
    }
    jobs = {
        cell: [job for job in jobs_of(cell, tolerance, known) if (*cell.key, job.part) not in have]
        for cell in cells
    }
    return {cell: missing for cell, missing in jobs.items() if missing}


def _order(row: dict[str, Any]) -> tuple[object, ...]:
    """The place of a row in the file: by cell and mode, contenders in the order of the tables."""
    places = {contender.name: place for place, contender in enumerate(COMPARED)}
    return (*(row[name] for name in CELL), row["mode"], places[row["contender"]])
