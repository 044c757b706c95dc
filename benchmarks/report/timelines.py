"""Pictures of one step of each contender, and Perfetto traces, from the spans in records."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.records.record import read_record
from benchmarks.report import DEFAULTS, Options, display, style
from benchmarks.report.charts import Picture, by_evidence
from benchmarks.report.frame import CELL, best_configuration
from benchmarks.specification.contenders import PRICED
from zeropp.schedule.program import Action, Op, parse_action
from zeropp.types.timeline import Span, Timeline, timeline_from_rows

_BOXES = {
    Op.FORWARD: ("forward", "#56B4E9"),
    Op.BACKWARD_INPUT: ("backward, input", "#E69F00"),
    Op.BACKWARD_WEIGHT: ("backward, weight", "#009E73"),
    Op.FULL_BACKWARD: ("full backward", "#D55E00"),
    Op.REDUCE_TIED: ("tied sum", "#882255"),
    Op.UPDATE: ("update", "#666666"),
}
_STRIPS = {
    "gather": ("#0072B2", 0.66, "gather"),
    "reduce": ("#CC79A7", 0.76, "reduce"),
    "replicas": ("#332288", 0.76, "reduce over replicas"),
    "transfer": ("#444444", 0.86, "transfer"),
    "offload": ("#882255", 0.86, "offload"),
}
_OTHER, _BUBBLE = "#999999", "#e9e9e9"
_BOX_HEIGHT, _STRIP_HEIGHT = 0.64, 0.09
_WIDTH_IN, _ROW_IN = 13.0, 0.36
_Colour = tuple[float, float, float]
_LETTER_IN = 0.085  # width of one digit of a box's number, in inches


def timeline_figure(timelines: Sequence[Timeline], time_unit: str = "s") -> Figure:
    """One panel per timeline on a common time axis, which ``time_unit`` labels.

    There is a row per pipeline rank, with boxes for compute and strips for communication. Later
    chunks of a rank are darker, and a box shows its microbatch if there is room. Spans must have
    the names of actions in text form (``3F1``); others are grey.
    """
    rows = [max(1, len(t.ranks)) for t in timelines]
    figure = Figure(figsize=(_WIDTH_IN, _ROW_IN * sum(rows) + 0.75 * len(rows) + 0.7))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(
        len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows}
    )
    end = max(timeline.step_s for timeline in timelines)
    used: dict[str, str] = {}
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw(axis, timeline, end, used)
    axes[-1, 0].set_xlabel(f"time [{time_unit}]")
    others = [word for word, colour in used.items() if colour == _OTHER]
    strips = (word for _, _, word in _STRIPS.values())
    order = [*(word for word, _ in _BOXES.values()), *others, *strips]
    shown = sorted(used, key=order.index)
    patches = [Patch(facecolor=used[word], label=word) for word in shown]
    patches.append(Patch(facecolor=_BUBBLE, edgecolor="#cccccc", label="idle (bubble)"))
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches))
    return figure


def _draw(axis: Axes, timeline: Timeline, end: float, used: dict[str, str]) -> None:
    """Draw a timeline, ``end`` seconds wide, and add the words and colours that it ``used``."""
    row = {rank: number for number, rank in enumerate(timeline.ranks)}
    shade_of = _shades(timeline)
    boxes = [
        _box(0, timeline.step_s, number, _BOX_HEIGHT, to_rgb(_BUBBLE)) for number in row.values()
    ]
    for span in timeline.spans:
        if span.lane in _STRIPS:
            colour, offset, word = _STRIPS[span.lane]
            used[word] = colour
            top, face = row[span.rank] + offset, to_rgb(colour)
            boxes.append(_box(span.start_s, span.end_s, top, _STRIP_HEIGHT, face))
        if span.lane != "compute":
            continue
        action, width = _parse(span), span.end_s - span.start_s
        word, colour, shade = span.action, _OTHER, 1.0
        if action is not None:
            word, colour = _BOXES[action.op]
            shade = shade_of[span.rank, action.stage] if action.op.is_compute else 1.0
        used[word] = colour
        inches = width / end * (_WIDTH_IN - 1)
        edge = min(0.6, 7 * inches)  # a wider edge would hide a narrow box
        white = 0.5 * (1 - shade)  # later chunks are darker
        red, green, blue = (part + (1 - part) * white for part in to_rgb(colour))
        top, face = row[span.rank], (red, green, blue)
        boxes.append(_box(span.start_s, span.end_s, top, _BOX_HEIGHT, face, edge))
        label = "" if action is None or action.microbatch is None else str(action.microbatch)
        if label and inches > _LETTER_IN * len(label):
            middle = (span.start_s + width / 2, top + _BOX_HEIGHT / 2)
            number = axis.annotate(label, middle, ha="center", va="center_baseline", fontsize=7)
            number.set_in_layout(False)
    # One collection, since one artist per box would be much slower; later boxes cover earlier ones.
    corners, faces, edges = zip(*boxes, strict=True)
    axis.add_collection(
        PolyCollection(corners, facecolors=faces, edgecolors="white", linewidths=edges)
    )
    axis.set_title(f"{timeline.title}  ({timeline.provenance})", loc="left")
    axis.set_xlim(0, end)
    axis.set_ylim(len(row), -0.15)
    names = [f"pipeline rank {rank}" for rank in row]
    axis.set_yticks([n + _BOX_HEIGHT / 2 for n in row.values()], names)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(False)


def _box(
    start: float, end: float, top: float, height: float, face: _Colour, edge: float = 0.0
) -> tuple[list[tuple[float, float]], _Colour, float]:
    """The corners of a box from ``start`` to ``end`` seconds, its colour, and the width of its
    white edge in points."""
    low = top + height
    return [(start, top), (end, top), (end, low), (start, low)], face, edge


def _shades(timeline: Timeline) -> dict[tuple[int, int], float]:
    """The shade of every (rank, stage) that computes: from 0 for a rank's first chunk to 1 for its
    last."""
    stages: dict[int, set[int]] = {}
    for span in timeline.spans:
        action = _parse(span) if span.lane == "compute" else None
        if action is not None and action.op.is_compute:
            stages.setdefault(span.rank, set()).add(action.stage)
    return {
        (rank, stage): number / max(1, len(chunks) - 1)
        for rank, chunks in stages.items()
        for number, stage in enumerate(sorted(chunks))
    }


def _parse(span: Span) -> Action | None:
    try:
        action = parse_action(span.action)
    except ValueError:
        return None
    return action if action.op in _BOXES else None


MAX_RANKS = 8  # most pipeline ranks in a picture


def step_timelines(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """One step of all contenders of a cell on one time axis.

    Only the smallest of the cells with the most contenders is drawn, because drawing takes long;
    ``options.timelines`` asks for all cells.
    """
    for suffix, evidence, group in by_evidence(_with_spans(rows)):
        for cell in _cells(group, every=options.timelines):
            first = cell.iloc[0]
            name = f"timeline_{first['model']}_{first['num_gpus']}_{first['global_batch']}_{suffix}"
            yield _picture(name, evidence, cell)


def _cells(rows: pd.DataFrame, *, every: bool) -> list[pd.DataFrame]:
    """The cells to draw, those with most contenders first, then the smallest."""
    cells = [cell for _, cell in rows.groupby(CELL, sort=False)]
    ordered = sorted(cells, key=lambda cell: (-len(cell), cell["num_gpus"].iloc[0]))
    return ordered if every else ordered[:1]


def _picture(name: str, evidence: str, cell: pd.DataFrame) -> Picture:
    first = cell.iloc[0]
    by_name = {row["contender"]: row for row in cell.to_dict("records")}
    whole = [timeline_of(by_name[contender]) for contender in style.ordered(by_name)]
    worker = display.worker_word(cell)
    first_ranks = (
        f" Of the {first['num_gpus']} {worker}s, a row is the first with its pipeline rank."
        if any(len(timeline.ranks) < first["num_gpus"] for timeline in whole)
        else ""
    )
    has_chunks = any(shade > 0 for timeline in whole for shade in _shades(timeline).values())
    darker = " Later chunks are darker." * has_chunks
    recorded = ""
    if first["evidence"] == "measured":
        # Communication that torch's runtimes start themselves is in no recorded step.
        hidden = [
            f"{known.unrecorded} of {known.label}"
            for contender, known in sorted(PRICED.items())
            if contender in by_name and known.unrecorded
        ]
        recorded = " The recorded step is one after the timed ones, and recording slows it."
        recorded += f" Not recorded, and so grey: {', '.join(hidden)}." * bool(hidden)
    return Picture(
        name=name,
        caption=f"One step on one time axis: {display.model_label(first['model'])}, "
        f"{first['num_gpus']} {worker}s, batch {first['global_batch']}"
        f"{display.setting_words(first, display.varied(cell))}, {evidence}.{first_ranks} "
        "Boxes are compute, with the number of their microbatch where there is room; strips below "
        f"them are communication; grey is idle.{darker}{recorded}",
        figure=timeline_figure([_shown(timeline) for timeline in whole]),
        shown=style.shown(cell),
    )


def write_traces(rows: pd.DataFrame, out: Path, *, every: bool = False) -> list[Path]:
    """Write traces for ui.perfetto.dev of the configurations that ``step_timelines`` draws."""
    paths = []
    for _, _, group in by_evidence(_with_spans(rows)):
        for row in pd.concat(_cells(group, every=every)).to_dict("records"):
            evidence = str(row["evidence"]).replace(" ", "_")
            path = out / "traces" / f"{row['record_id'].replace('/', '_')}_{evidence}.json"
            path.parent.mkdir(exist_ok=True)
            timeline_of(row).write_chrome(path)
            paths.append(path)
    return paths


def timeline_of(row: Mapping[Hashable, Any]) -> Timeline:
    """The timeline of a row's record, which is read again, since a frame holds no spans."""
    record = read_record(Path(row["path"]))
    return timeline_from_rows(
        f"{display.contender_label(row['contender'])}, {row['layout']}",
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
    title = f"{timeline.title} (pipeline ranks 0 to {MAX_RANKS - 1} of {len(ranks)})"
    return Timeline(title, timeline.provenance, spans)
