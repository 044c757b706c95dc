"""One step of each contender side by side, from the spans that records keep; Perfetto traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.record import read_record
from benchmarks.report import style
from benchmarks.report.frame import CELL, best_configuration
from benchmarks.report.picture import Picture
from benchmarks.report.timeline_figure import timeline_figure
from zeropp.timeline import Timeline, timeline_from_rows

MAX_CELLS = 4  # pictures; every best configuration has its trace
MAX_TRACES = 50
MAX_RANKS = 8  # pipeline ranks in a picture


def step_timelines(rows: pd.DataFrame) -> Iterator[Picture]:
    """A picture a cell, all contenders on one time axis; cells with most contenders first."""
    cells = [cell for _, cell in _with_spans(rows).groupby(CELL, sort=True)]
    seen: set[str] = set()
    for cell in sorted(cells, key=len, reverse=True):
        first = cell.iloc[0]
        name = f"{first['model']}_{first['num_gpus']}_{first['evidence']}_{first['cluster']}"
        if name in seen or len(seen) == MAX_CELLS:  # one batch size of each is enough to look at
            continue
        seen.add(name)
        by_name = {row["contender"]: row for _, row in cell.iterrows()}
        timelines = [_shown(timeline_of(by_name[name])) for name in style.ordered(by_name)]
        yield Picture(
            "Timelines",
            f"timeline_{name}",
            f"One step on one time axis: {first['model']}, {first['num_gpus']} ranks, "
            f"batch {first['global_batch']}, {first['evidence']} on {first['cluster']}. "
            "Boxes are compute, strips below them gathers, reductions and transfers; pale grey "
            "is idle. The recorded step is one after the timed ones, and recording slows it.",
            timeline_figure(timelines),
        )


def write_traces(rows: pd.DataFrame, out: Path) -> list[Path]:
    """Chrome traces for ui.perfetto.dev of the best configurations that kept spans."""
    paths = []
    for _, row in _with_spans(rows)[:MAX_TRACES].iterrows():
        path = out / "traces" / f"{row['spec_id']}_{row['evidence']}.json"
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
