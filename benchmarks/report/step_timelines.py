"""Pictures of one step of each contender, and Perfetto traces, from the spans in records."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.records.record import read_record
from benchmarks.report import style, words
from benchmarks.report.frame import CELL, best_configuration
from benchmarks.report.picture import Picture, by_evidence
from benchmarks.report.timeline_figure import timeline_figure
from benchmarks.specification.contenders import PRICED
from zeropp.timeline import Timeline, timeline_from_rows

MAX_RANKS = 8  # most pipeline ranks in a picture
_RECORDED = " The recorded step is one after the timed ones, and recording slows it."


def step_timelines(rows: pd.DataFrame, *, every: bool = False) -> Iterator[Picture]:
    """One step of all contenders of a cell on one time axis.

    Only the smallest of the cells with the most contenders is drawn, because drawing takes long;
    ``every`` draws all cells.
    """
    for suffix, said, mine in by_evidence(_with_spans(rows)):
        for cell in _cells(mine, every=every):
            first = cell.iloc[0]
            name = f"timeline_{first['model']}_{first['num_gpus']}_{first['global_batch']}_{suffix}"
            yield _picture(name, said, cell)


def _cells(rows: pd.DataFrame, *, every: bool) -> list[pd.DataFrame]:
    """The cells to draw, those with most contenders first, then the smallest."""
    cells = [cell for _, cell in rows.groupby(CELL, sort=False)]
    ordered = sorted(cells, key=lambda cell: (-len(cell), cell["num_gpus"].iloc[0]))
    return ordered if every else ordered[:1]


def _picture(name: str, said: str, cell: pd.DataFrame) -> Picture:
    first = cell.iloc[0]
    by_name = {row["contender"]: row for row in cell.to_dict("records")}
    timelines = [_shown(timeline_of(by_name[contender])) for contender in style.ordered(by_name)]
    return Picture(
        section="Timelines",
        name=name,
        caption=f"One step on one time axis: {words.model_label(first['model'])}, "
        f"{first['num_gpus']} {words.worker_word(cell)}s, "
        f"batch {first['global_batch']}, {said}. Boxes are compute (darker: later chunks; "
        "numbers: microbatches), strips below them gathers, reductions and transfers; grey is idle."
        + (_unrecorded(list(by_name)) if first["evidence"] == "measured" else ""),
        figure=timeline_figure(timelines),
        shown=style.shown(cell),
    )


def _unrecorded(contenders: list[str]) -> str:
    """The caption's words on communication that torch's runtimes start themselves, so that recorded
    steps do not show it."""
    hidden = [
        f"{known.unrecorded} of {known.label}"
        for name, known in sorted(PRICED.items())
        if name in contenders and known.unrecorded
    ]
    said = f" Not recorded, and so grey: {', '.join(hidden)}." if hidden else ""
    return _RECORDED + said


def write_traces(rows: pd.DataFrame, out: Path, *, every: bool = False) -> list[Path]:
    """Write traces for ui.perfetto.dev of the configurations that ``step_timelines`` draws."""
    paths = []
    for _, _, mine in by_evidence(_with_spans(rows)):
        for row in pd.concat(_cells(mine, every=every)).to_dict("records"):
            evidence = str(row["evidence"]).replace(" ", "_")
            path = out / "traces" / f"{row['spec_id']}_{evidence}.json"
            path.parent.mkdir(exist_ok=True)
            timeline_of(row).write_chrome(path)
            paths.append(path)
    return paths


def timeline_of(row: Mapping[Hashable, Any]) -> Timeline:
    """The timeline of a row's record, which is read again, since a frame holds no spans."""
    record = read_record(Path(row["path"]))
    return timeline_from_rows(
        f"{words.contender_label(row['contender'])}, {row['layout']}",
        record.provenance,
        record.spans,
    )


def _with_spans(rows: pd.DataFrame) -> pd.DataFrame:
    best = best_configuration(rows)
    return best[best["has_spans"]]


def _shown(timeline: Timeline) -> Timeline:
    """The timeline of the first pipeline ranks, if there are more than a picture can show."""
    ranks = timeline.ranks
    if len(ranks) <= MAX_RANKS:
        return timeline
    kept = set(ranks[:MAX_RANKS])
    spans = tuple(span for span in timeline.spans if span.rank in kept)
    title = f"{timeline.title} (ranks 0 to {MAX_RANKS - 1} of {len(ranks)})"
    return Timeline(title, timeline.provenance, spans)
