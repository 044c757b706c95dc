"""Figures of records: bars of throughput and memory, curves of scaling and of the loss, and stacked
bars of what a step's time is spent on and of the fullest rank's memory by kind.

``Picture`` is a figure with its caption, and ``save`` writes it to files.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from PIL import Image

from benchmarks.report import DEFAULTS, Options, display, style
from benchmarks.report.frame import CELL, best_configuration, best_or_failed, ranges

_SHOWN_PT, _LETTER_IN = 7.5, 0.06  # the line below a figure: size, and room per letter
PANEL = [
    *("evidence", "basis", "cluster", "precision", "model", "global_batch", "seq"),
    *("setting", "machine", "environment"),
]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One figure. ``name`` is its file name without suffix, and ``shown`` a line below the panels
    that says what they show, so that the file can be passed on without its caption."""

    name: str
    caption: str
    figure: Figure
    shown: str = ""


@dataclass(frozen=True)
class SavedPicture:
    """A picture that is on disk; its figure was closed, because figures take much memory."""

    name: str
    caption: str
    paths: tuple[Path, ...]  # PNG, and PDF if that was asked for


def say_what_it_shows(picture: Picture) -> None:
    """Put the picture's own line below its figure, once, folded to the figure's width."""
    if picture.shown:
        letters = int((picture.figure.get_figwidth() - 0.2) / _LETTER_IN)
        text = textwrap.fill(picture.shown, letters)
        picture.figure.supxlabel(text, fontsize=_SHOWN_PT, color="#555555", x=0.01, ha="left")


def save(picture: Picture, out: Path, *, pdf: bool = True) -> SavedPicture:
    """Write PNG, and PDF if that is asked for, and release the figure.

    The panels are arranged once for all; by default matplotlib would do it twice per file.
    """
    say_what_it_shows(picture)
    picture.figure.set_dpi(plt.rcParams["savefig.dpi"])  # the width of text depends on it
    if engine := picture.figure.get_layout_engine():
        engine.execute(picture.figure)
        picture.figure.set_layout_engine(None)
    paths, canvas = [out / f"{picture.name}.png"], FigureCanvasAgg(picture.figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    few = Image.fromarray(pixels).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE)
    few.save(paths[0])  # a quarter of the bytes, and sooner than all colours are compressed
    if pdf:
        paths.append(out / f"{picture.name}.pdf")
        picture.figure.savefig(paths[1], metadata={"CreationDate": None})  # equal if drawn again
    plt.close(picture.figure)
    return SavedPicture(picture.name, picture.caption, tuple(paths))


def by_evidence(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(suffix for file names, words for captions, rows) per kind of evidence and cluster.

    No figure mixes kinds of evidence or clusters, except for those that compare them.
    """
    keys = ["evidence", "basis", "cluster"]
    for (evidence, basis, cluster), group in rows.groupby(keys, sort=True):
        kind = [str(word) for word in (evidence, basis) if word]
        suffix = re.sub(r"[^\w.+-]+", "_", "_".join([*kind, str(cluster)]))
        yield suffix, f"{', '.join(kind)} on {display.cluster_label(str(cluster))}", group


def panel_title(panel: pd.DataFrame, beside: pd.DataFrame) -> str:
    """Model, batch and sequence length of the rows of one panel, and its settings that differ
    between the rows of its figure (``beside``)."""
    row = panel.iloc[0]
    name = display.model_label(row["model"])
    text = f"{name}, batch {row['global_batch']} x {row['seq']}, {row['precision']}"
    return textwrap.fill(text + display.setting_words(row, display.told_apart(beside)), 52)


MAX_PANELS = 6  # nobody reads a figure with more

_PEAKS = {
    "allocated": "peak allocated, fullest {worker} [{unit}]",
    "resident": "peak resident above start,\nfullest {worker} [{unit}]",
    "predicted": "predicted peak, fullest {worker} [{unit}]",
}


def throughput_bars(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """One figure of throughput per kind of evidence and cluster.

    There is one panel per model and batch, in it one group of bars per GPU count, and one bar per
    contender in its fastest configuration. If none succeeded, a word says why.
    """
    for suffix, evidence, group in by_evidence(best_or_failed(rows)):
        if group["tokens_per_s_per_gpu"].notna().any():
            worker = display.worker_word(group)
            panels, left_out = _drawn(group)
            draw = partial(_bars, column="tokens_per_s_per_gpu", form=display.tokens)
            yield Picture(
                name=f"throughput_{suffix}",
                caption=f"Tokens per second and {worker}, {evidence}"
                + f": medians; {ranges(group)}" * evidence.startswith("measured")
                + f".{left_out}",
                figure=_panels(panels, draw, f"tokens/s/{worker}"),
                shown=style.shown(pd.concat(panels)) + left_out,
            )


def memory_bars(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """One figure of peak memory per kind of evidence, cluster and kind of peak, arranged like that
    of throughput."""
    for suffix, evidence, group in by_evidence(best_or_failed(rows)):
        worker = display.worker_word(group)
        for kind, known in group[group["peak_gib"].notna()].groupby("memory_kind"):
            unit = display.memory_unit(known["peak_gib"])
            panels, left_out = _drawn(known.assign(peak=unit.scale * known["peak_gib"]))
            draw = partial(_bars, column="peak", form=unit.digits)
            label = _PEAKS[str(kind)].format(worker=worker, unit=unit.name)
            yield Picture(
                name=f"memory_{suffix}_{kind}",
                caption=f"Peak memory of the fullest {worker} ({kind}), {evidence}.{left_out}",
                figure=_panels(panels, draw, label),
                shown=style.shown(pd.concat(panels)) + left_out,
            )


def _drawn(rows: pd.DataFrame) -> tuple[list[pd.DataFrame], str]:
    """The rows of every panel that is drawn, and which panels are not, as a sentence of a caption;
    empty if all are."""
    groups = rows.groupby(PANEL, sort=False)
    panels = [panel for _, panel in islice(groups, MAX_PANELS)]
    last = panel_title(panels[-1], pd.concat(panels)).replace("\n", " ")
    told = f" Drawn are the first {MAX_PANELS} of {groups.ngroups} panels, up to {last}"
    return panels, f"{told}; the table has all." * (groups.ngroups > MAX_PANELS)


def _panels(
    groups: list[pd.DataFrame],
    draw: Callable[[Axes, pd.DataFrame], None],
    label: str,
    columns: int = style.COLUMNS,
    **inches: Any,
) -> Figure:
    """One panel per model and batch, each with a scale of its own, which ``label`` names."""
    drawn = pd.concat(groups)
    figure, axes = style.panels(len(groups), columns, **inches)
    for number, (axis, panel) in enumerate(zip(axes, groups, strict=True)):
        draw(axis, panel)
        axis.set_title(panel_title(panel, drawn))
        if number % columns == 0:
            axis.set_ylabel(label)
    style.legend(figure, axes)
    return figure


def _bars(axis: Axes, rows: pd.DataFrame, *, column: str, form: display.Form) -> None:
    counts = sorted(rows["num_gpus"].unique())
    contenders = style.ordered(rows["contender"])
    width = 0.84 / len(contenders)
    turn = 90 if len(counts) * len(contenders) > 6 else 0
    ends = [f"{column}_low", f"{column}_high"]
    shown = rows.reindex(columns=["contender", "num_gpus", "status", column, *ends])  # few: faster
    for number, contender in enumerate(contenders):
        series = shown[shown["contender"] == contender].set_index("num_gpus").reindex(counts)
        places = np.arange(len(counts)) + (number - (len(contenders) - 1) / 2) * width
        values = series[column].to_numpy(dtype=float)
        drawn = axis.bar(
            places,
            np.nan_to_num(values),
            width * 0.92,
            yerr=errors(series, column),
            label=display.contender_label(contender),
            color=style.colour(contender),
            hatch=style.hatch(contender),
            edgecolor="white",
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
        texts = [_text(v, s, form) for v, s in zip(values, series["status"], strict=True)]
        # The text lies inside the panel, so it must not change the arrangement of the figure.
        axis.bar_label(drawn, texts, padding=3, fontsize=8, rotation=turn, in_layout=False)
    axis.set_xticks(np.arange(len(counts)), [str(count) for count in counts])
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_xlabel(f"{display.worker_word(rows)}s")
    axis.margins(y=0.35 if turn else 0.22)
    axis.set_ylim(bottom=0)


def _text(value: float, status: object, form: display.Form) -> str:
    """The number above a bar, or a word such as ``OOM`` if there is no bar."""
    if not np.isnan(value):
        over = status not in ("ok", None)  # the predicted peak is larger than the device's memory
        return f"{form(value)} {display.status_label(str(status))}" if over else form(value)
    return display.status_label(str(status)) if isinstance(status, str) and status != "ok" else ""


def errors(rows: pd.DataFrame, column: str) -> np.ndarray | None:
    """The distances of the intervals' ends from the values, [2, rows]; None if there are none."""
    if f"{column}_low" not in rows or not rows[f"{column}_low"].notna().any():
        return None
    low, high = rows[f"{column}_low"], rows[f"{column}_high"]
    ends = np.array([rows[column] - low, high - rows[column]], dtype=float)
    return np.nan_to_num(np.maximum(ends, 0.0))  # type: ignore[no-any-return]


_SERIES = ["parameters", "model", "seq", "precision", "setting", "environment", "kind"]
_KINDS = {  # the column that stays the same, and its words
    "strong": ("global_batch", "batch"),
    "weak": ("batch_per_gpu", "sequences per {worker}:"),
}


def scaling_curves(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """Tokens per second, model PFLOP/s of all GPUs, and efficiency over the GPU count.

    There are figures for strong scaling (the batch stays the same) and for weak scaling (the batch
    grows with the GPUs), each where there are at least two GPU counts.
    """
    best = best_configuration(rows)
    # Threads of a rank follow from how many share a machine, so a curve may have several.
    kinds = [[of.get(f"machine.{n}") for n in ("device", "processor")] for of in best["settings"]]
    per_gpu = best["global_batch"] / best["num_gpus"]
    best = best.assign(batch_per_gpu=per_gpu, kind=list(map(str, kinds)))
    for suffix, evidence, group in by_evidence(best):
        worker = display.worker_word(group)
        for kind, (key, word) in _KINDS.items():
            keys = [*_SERIES, key]
            counts = group.groupby(keys, dropna=False)["num_gpus"].transform("nunique")
            series = group[counts > 1].groupby(keys, sort=True, dropna=False)
            panels = [panel for _, panel in islice(series, MAX_PANELS)]
            if not panels:
                continue
            drawn = pd.concat(panels)
            kept = {
                f"{display.model_label(panel['model'].iloc[0])}, {word.format(worker=worker)} "
                f"{panel[key].iloc[0]:g}"
                + display.setting_words(panel.iloc[0], display.told_apart(drawn)): panel
                for panel in panels
            }
            # One quantity below the other: PFLOP/s if known, and not on CPUs.
            has_flops = drawn["model_tflops_per_gpu"].notna().any() and not drawn["on_cpu"].all()
            lines = ["tokens/s", *["model PFLOP/s"] * bool(has_flops), "efficiency [%]"]
            flops = " and model PFLOP/s" * bool(has_flops)
            left_out = series.ngroups - len(kept)
            more = f" {left_out} more series are left out." * (left_out > 0)
            for first in range(0, len(kept), style.COLUMNS):
                yield Picture(
                    name=f"scaling_{kind}_{suffix}",
                    caption=f"{kind.capitalize()} scaling, {evidence}: tokens per second{flops} "
                    f"of the whole job, and throughput per {worker} over that at the contender's "
                    f"smallest {worker} count.{more}",
                    figure=_curves(dict([*kept.items()][first : first + style.COLUMNS]), lines),
                    shown=style.shown(drawn) + more,
                )


def _curves(groups: Mapping[str, pd.DataFrame], lines: Sequence[str]) -> Figure:
    """One column of panels per series."""
    figure, flat = style.panels(
        len(lines) * len(groups), columns=len(groups), width=4.6, height=2.8
    )
    for column, (title, panel) in enumerate(groups.items()):
        axes = [flat[line * len(groups) + column] for line in range(len(lines))]
        axes[0].set_title(title)
        for axis, label in zip(axes, lines, strict=True):
            _series(axis, label, panel)
            if column == 0:
                axis.set_ylabel(label)
        axes[-1].set_xlabel(f"{display.worker_word(panel)}s")
    return figure


def _series(axis: Axes, label: str, panel: pd.DataFrame) -> None:
    """Draw one quantity of every contender over the GPU counts, with names at the curves' ends."""
    ends: list[tuple[float, float, str, str]] = []
    speeds = [name for name in map(str, panel) if name.startswith(("tokens_per_s", "model_tflops"))]
    shown = panel[["contender", "num_gpus", *speeds]].sort_values("num_gpus")  # few: faster
    for contender in style.ordered(panel["contender"]):
        series = shown[shown["contender"] == contender]
        gpus, per_gpu, tflops = (
            series[c].to_numpy(float)
            for c in ("num_gpus", "tokens_per_s_per_gpu", "model_tflops_per_gpu")
        )
        values = {
            "tokens/s": gpus * per_gpu,
            "model PFLOP/s": gpus * tflops / 1000,
            "efficiency [%]": 100 * per_gpu / per_gpu[0],
        }[label]
        bounds = errors(series, "tokens_per_s_per_gpu") if label == "tokens/s" else None
        scaled = None if bounds is None else gpus * bounds
        axis.errorbar(gpus, values, scaled, capsize=2, **style.line(contender))
        ends.append(
            (gpus[-1], values[-1], display.contender_label(contender), style.colour(contender))
        )
    if label.startswith("efficiency"):
        axis.axhline(100, color=style.NEUTRAL, linewidth=0.8)
        axis.margins(y=0.08)
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    counts = sorted(panel["num_gpus"].unique())
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    style.label_ends(axis, ends)


def loss_curves(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """Losses over all steps, warm-up included, where two contenders or topologies trained on the
    same batches from the same initial parameters."""
    best = best_configuration(rows)
    best = best[best["losses"].map(len) > 1]
    for suffix, evidence, group in by_evidence(best):
        panels = (panel for _, panel in group.groupby(PANEL, sort=False) if len(panel) > 1)
        if groups := [*islice(panels, style.COLUMNS)]:
            yield Picture(
                name=f"loss_{suffix}",
                caption=f"Training loss, {evidence}: every contender of a panel, at the smallest "
                "and the largest rank count, saw the same batches. Below, the distance from one of "
                "them: rounding, if all is well.",
                figure=_loss_curves(groups),
                shown=style.shown(pd.concat(groups)),
            )


def _loss_curves(groups: list[pd.DataFrame]) -> Figure:
    figure, flat = style.panels(2 * len(groups), columns=len(groups), width=4.8)
    top, bottom, drawn = flat[: len(groups)], flat[len(groups) :], pd.concat(groups)
    for upper, lower, panel in zip(top, bottom, groups, strict=True):
        extremes = {panel["num_gpus"].min(), panel["num_gpus"].max()}  # more curves would overlap
        panel = panel[panel["num_gpus"].isin(extremes)]
        lines = [row for _, row in panel.sort_values(["num_gpus", "contender"]).iterrows()]
        base, far = np.asarray(lines[0]["losses"]), list[tuple[float, float, str, str]]()
        for number, row in enumerate(lines):
            losses = np.asarray(row["losses"])
            width = 1 + 1.5 * (len(lines) - number) / len(lines)  # the first is widest
            look = style.line(row["contender"]) | {"markersize": 5, "linewidth": width}
            steps = np.arange(1, len(losses) + 1)
            upper.plot(steps, losses, alpha=0.8, markevery=(number % 4, 4), **look)
            shared = min(len(base), len(losses))
            error = np.abs(losses[:shared] - base[:shared]) / base[:shared]
            if number:
                lower.plot(steps[:shared], error, **(look | {"markersize": 3}))
                far.append((float(shared), float(error[-1]), _name(row), look["color"]))
        upper.set_title(panel_title(panel, drawn))
        lower.set_title(f"distance from {_name(lines[0])}", loc="right", fontsize=8)
        lower.set_ylim(bottom=0)
        style.label_ends(lower, far)
        lower.set_xlabel("step")
        for axis in (upper, lower):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.label_ends(upper, _ends(lines))
    top[0].set_ylabel("loss [nats/token]")
    bottom[0].set_ylabel("relative distance of the loss")
    return figure


def _name(row: pd.Series) -> str:
    """The name of one curve of losses."""
    return f"{display.contender_label(row['contender'])}, {row['num_gpus']} ranks"


def _ends(lines: list[pd.Series]) -> list[tuple[float, float, str, str]]:
    """One name per contender, with its rank counts, at the end of the first of its curves."""
    ends = []
    for contender in style.ordered(row["contender"] for row in lines):
        series = [row for row in lines if row["contender"] == contender]
        counts = " and ".join(dict.fromkeys(str(row["num_gpus"]) for row in series))
        losses, name = series[0]["losses"], f"{display.contender_label(contender)}, {counts} ranks"
        ends.append((float(len(losses)), float(losses[-1]), name, style.colour(contender)))
    return ends


# Paul Tol's "muted" and similar colours, with hatches, unlike the colours of contenders.
_CAUSES = {
    "limit": ("compute limit", "#DDDDDD", ""),
    "small_kernels": ("small kernels", "#999999", ""),
    "recomputation": ("recomputation", "#882255", ""),
    "imbalance": ("imbalance of stages", "#AA4499", "//"),
    "bubble": ("bubble", "#CC6677", ""),
    "slow_nodes": ("slow nodes", "#661100", ""),
    "copies": ("copies", "#DDCC77", ".."),
    "tensor": ("tensor parallelism", "#999933", "//"),
    "transfers": ("transfers", "#117733", ""),
    "reductions": ("exposed reductions", "#44AA99", "xx"),
    "gathers": ("exposed gathers", "#88CCEE", "//"),
    "optimizer": ("optimizer", "#332288", ""),
}


# Per contender, the seconds of its step: the compute limit, and above it what is lost by cause
# (``zeropp.price.lost_time``).
StepSeconds = Mapping[str, Mapping[str, float]]


def time_breakdown(panels: Mapping[str, StepSeconds], name: str, caption: str) -> Picture:
    """One panel per title that has a contender, with one stacked bar per contender, the fastest
    first, in multiples of the step at the compute limit. Raises ValueError if no panel has any."""
    panels = {title: steps for title, steps in panels.items() if steps}
    if not panels:
        raise ValueError("time_breakdown: no panel has a contender")
    lines = [len(steps) + 1.0 for steps in panels.values()]
    height = 0.4 + 0.36 * sum(lines) / len(lines)
    figure, axes = style.panels(len(panels), columns=1, width=9.0, height=height, heights=lines)
    for axis, (title, seconds) in zip(axes, panels.items(), strict=True):
        _time_bars(axis, seconds)
        axis.set_title(title)
    axes[-1].set_xlabel("step, in multiples of the compute limit's (dashed)")
    style.legend(figure, axes)
    return Picture(name=name, caption=caption, figure=figure, shown=caption)


def _time_bars(axis: Axes, seconds: StepSeconds) -> None:
    steps = {name: sum(kinds.values()) / kinds["limit"] for name, kinds in seconds.items()}
    contenders = sorted(steps, key=steps.__getitem__)
    places = np.arange(len(contenders))
    right, left = np.zeros(len(contenders)), np.zeros(len(contenders))
    for kind, (label, colour, hatch) in _CAUSES.items():
        by_contender = (seconds[name] for name in contenders)
        sizes = np.array([kinds.get(kind, 0.0) / kinds["limit"] for kinds in by_contender])
        if not sizes.any():
            continue
        start = np.where(sizes >= 0, right, left)
        look: dict[str, Any] = {"label": label, "color": colour, "hatch": hatch}
        axis.barh(places, sizes, 0.75, start, **look, edgecolor="white", linewidth=0.4)
        right, left = right + np.maximum(sizes, 0), left + np.minimum(sizes, 0)
    for place, end, name in zip(places, right, contenders, strict=True):
        style.beside(axis, end, float(place), f"{100 / steps[name]:.0f} % of the limit", 4)
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_yticks(places, contenders, fontsize=8.5)
    axis.set_xlim(min(0.0, left.min()), 1.2 * right.max())
    axis.set_ylim(len(contenders) - 0.5, -0.5)
    axis.grid(visible=False)


# Paul Tol's "muted", with hatches, so that the stack is not mistaken for contenders.
_MEMORY = {
    "parameters": ("#332288", ""),
    "unsharded": ("#88CCEE", "//"),
    "gradients": ("#117733", ""),
    "optimizer": ("#DDCC77", ".."),
    "activations": ("#882255", ""),
    "workspace": ("#BBBBBB", "xx"),
}


def memory_breakdown(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """The fullest rank's bytes by kind, of configurations for which a plan predicts them or a trace
    counted them."""
    traced = rows[rows["evidence"].str.startswith("traced") & (rows["status"] == "ok")]
    traced = traced.drop_duplicates([*CELL, "contender"], keep="last")  # no step to choose by
    best = pd.concat([best_configuration(rows), traced])
    best = best[best["memory_by_kind"].map(len) > 0]
    planned = [sum(kinds.values()) / 2**30 for kinds in best["memory_by_kind"]]
    measured = best["peak_gib"].astype(float).where(best["memory_kind"] != "predicted")
    best = best.assign(planned_gib=planned, measured_gib=measured)
    best = best.assign(highest_gib=np.fmax(best["planned_gib"], measured))
    for suffix, evidence, group in by_evidence(best):
        kind = "Traced" if group["evidence"].iloc[0] == "traced" else "Predicted"
        panels, left_out = _drawn(group)
        drawn = pd.concat(panels)
        unit = display.memory_unit(drawn["highest_gib"])
        label = f"tensors of the fullest {display.worker_word(group)} [{unit.name}]"
        kinds = " or ".join(sorted(set(group["memory_kind"]) - {"predicted", ""}))
        diamond = f" The diamond is the measured peak ({kinds})." * bool(kinds)
        if "resident" in kinds:
            diamond += " Resident memory is pages of the whole process, so more than its tensors."
        limit = "; the dashed line is what the device has" * any(map(_shows_limit, panels))
        yield Picture(
            name=f"memory_by_kind_{suffix}",
            caption=f"{kind} memory of the fullest rank by kind and in all, tensors alone, for the "
            f"configurations {evidence}{limit}.{diamond}{left_out}",
            figure=_panels(
                panels, partial(_stacks, unit=unit), label, columns=2, width=6.0, height=3.8
            ),
            shown=style.shown(drawn) + left_out,
        )


def _shows_limit(panel: pd.DataFrame) -> bool:
    """Whether the device's memory is known, and not so far above all bars that its line would
    flatten them."""
    return float(panel["memory_limit_gib"].iloc[0]) < 3 * float(panel["highest_gib"].max())


def _stacks(axis: Axes, panel: pd.DataFrame, *, unit: display.Unit) -> None:
    order = style.ordered(panel["contender"])
    panel = panel.sort_values("contender", key=lambda names: names.map(order.index))
    panel = panel.sort_values("num_gpus", kind="stable")
    groups = panel["num_gpus"].rank(method="dense").to_numpy()
    places, bottom = np.arange(len(panel)) + 0.6 * groups, np.zeros(len(panel))
    for kind, (colour, hatch) in _MEMORY.items():
        sizes = np.array([kinds.get(kind, 0) / 2**30 for kinds in panel["memory_by_kind"]])
        if not sizes.any():
            continue
        word, heights = "gathered parameters" if kind == "unsharded" else kind, unit.scale * sizes
        look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white"}
        axis.bar(places, heights, 0.8, bottom, label=word, **look)
        bottom += heights
    predicted, measured = panel["planned_gib"].to_numpy(), panel["measured_gib"].to_numpy()
    if np.isfinite(measured).any():
        axis.plot(places, unit.scale * measured, "D", color="black", ms=4, label="measured peak")
    texts = [
        f"measured {unit.form(peak)}\npredicted {unit.form(top)}"
        if np.isfinite(peak)
        else unit.form(top)
        for top, peak in zip(predicted, measured, strict=True)
    ]
    turned = len(panel) > 6
    _totals(axis, places, unit.scale * panel["highest_gib"].to_numpy(), texts, turned=turned)
    _limit(axis, panel, unit)
    names = [
        f"{display.contender_label(str(r.contender))}, {r.num_gpus}" for r in panel.itertuples()
    ]
    axis.set_xticks(places, names, fontsize=8, rotation=90 if len(names) > 4 else 0)
    for label, contender in zip(axis.get_xticklabels(), panel["contender"], strict=True):
        label.set_color(style.colour(contender))
    axis.set_xlabel(f"contender, {display.worker_word(panel)}s")
    axis.margins(y=0.6 if turned and np.isfinite(measured).any() else 0.22)
    axis.set_ylim(bottom=0)


def _totals(
    axis: Axes, places: np.ndarray, heights: np.ndarray, texts: list[str], *, turned: bool
) -> None:
    """Write every stack's total and measured peak above both, with a background so that they can be
    read where the limit's line crosses them."""
    for place, height, text in zip(places, heights, texts, strict=True):
        number = axis.annotate(
            text,
            (place, height),
            (0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7.5,
            rotation=90 if turned else 0,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
        number.set_in_layout(False)


def _limit(axis: Axes, panel: pd.DataFrame, unit: display.Unit) -> None:
    """Draw a line at the device's memory, or say that it is not drawn; nothing where it is not
    known."""
    limit = float(panel["memory_limit_gib"].iloc[0])
    if np.isnan(limit):
        return
    if not _shows_limit(panel):
        axis.set_title(f"limit {limit:g} GiB, not shown", loc="right", fontsize=7, y=0.94)
        return
    axis.axhline(unit.scale * limit, color="black", linestyle="--", linewidth=1)
    axis.annotate(
        f"limit {limit:g} GiB",
        (1.0, unit.scale * limit),
        xycoords=axis.get_yaxis_transform(),
        ha="right",
        va="bottom",
        fontsize=8,
    )
