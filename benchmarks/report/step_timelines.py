"""One step of each contender side by side, from the spans that records keep; Perfetto traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.records.record import read_record
from benchmarks.report import style
from benchmarks.report.frame import CELL, best_configuration
from benchmarks.report.picture import Picture, by_evidence
from benchmarks.report.timeline_figure import timeline_figure
from zeropp.timeline import Timeline, timeline_from_rows

MAX_CELLS = 4  # pictures a kind of evidence and cluster; every configuration has its trace
MAX_TRACES = 50
MAX_RANKS = 8  # pipeline ranks in a picture
_RECORDED = " The recorded step is one after the timed ones, and recording slows it."
_HOOKED = {"FSDP2": "gathers and reductions", "torch PP": "gathers and transfers"}


def step_timelines(rows: pd.DataFrame) -> Iterator[Picture]:
    """A picture a cell, all contenders on one time axis; cells with most contenders first."""
    for suffix, words, mine in by_evidence(_with_spans(rows)):
        cells = [cell for _, cell in mine.groupby(CELL, sort=True)]
        named: dict[str, pd.DataFrame] = {}
        for cell in sorted(cells, key=len, reverse=True):  # one batch size is enough to look at
            named.setdefault(f"{cell['model'].iloc[0]}_{cell['num_gpus'].iloc[0]}", cell)
        for name, cell in list(named.items())[:MAX_CELLS]:
            yield _picture(f"timeline_{name}_{suffix}", words, cell)


def _picture(name: str, words: str, cell: pd.DataFrame) -> Picture:
    first = cell.iloc[0]
    by_name = {row["contender"]: row for _, row in cell.iterrows()}
    timelines = [_shown(timeline_of(by_name[contender])) for contender in style.ordered(by_name)]
    return Picture(
        "Timelines",
        name,
        f"One step on one time axis: {first['model']}, {first['num_gpus']} ranks, "
        f"batch {first['global_batch']}, {words}. Boxes are compute (darker: later chunks; "
        "numbers: microbatches), strips below them gathers, reductions and transfers; grey is idle."
        + (_unrecorded(list(by_name)) if first["evidence"] == "measured" else ""),
        timeline_figure(timelines),
    )


def _unrecorded(contenders: list[str]) -> str:
    """What a recorded step does not show: the exchanges that torch's own runtimes start."""
    hidden = [f"{what} of {name}" for name, what in _HOOKED.items() if name in contenders]
    words = f" Not recorded, and so grey: {', '.join(hidden)}." if hidden else ""
    return _RECORDED + words


def write_traces(rows: pd.DataFrame, out: Path) -> list[Path]:
    """Chrome traces for ui.perfetto.dev of the best configurations that kept spans."""
    paths = []
    for _, row in _with_spans(rows)[:MAX_TRACES].iterrows():
        evidence = row["evidence"].replace(" ", "_")
        path = out / "traces" / f"{row['spec_id']}_{evidence}.json"
        path.parent.mkdir(exist_ok=True)
        timeline_of(row).write_chrome(path)
        paths.append(path)
    return paths


def timeline_of(row: pd.Series) -> Timeline:
    """The timeline in a row's record, read again: a frame of thousands does not hold spans."""
    record = read_record(Path(row["path"]))
    return timeline_from_rows(
        f"{row['contender']}, {row['layout']}", record.provenance, record.spans
    )


def _with_spans(rows: pd.DataFrame) -> pd.DataFrame:
    best = best_configuration(rows)
    return best[best["has_spans"]]


def _shown(timeline: Timeline) -> Timeline:
    """The first pipeline ranks alone, where there are more than a picture can show."""
    ranks = timeline.ranks
    if len(ranks) <= MAX_RANKS:
        return timeline
    kept = set(ranks[:MAX_RANKS])
    spans = tuple(span for span in timeline.spans if span.rank in kept)
    title = f"{timeline.title} (ranks 0 to {MAX_RANKS - 1} of {len(ranks)})"
    return Timeline(title, timeline.provenance, spans)
