"""Makes a report: reads records, writes tables, figures and the page, and prints their paths.

The page is one HTML file that needs no network: answers, tables, pictures, sources. Every row of a
table links to the source of its numbers (commit, machine, versions, specification, raw steps).
"""

from __future__ import annotations

import base64
import gc
import gzip
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import pandas as pd
from rich.console import Console

from benchmarks.records.environment import git_state
from benchmarks.records.record import json_text, write_atomically
from benchmarks.report import DEFAULTS, SECTIONS, TABLES, Options, maker
from benchmarks.report.atlas_page import write_page
from benchmarks.report.charts import SavedPicture, save
from benchmarks.report.frame import latest_ok, load_frame, notes_of
from benchmarks.report.speedup import answers, headline_table
from benchmarks.report.table import Grid, Table, print_table, write_table
from benchmarks.report.tables import paper_grids
from benchmarks.report.timelines import write_traces
from benchmarks.specification import SpecError
from benchmarks.specification.command import workers
from benchmarks.specification.progress import track

TEN = 10  # rows of a table that is asked for are printed; its files have all
_MANIFEST = ".report.json"  # names the files that the last report wrote
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class ReportPaths:
    """The files that were written, and one line per file that was skipped."""

    files: list[Path]
    skipped: list[str]


def write_report(
    roots: Sequence[Path], out: Path, console: Console | None = None, options: Options = DEFAULTS
) -> ReportPaths:
    """Write all tables, figures and the page of the records below ``roots`` into ``out``.

    It prints the headline table, what it shows in words, and the paths. Files that cannot be
    read are named and skipped.
    Raises SpecError if no record fits the options.
    """
    console = console or Console()
    rows, skipped = _rows(roots, options, console)
    if rows.empty:
        return ReportPaths([], skipped)
    gc.freeze()  # the rows are no garbage: a look at them would take a tenth of the time
    tables = {name: make_table(name, rows, options) for name in TABLES}
    grids = {name: grids_of(table) for name, table in tables.items()}
    print_table(headline_table(rows, options), console)
    sentences = answers(rows)
    for line in [*sentences * (rows["contender"].nunique() > 1), *notes_of(rows)]:
        console.print(line, markup=False)
    with report_folder(out) as folder:
        pictures = draw(rows, options, folder)
        files = [folder / "report.html", folder / "tables.md"]
        files[0].write_text(_page(rows, sentences, grids, pictures, skipped), encoding="utf-8")
        for name, table in tables.items():
            files += write_table(table, grids[name], folder)
        texts = ((folder / f"{name}.md").read_text(encoding="utf-8") for name in tables)
        files[1].write_text("\n".join(texts), encoding="utf-8")
        files += [path for saved in pictures.values() for p in saved for path in p.paths]
        files += write_traces(rows, folder, every=options.timelines)
        priced = rows[rows["evidence"].str.startswith("simulated")]
        if priced.loc[priced["status"] == "ok", "contender"].nunique() > 1:
            files.append(folder / "atlas.html")
            if left_out := write_page(priced, files[-1]):
                files.pop()
                console.print(left_out, markup=False)
        names = [path.relative_to(folder) for path in files]
    return finished(names, out, skipped, console)


def write_one_table(
    name: str, roots: Sequence[Path], *, out: Path, options: Options, console: Console | None = None
) -> ReportPaths:
    """Print one table of ``TABLES`` and write it as CSV, Parquet, Markdown, LaTeX and HTML."""
    console = console or Console()
    rows, skipped = _rows(roots, options, console)
    if rows.empty:
        return ReportPaths([], skipped)
    table = make_table(name, rows, options)
    names = write_tables(table.name, [table], out)
    # The paper's table is wider than a terminal.
    print_table(headline_table(rows, options) if name == "paper" else table, console, TEN)
    for note in notes_of(rows):
        console.print(note, markup=False)
    return finished(names, out, skipped, console)


def make_table(name: str, rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of ``TABLES`` with this name, of the rows of ``latest_ok``."""
    return maker(TABLES[name])(rows, options)  # type: ignore[no-any-return]


def write_tables(name: str, tables: Sequence[Table], out: Path) -> list[Path]:
    """Write tables in every form, and one page of them with this name, into a folder of their own;
    returns the names of the files."""
    with report_folder(out) as folder:
        files, grids = [], []
        for table in tables:
            grids += grids_of(table)
            files += write_table(table, grids_of(table), folder)
        files.append(folder / f"{name}.html")
        page = _TEMPLATES.get_template("one_table.html.j2").render(grids=grids)
        files[-1].write_text(page, encoding="utf-8")
        return [path.relative_to(folder) for path in files]


def grids_of(table: Table) -> list[Grid]:
    """The text of a table: one grid, or for the paper's table one per kind of evidence, basis and
    cluster."""
    return list(paper_grids(table)) if table.name == "paper" else [table.grid()]


def draw(rows: pd.DataFrame, options: Options, out: Path) -> dict[str, list[SavedPicture]]:
    """Draw and write every figure, with one process per core; returns them by heading."""
    light = rows.drop(columns=["source", "unsuccessful"])  # large, and only the page reads them
    figures = [(name, path) for name, section in SECTIONS.items() for path in section.figures]
    pictures: dict[str, list[SavedPicture]] = defaultdict(list)
    count = min(os.cpu_count() or 1, len(figures))
    with workers(count, "fork") as pool:  # matplotlib is imported already
        jobs = [pool.submit(_drawn, path, light, options, out) for _, path in figures]
        for _ in track(as_completed(jobs), len(jobs), "kinds of figures"):
            pass
        for (name, _), job in zip(figures, jobs, strict=True):
            pictures[name] += job.result()
    return pictures


def _drawn(path: str, rows: pd.DataFrame, options: Options, out: Path) -> list[SavedPicture]:
    names, saved = Counter[str](), list[SavedPicture]()
    for picture in maker(path)(rows, options):
        names[picture.name] += 1
        again = f"_{names[picture.name]}" * (names[picture.name] > 1)
        saved.append(save(replace(picture, name=picture.name + again), out, pdf=options.pdf))
    return saved


def _rows(
    roots: Sequence[Path], options: Options, console: Console
) -> tuple[pd.DataFrame, list[str]]:
    frame, skipped = load_frame(roots)
    for line in skipped:
        console.print(f"skipped {line}", markup=False, soft_wrap=True)
    known = sorted(set(frame["contender"]))
    if known and options.base not in (*known, DEFAULTS.base):
        raise SpecError(
            f"--base={options.base}: no record of that contender (there are {', '.join(known)})"
        )
    return latest_ok(frame), skipped


def finished(names: Sequence[Path], out: Path, skipped: list[str], console: Console) -> ReportPaths:
    """The files of a report; prints where its page is, in one line that only a terminal folds."""
    page = next(name for name in names if name.suffix == ".html")
    line = f"{out / page} (and {len(names) - 1} other files in its folder)"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return ReportPaths([out / name for name in names], skipped)


@contextmanager
def report_folder(out: Path, manifest: str = _MANIFEST) -> Iterator[Path]:
    """An empty folder to write into, whose files then replace those of the last report in ``out``.

    If the body raises, the last report stays as it was. Files in ``out`` that no report has written
    stay there; raises SpecError if one of them has a new file's name. ``manifest`` is the file in
    which a report names its own files: those that have another are files of others.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    fresh.mkdir()
    try:
        yield fresh
        names = {str(p.relative_to(fresh)) for p in fresh.rglob("*") if p.is_file()}
        try:
            last = set(json.loads((out / manifest).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # there is none, or it cannot be read
            last = set()
        if others := [name for name in sorted(names - last) if os.path.lexists(out / name)]:
            raise SpecError(
                f"{out / others[0]}: is of no report, and would be lost (name another folder)"
            )
        out.mkdir(exist_ok=True)
        # If what follows is cut off, the next report may replace what both have written.
        write_atomically(out / manifest, json.dumps(sorted(names | last), indent=1))
        for path in (out / name for name in last - names):
            path.unlink(missing_ok=True)
            if path.parent != out and path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).replace(out / name)
        write_atomically(out / manifest, json.dumps(sorted(names), indent=1))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _page(
    rows: pd.DataFrame,
    sentences: Sequence[str],
    grids: Mapping[str, Sequence[Grid]],
    pictures: Mapping[str, Sequence[SavedPicture]],
    skipped: Sequence[str],
) -> str:
    """The page of the answers' ``sentences``, the ``grids`` by table and the ``pictures`` by
    heading. They were made from ``rows``, whose records they name. Tables without rows are not
    shown."""
    filled = {name: [grid for grid in of_table if grid.rows] for name, of_table in grids.items()}
    sections = [
        {
            "name": name,
            "grids": [grid for table in section.tables for grid in filled[table]],
            "pictures": [
                {
                    "name": picture.name,
                    "caption": picture.caption,
                    "png": base64.b64encode(picture.paths[0].read_bytes()).decode(),
                }
                for picture in pictures[name]
            ],
        }
        for name, section in SECTIONS.items()
    ]
    sources = dict(zip(rows["record_id"], rows["source"], strict=True))
    others = (attempt for attempts in rows["unsuccessful"] for attempt in attempts)
    sources |= {attempt["record_id"]: attempt["source"] for attempt in others}
    sha, dirty = git_state()
    summary = {"configurations": str(len(rows))} | {
        head: ", ".join(f"{n} {value}" for value, n in rows[column].value_counts().items())
        for head, column in (
            ("evidence", "evidence"),
            ("status", "status"),
            ("clusters", "cluster"),
        )
    }
    return _TEMPLATES.get_template("report.html.j2").render(
        paper=filled["paper"],
        sections=sections,
        answers=sentences,
        summary=summary,
        notes=notes_of(rows),
        skipped=skipped,
        commit=sha[:10] + (" with local changes" if dirty else ""),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        # Most of a record is what others have, too: packed it takes a twentieth.
        sources=base64.b64encode(gzip.compress(json_text(sources).encode(), mtime=0)).decode(),
    )
