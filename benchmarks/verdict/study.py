"""Runs the study: searches all cells on all cores, keeps the rows, judges them, draws the pictures.

``plans.csv`` has one line per row of the comparison, cell and mode, with the commit that simulated
it, and ``assumptions.csv`` what its best plans would take with other constants. Every table, figure
and number of the verdict is derived from these two and from the errors of published runs.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.launch.points import Point, plan_point
from benchmarks.launch.sweep import run_points, spec_of
from benchmarks.records.environment import git_state
from benchmarks.records.own_cache import Job, Line, fill, write
from benchmarks.records.simulated import TABLE, commit_of
from benchmarks.report.charts import save
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.write import make_table, write_tables
from benchmarks.specification import SpecError
from benchmarks.specification.command import check_writable
from benchmarks.specification.contenders import COMPARED, CONTENDERS, ROWS, whole
from benchmarks.specification.run_spec import RunSpec
from benchmarks.verdict.assumptions import REPRICED, price_assumptions
from benchmarks.verdict.cells import (
    CELL,
    Cell,
    CellPart,
    StudySpec,
    best_in,
    parts_of,
    study_spec,
)
from benchmarks.verdict.given_settings import GIVEN
from benchmarks.verdict.judge import with_own, with_shared_plans
from benchmarks.verdict.pages import rows_table
from benchmarks.verdict.pictures import pictures_of
from benchmarks.verdict.uncertainty import judged

REFERENCE = CHECKOUT / "results" / "reference"
COMMITTED = REFERENCE / "claim_33" / TABLE
_SEARCHES = ("known", "fresh")  # where a search begins: with the committed best plans, or with none


def points_of(cells: Iterable[Cell], base: RunSpec, tolerance: float) -> list[Point]:
    """One point per cell and row whose contender has a trainer, with the best plan that the
    simulator finds, and one where two rows have the same. Contenders that are not compared have a
    point, too. ``base`` gives data, optimizer and what is timed."""
    runnable = [row for row in COMPARED.values() if row.contender.trainer]
    runnable += [whole(c) for name, c in CONTENDERS.items() if name not in COMPARED]
    specs: list[RunSpec] = []
    for cell in cells:
        for row in runnable:
            best = best_in(cell, row, settings="equal", tolerance=tolerance)
            if (winner := best.winner) is None:
                continue
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
            if spec not in specs:
                specs.append(spec)
    return [plan_point(spec) for spec in specs]


def run(config: dict[str, Any]) -> int:
    """Write plans.csv, assumptions.csv, verdict.csv and the pictures into ``report_dir``. With a
    launcher other than ``simulate``, run the best plans on ``verdict.clusters`` instead.

    Cells that are in plans.csv are not simulated again unless ``rerun=all``, which is needed after
    a change of the cost model or of the schedules. Searches begin with the committed best plans, or
    with nothing if ``search=fresh``.
    """
    spec = study_spec("verdict", config["verdict"])
    if {config["precision"], *(grid.precision or "bf16" for grid in spec.grids)} != {"bf16"}:
        raise SpecError("precision: the verdict is of bf16 (use bf16, or experiment=atlas)")
    cells = spec.cells("bf16")
    if config["launcher"]["kind"] != "simulate":
        real = [c for c in cells if c.bandwidth == 1.0 and c.task.cluster.name in spec.clusters]
        points = points_of(real, spec_of(config), spec.tolerance)
        return run_points(points, [config] * len(points))
    out = simulate_cells(config, spec, COMMITTED)
    plans = pd.read_csv(out / TABLE)
    price_assumptions(plans, cells, out / REPRICED, anew=config["rerun"] == "all")
    write_verdict(plans, pd.read_csv(out / REPRICED), out)
    return 0


def report_folder(config: Mapping[str, Any]) -> Path:
    """The folder of a study's tables. Raises SpecError for one that cannot be written to, and for
    one whose files are not those of a study, as some might be lost."""
    out = Path(config["report_dir"])
    check_writable("report_dir", out)
    table = out / TABLE
    text = table.read_text(encoding="utf-8", errors="replace") if table.is_file() else ""
    columns = text.partition("\n")[0].split(",")
    if not {*CELL, "contender", "mode", "setting"} <= {*columns} and any(out.iterdir()):
        raise SpecError(
            f"report_dir={out}: has files, but no {TABLE} of this study (name another folder)"
        )
    return out


def write_verdict(plans: pd.DataFrame, repriced: pd.DataFrame, out: Path) -> None:
    """Write everything that is derived from the rows."""
    verdicts, uncertainty = judged(plans, repriced)
    verdicts.to_csv(out / "verdict.csv", index=False, float_format="%.4g")
    pictures = [save(picture, out) for picture in pictures_of(plans, verdicts, uncertainty)]
    rows = latest_ok(load_frame([out / TABLE])[0])
    paper = write_tables("paper", [make_table("paper", rows)], out / "paper")
    names = [
        TABLE,
        REPRICED,
        "verdict.csv",
        *(path.name for picture in pictures for path in picture.paths),
    ]
    names += [f"paper/{path}" for path in paper]
    best = verdicts[(verdicts["mode"] == "best") & (verdicts["bandwidth"] == 1.0)]
    console = Console()
    console.print(rows_table(best, uncertainty), markup=False)
    console.print(f"Written to {out}: {', '.join(names)}", markup=False)


def simulate_cells(
    config: Mapping[str, Any],
    spec: StudySpec,
    committed: Path,
    parts: Callable[[Cell], list[tuple[str, str]]] = parts_of,
    near: Callable[[Cell], object] = lambda cell: cell,
) -> Path:
    """Simulate the ``parts`` of a study's cells that are missing in the table of its folder, write
    it, sorted, and return the folder. Searches begin with the settings of the ``committed`` table,
    and those of cells with equal ``near`` also with the last best plans of the same row and mode. A
    given setting in which nothing fits leaves no rows, and is tried again."""
    known, out = known_settings(config, committed), report_folder(config)
    commit = commit_of(*git_state())
    chains: defaultdict[object, list[tuple[Hashable, Job]]] = defaultdict(list)
    for cell in spec.cells(config["precision"]):
        for name, mode in parts(cell):
            key = (*cell.key, cell.task.precision, name, mode)
            begin, searched = known.get(key, ()), (spec.budget_s, spec.memory_margin)
            part = CellPart(cell, name, mode, spec.tolerance, begin, *searched)
            chains[near(cell), name, mode].append((key, partial(part.lines, commit)))
    lines = fill(out / TABLE, chains.values(), key_of, "searches", anew=config["rerun"] == "all")
    places = {name: place for place, name in enumerate(ROWS)}  # older tables have others, too
    lines = [line for line in lines if line["contender"] in places]
    table = pd.DataFrame(lines).pipe(with_precision)
    table = pd.concat(with_shared_plans(with_own(own)) for _, own in table.groupby("precision"))
    table = table.assign(place=table["contender"].map(places))
    table = table.sort_values([*CELL, "precision", "mode", "place"])
    write(out / TABLE, table.drop(columns="place"))
    return out


def known_settings(config: Mapping[str, Any], committed: Path) -> dict[object, tuple[str, ...]]:
    """The settings of the ``committed`` best plans, by cell, contender and mode; none
    with ``search=fresh``. Searches begin with them, because whatever has a bound above their time
    need not be tried. Raises SpecError for another ``search``."""
    if config["search"] not in _SEARCHES:
        raise SpecError(f"search={config['search']}: must be one of {', '.join(_SEARCHES)}")
    if config["search"] == "fresh" or not committed.exists():
        return {}
    plans = pd.read_csv(committed)
    best = plans[plans["mode"].isin(["best", "own"]) & plans["setting"].notna()]
    keys = with_precision(best)[[*CELL, "precision", "contender", "mode"]].itertuples(
        index=False, name=None
    )
    return {key: (setting,) for key, setting in zip(keys, best["setting"], strict=True)}


def with_precision(plans: pd.DataFrame) -> pd.DataFrame:
    """The lines of a table with their precision, which is bf16 where older lines do not say it."""
    return plans.assign(
        precision=plans.get("precision", pd.Series("bf16", plans.index)).fillna("bf16")
    )


def key_of(line: Line) -> tuple[object, ...]:
    """The cell, its precision, the part and the mode of a line of the table."""
    part = line["mode"] if line["mode"] in GIVEN else line["contender"]
    precision = line.get("precision")  # older lines do not say it
    said = precision if isinstance(precision, str) else "bf16"
    return (*(line[name] for name in CELL), said, part, line["mode"])
