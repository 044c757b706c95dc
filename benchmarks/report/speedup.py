"""Speed-ups in one cell: of two contenders, as numbers, a table, maps and sentences, and of two
configurations of one contender (ablations), as a table and figures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure

from benchmarks.records.samples import ratio_of_medians
from benchmarks.report import DEFAULTS, Options, display, style
from benchmarks.report.charts import Picture, by_evidence
from benchmarks.report.frame import (
    CELL,
    best_configuration,
    best_or_failed,
    default_knobs,
    ranges,
    ratio_of_repeats,
)
from benchmarks.report.table import MISSING, Column, Table, key_columns, table
from benchmarks.specification import SpecError

SPEEDUP = Column("speedup", "speed-up", form=display.ratio, interval=True, unsettled=True)
SUBJECT = "zeropp"  # the contender that the suite is about: its columns come first
MAX_LINES = 16  # of a map, or bars of a figure with several panels; the table has all
_LABEL_LETTERS, _TITLE_LETTERS = 40, 52  # of a line of a label and of a title of a panel
_PAIR = [
    *("speedup", "speedup_low", "speedup_high", "speedup_unsettled", "memory_ratio"),
    *("base_record", "base_status"),
]
_DIVERGING = LinearSegmentedColormap.from_list("speedup", [style.WARM, "#f7f7f7", style.COOL])


def speedup_of(row: Mapping[Any, Any], base: Mapping[Any, Any]) -> dict[str, Any]:
    """The ``speedup`` of a row over its base, with ``speedup_low`` and ``speedup_high`` if both
    were measured; ``speedup_unsettled`` has the reasons for doubt; the base itself has
    none. ``memory_ratio`` is known where both peaks are of the same kind."""
    same_kind = row["memory_kind"] == base["memory_kind"]
    fields = {
        **dict.fromkeys(("speedup", "speedup_low", "speedup_high"), math.nan),
        "speedup_unsettled": "",
        "memory_ratio": row["peak_gib"] / base["peak_gib"] if same_kind else math.nan,
    }
    if not row["samples_step_s"] or not base["samples_step_s"]:
        return fields
    if row["record_id"] == base["record_id"]:
        return fields | {"speedup": 1.0}
    if max(row["runs"], base["runs"]) > 1:
        ratio = ratio_of_repeats(base, row)
    else:
        ratio = ratio_of_medians(base["samples_step_s"], row["samples_step_s"])
    fields["speedup"] = ratio.median
    if row["evidence"] == "measured":
        fields |= {"speedup_low": ratio.low, "speedup_high": ratio.high}
        if not ratio.agrees:
            includes = "interval includes 1" if ratio.low <= 1.0 <= ratio.high else ""
            fields["speedup_unsettled"] = ", ".join(filter(None, (ratio.doubt, includes)))
    return fields


def over_bases(
    rows: Sequence[dict[Any, Any]], bases: Sequence[Mapping[Any, Any]], keys: Sequence[str]
) -> list[dict[Any, Any]]:
    """The rows with the fields of ``speedup_of`` over the base that has the same ``keys``, and with
    ``base_record`` and ``base_status``; missing where no base has them."""
    by_key = {tuple(base[key] for key in keys): base for base in bases}
    lines = []
    for row in rows:
        base = by_key.get(tuple(row[key] for key in keys), {})
        named = {"base_record": base.get("record_id"), "base_status": base.get("status")}
        none = {"speedup": math.nan, "speedup_unsettled": ""}
        lines.append(row | named | (speedup_of(row, base) if base else none))
    return lines


def with_speedups(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """``over_bases`` of the fastest configuration of the contender ``base`` in the same cell."""
    fastest = best_or_failed(rows[rows["contender"] == base]).to_dict("records")
    lines = over_bases(rows.to_dict("records"), fastest, CELL)
    return pd.DataFrame(lines, columns=None if lines else [*rows.columns, *_PAIR])


def paired_speedups(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """One row per cell and contender except for the base, each in its fastest configuration, as
    ``with_speedups`` makes it; of its ``records`` the base's is the last."""
    compared = with_speedups(best_configuration(rows), base)
    pairs = compared[(compared["contender"] != base) & compared["base_record"].notna()]
    return pairs.assign(records=pairs["record_id"] + " " + pairs["base_record"])


def speedup_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of speed-ups of each contender's fastest configuration over the base's in the same
    cell, with the median of cells per kind of evidence and cluster."""
    pairs = paired_speedups(rows, options.base)
    columns = (
        *key_columns(rows),
        SPEEDUP,
        Column("memory_ratio", "peak memory ratio", form=display.ratio),
        Column("note", "note"),
    )
    over = display.contender_label(options.base)
    caption = f"Each contender's fastest configuration over the fastest of {over} in the same cell."
    grouped = pairs.groupby(["evidence", "basis", "cluster", "contender"], sort=True)
    medians = [_median_of(group) for _, group in grouped if len(group) > 1]
    notes = [f"unsettled: {why}" * bool(why) for why in pairs["speedup_unsettled"]]
    pairs = pairs.assign(note=notes)
    data = pd.concat([pairs, pd.DataFrame(medians)]) if medians else pairs
    return table("speedup", f"Speed-up over {over}", columns, data, caption=caption)


def _median_of(group: pd.DataFrame) -> dict[str, object]:
    speedups, unsettled = group["speedup"].astype(float), group["speedup_unsettled"].ne("").sum()
    note = f"{display.ratio(speedups.min())} to {display.ratio(speedups.max())}"
    same = {key: group[key].iloc[0] for key in ("evidence", "basis", "cluster", "contender")}
    return same | {
        "records": "",
        "model": f"median of {len(group)} cells",
        "speedup": speedups.median(),
        "speedup_unsettled": "",
        "note": note + f", {unsettled} of them unsettled" * bool(unsettled),
    }


def speedup_maps(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """Throughput divided by the base's, for models and GPU counts: a map of ZeroPP, or one of each
    of ``options.contenders``. Cells in which either of the two failed say so."""
    over = display.contender_label(options.base)
    compared = with_speedups(best_or_failed(rows), options.base)
    compared = compared[(compared["contender"] != options.base) & compared["base_record"].notna()]
    failed = (compared["status"] != "ok") | (compared["base_status"] != "ok")
    texts = [_cell_text(row, over) for row in compared.to_dict("records")]
    compared = compared.assign(text=texts)[compared["speedup"].notna() | failed]
    timed = compared[compared["speedup"].notna()]
    drawn = {*(options.contenders or [SUBJECT])}
    for suffix, evidence, group in by_evidence(timed):
        reach = max(0.1, float(np.abs(np.log2(group["speedup"].to_numpy(dtype=float))).max()))
        for contender in style.ordered(drawn.intersection(group["contender"])):
            label = display.contender_label(contender)
            contender_rows = group[group["contender"] == contender]
            kinds = ["evidence", "basis", "cluster", "contender"]
            shown = compared.merge(contender_rows[kinds].drop_duplicates(), on=kinds)
            doubts = ""
            if contender_rows["evidence"].iloc[0] == "measured":
                legend = display.unsettled(contender_rows["speedup_unsettled"])
                doubts = f"; {ranges(contender_rows)}" + f". {legend}" * bool(legend)
            yield Picture(
                name=f"speedup_{contender}_{suffix}",
                caption=f"Throughput of {label} over {over} in the same cell, {evidence}. Above 1 "
                f"{label} is faster{doubts}.",
                figure=_map(shown, f"{label} over {over}", reach),
                shown=style.shown(contender_rows),
            )


def _cell_text(row: Mapping[Any, Any], over: str) -> str:
    """The ratio with its interval, or which of the two failed and how."""
    if row["status"] != "ok":
        return display.status_label(row["status"])
    if row["base_status"] != "ok":
        return f"{over}\n{display.status_label(row['base_status'])}"
    number = "~" * bool(row["speedup_unsettled"]) + display.ratio(row["speedup"])
    low, high = row["speedup_low"], row["speedup_high"]
    return number if np.isnan(low) else f"{number}\n[{display.ratio(low)}, {display.ratio(high)}]"


def _map(rows: pd.DataFrame, title: str, reach: float) -> Figure:
    """Draw one map. ``reach`` is the logarithm (base 2) of the ratio at the ends of the colour
    scale, which is the same for all contenders."""
    table = rows.sort_values(["parameters", "model", "global_batch"], kind="stable")
    names = table["model"].map(display.model_label)
    apart = display.told_apart(table)
    settings = [display.setting_words(r, apart) for r in table.to_dict("records")]
    whole = names + ", batch " + table["global_batch"].astype(str) + settings
    table = table.assign(line=[textwrap.fill(text, _LABEL_LETTERS) for text in whole])
    table = table.drop_duplicates(["line", "num_gpus"], keep="last")
    lines = table["line"].unique()[:MAX_LINES]
    values, texts = (
        table.pivot(index="line", columns="num_gpus", values=name).reindex(lines)
        for name in ("speedup", "text")
    )
    parts = [line.split("\n") for line in lines]
    wide, high = (max(map(len, (p for of in parts for p in of))), max(map(len, parts)))
    size = (1.3 + 0.075 * wide + 0.95 * values.shape[1], 1.2 + max(0.48, 0.2 * high) * len(lines))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    norm = TwoSlopeNorm(0.0, -reach, reach)
    logs = np.log2(values.to_numpy(dtype=float))
    image = axis.imshow(logs, cmap=_DIVERGING, norm=norm, aspect="auto")
    axis.set_facecolor("#e4e4e4")  # cells that failed
    for (i, j), text in np.ndenumerate(texts.to_numpy()):
        if isinstance(text, str):
            ink = "white" if abs(logs[i, j]) > 0.6 * reach else "black"
            drawn = axis.text(j, i, text, ha="center", va="center", fontsize=8.5, color=ink)
            drawn.set_in_layout(False)
    axis.set_xticks(range(values.shape[1]), [str(count) for count in values.columns])
    axis.set_yticks(range(values.shape[0]), list(values.index))
    axis.set_xlabel(f"{display.worker_word(rows)}s")
    figure.suptitle(title)  # over the whole figure, which is wider than a map of few cells
    axis.grid(False)
    bar = figure.colorbar(image, ax=axis, format=lambda x, _: f"{2**x:.2f}")
    bar.set_label("speed-up")
    return figure


_HEADLINE = ("model", "num_gpus", "cluster", "global_batch", "precision")


def headline_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """One row per cell and configuration: throughput, MFU, peak, speed-up over the base's fastest,
    or what the options choose of the paper's table.

    ``rows`` are those of ``latest_ok``, and ``ranges`` says what their ranges are.
    """
    options = options.over(rows)
    compared = with_speedups(rows, options.base)
    worker, memory = display.worker_word(rows), display.memory_unit(rows["peak_gib"])
    flops, chosen = display.flops_unit(rows["model_tflops_per_gpu"]), options.columns
    metrics = [
        Column("tokens_per_s_per_gpu", f"tokens/s/{worker}", form=display.tokens),
        *[Column("model_tflops_per_gpu", flops.name, form=flops.form)] * bool(chosen),
        Column("mfu", "MFU", form=display.share),
        Column("peak_gib", memory.name, form=memory.form),
        SPEEDUP,
    ]
    first, *others = metrics = [c for c in metrics if not chosen or c.name in chosen]
    if options.contenders:
        compared = compared[compared["contender"].isin(options.contenders)]
    keys = {column.name: column for column in key_columns(rows)}
    has_several = (rows.groupby("model")["seq"].nunique() > 1).any()
    settings = ["seq"] * bool(has_several) + display.varied(rows)
    columns = (
        *(keys[name] for name in (*_HEADLINE, *settings, "evidence", "basis")),
        Column("contender", "contender"),
        Column("layout", "configuration"),
        replace(first, instead="status"),
        *others,
    )
    has_speedups = SPEEDUP in metrics and bool(compared["speedup"].notna().any())
    over = f"Speed-up over {display.contender_label(options.base)}. " * has_speedups
    peak = f"{memory.name}: peak of the fullest {worker}."
    caption = (over + peak * any(c.name == "peak_gib" for c in metrics)).strip()
    if (runs := rows.loc[rows["runs"] > 1, "runs"]).size:
        caption += f" Medians over {runs.min()} runs or more; {ranges(rows)}."
    if untuned := dict.fromkeys(rows[rows["default_degrees"].eq(True)]["contender"]):
        caption += f" Default degrees: {', '.join(map(display.contender_label, untuned))}."
    return table("headline", "Comparison", columns, compared, caption=caption)


def answers(rows: pd.DataFrame) -> list[str]:
    """What these records show for ZeroPP: per kind of evidence, basis of comparison and cluster a
    sentence on the strongest other contender, and one on the rest."""
    others = [name for name in style.ordered(rows["contender"]) if name != SUBJECT]
    paired = [paired_speedups(rows[rows["contender"].isin((SUBJECT, o))], o) for o in others]
    pairs = pd.concat([p.assign(over=o) for p, o in zip(paired, others, strict=True)] or [rows[:0]])
    if pairs.empty:
        return ["No cell of these records has both ZeroPP and another contender: no speed-up."]
    return [_answer(group) for _, group in pairs.groupby(["evidence", "basis", "cluster"])]


def _answer(pairs: pd.DataFrame) -> str:
    evidence, basis, cluster = (str(pairs[key].iloc[0]) for key in ("evidence", "basis", "cluster"))
    where = f"{', '.join(filter(None, (evidence.capitalize(), basis)))} on "
    where += display.cluster_label(cluster)
    if pairs["on_cpu"].all():
        where += ", which says nothing about GPUs"
    if pairs["default_degrees"].eq(True).any():
        where += ", default degrees"
    by_contender = [cells for _, cells in pairs.groupby("over")]
    first, *rest = sorted(by_contender, key=lambda cells: cells["speedup"].median())
    over = display.contender_label(first["over"].iloc[0])
    middle = display.ratio(float(first["speedup"].median()))
    sentence = f"{where}: ZeroPP trains {middle} times as fast as {over} {_cells(first)}"
    if (ratios := first["memory_ratio"].dropna()).size:
        low, high = display.ratio(ratios.min()), display.ratio(ratios.max())
        sentence += f", at {low if low == high else f'{low} to {high}'} times its peak memory"
    sentence += "."
    if rest:
        words = [
            f"{display.contender_label(cells['over'].iloc[0])} "
            f"{display.ratio(cells['speedup'].median())}"
            for cells in rest
        ]
        sentence += f" Over the others, in the median: {', '.join(words)}."
    return sentence


def _cells(pairs: pd.DataFrame) -> str:
    """The cells behind a median speed-up, with their range and how many are unsettled."""
    doubts = [why for why in pairs["speedup_unsettled"] if why]
    if len(pairs) == 1:
        return "in one cell" + "".join(f" (unsettled: {why})" for why in doubts)
    low, high = display.ratio(pairs["speedup"].min()), display.ratio(pairs["speedup"].max())
    more = f", {len(doubts)} of them unsettled" * bool(doubts)
    return f"in the median of {len(pairs)} cells ({low} to {high}{more})"


# Ablations: where a contender ran in several configurations of one cell, every knob that differs
# between them is a factor, and one of them is the base of the others' speed-ups.
_GROUP = [*CELL, "contender"]


def ablations(rows: pd.DataFrame, against: Mapping[str, str]) -> pd.DataFrame:
    """One row per configuration, slow ones too, for every contender and cell with several of them,
    the base first.

    Columns are those of ``rows`` and of ``over_bases``, ``change`` (in words), ``is_base`` and
    ``knobs_text``. ``against`` gives knobs of the base, such as ``{"unit": "8"}``; if it is empty
    the base is the configuration that differs least from the contender's defaults. Raises SpecError
    if no configuration has those knobs.
    """
    groups: dict[tuple[Any, ...], list[dict[Any, Any]]] = {}
    for row in rows[rows.duplicated(_GROUP, keep=False)].to_dict("records"):
        groups.setdefault(tuple(row[key] for key in _GROUP), []).append(row)
    lines: list[dict[Any, Any]] = []
    for members in groups.values():
        base = _base(members, against)
        if base is None or not any(member["knobs"] for member in members):
            continue
        changed = over_bases(members, [base], _GROUP)
        for line in changed:
            knobs, plain = line["knobs"], base["knobs"]
            changes = [
                f"{name} {plain.get(name)} → {knobs.get(name)}"
                for name in dict.fromkeys([*plain, *knobs])
                if knobs.get(name) != plain.get(name)
            ]
            line["change"] = ", ".join(changes) or "base"
            line["is_base"] = line["record_id"] == base["record_id"]
            line["knobs_text"] = " ".join(f"{k}={v}" for k, v in knobs.items())
        lines += sorted(changed, key=lambda line: (not line["is_base"], line["change"].count("→")))
    if against and not lines:
        asked = " ".join(f"{k}={v}" for k, v in against.items())
        values: dict[str, dict[str, None]] = {}
        for member in chain.from_iterable(groups.values()):
            for name, value in member["knobs"].items():
                values.setdefault(name, {})[str(value)] = None
        varied = [f"{name} {'|'.join(texts)}" for name, texts in values.items() if len(texts) > 1]
        there = f"there are {', '.join(varied)}" if varied else "nothing was varied"
        raise SpecError(f"--against {asked}: no configuration has these knobs; {there}")
    return pd.DataFrame(lines, columns=None if lines else [*rows.columns, *_PAIR, "change"])


def _base(members: list[dict[Any, Any]], against: Mapping[str, str]) -> dict[Any, Any] | None:
    """The member that the others are compared with, among those with the knobs of ``against``: a
    success rather than a failure, then the one that differs least from the contender's defaults.
    None if no member has the knobs."""
    fine = [
        member
        for member in members  # a unit that the planner cut counts as what was asked
        if all(
            str(member["knobs"].get(name)).split(" (")[0].lower() == value.lower()
            for name, value in against.items()
        )
    ]
    plain = default_knobs(members[0]["contender"])

    def distance(member: dict[Any, Any]) -> tuple[bool, int]:
        knobs = member["knobs"]
        apart = sum(knobs[name] not in ("auto", plain.get(name, knobs[name])) for name in knobs)
        return member["status"] != "ok", apart

    return min(fine, key=distance, default=None)


def ablation_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of ablations: throughput, speed-up and memory of every configuration and its
    base."""
    configurations = ablations(rows, options.against)
    worker, memory = display.worker_word(rows), display.memory_unit(configurations["peak_gib"])
    columns = (
        *(column for column in key_columns(rows) if column.name != "basis"),
        Column("change", "change"),
        Column("layout", "configuration"),
        Column("step_s", "step [s]", form=display.seconds, interval=True, instead="status"),
        Column("tokens_per_s_per_gpu", f"tokens/s/{worker}", form=display.tokens, interval=True),
        replace(SPEEDUP, head="over the base"),
        Column("peak_gib", f"peak [{memory.name}]", form=memory.form),
        Column("memory_ratio", "peak over the base's", form=display.ratio),
        Column("reason", "note"),
        Column("is_base", "is the base", hidden=True),
        Column("knobs_text", "knobs", hidden=True),
        Column("status", "status", hidden=True),
    )
    caption = "Every configuration that was run, against the one called base in the same cell."
    return table("ablation", "Ablations", columns, configurations, caption=caption)


def ablation_figure(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """Throughput and peak memory of every configuration, divided by the base's: one row of panels
    per contender and cell."""
    clusters = ablations(rows, options.against).groupby(["evidence", "cluster"], sort=True)
    for (evidence, cluster), cluster_rows in clusters:
        groups = [group for _, group in cluster_rows.groupby(_GROUP, sort=False)]
        bars = accumulate(len(group) + 1 for group in groups)  # and the room of a title
        drawn = groups[: max(1, sum(count <= MAX_LINES for count in bars))]
        more = len(groups) - len(drawn)
        yield Picture(
            name=f"ablation_{evidence}_{cluster}".replace(" ", "_"),
            caption="Throughput and peak memory of every configuration over those of its base, "
            f"{evidence} on {display.cluster_label(str(cluster))}."
            + (f" The table has {more} more groups." if more else ""),
            figure=_panels(drawn),
            shown=style.shown(pd.concat(drawn)),
        )


def _panels(groups: list[pd.DataFrame]) -> Figure:
    changes = [[textwrap.fill(change, _LABEL_LETTERS) for change in of["change"]] for of in groups]
    lines = [max(change.count("\n") + 1 for change in of) for of in changes]
    heights = [max(0.3, 0.15 * n) * len(of) + 0.45 for n, of in zip(lines, groups, strict=True)]
    drawn = pd.concat(groups)
    memory, apart = display.memory_unit(drawn["peak_gib"]), display.told_apart(drawn)
    mean = sum(heights) / len(heights) + 0.4
    figure, axes = style.panels(2 * len(groups), 2, width=5.6, height=mean, heights=heights)
    for number, group in enumerate(groups):
        left, right = axes[2 * number : 2 * number + 2]
        _bars(left, group=group, ratio="speedup", value="tokens_per_s_per_gpu", form=display.tokens)
        _bars(right, group=group, ratio="memory_ratio", value="peak_gib", form=memory.form)
        first = group.iloc[0]
        title = (
            f"{display.contender_label(first['contender'])}, "
            f"{display.model_label(first['model'])}, "
            f"{first['num_gpus']} {display.worker_word(group)}s, batch {first['global_batch']}"
        )
        title = textwrap.fill(title + display.setting_words(first, apart), _TITLE_LETTERS)
        left.set_title(title, loc="left")
        left.set_yticks(range(len(group)), changes[number], fontsize=8)
        right.set_yticks(range(len(group)), [])
    axes[-2].set_xlabel("throughput over the base's (tokens/s each)")
    axes[-1].set_xlabel(f"peak memory over the base's ({memory.name})")
    return figure


def _bars(axis: Axes, *, group: pd.DataFrame, ratio: str, value: str, form: display.Form) -> None:
    places = range(len(group))
    ratios = group[ratio].to_numpy(dtype=float)
    colours = [
        style.NEUTRAL if base else style.colour(group["contender"].iloc[0])
        for base in group["is_base"]
    ]
    axis.barh(list(places), np.nan_to_num(ratios), 0.7, color=colours)
    for place, row in zip(places, group.to_dict("records"), strict=True):
        number = row[ratio]
        failed = row["status"] != "ok"
        text = display.status_label(row["status"]) if failed else MISSING
        if not display.is_missing(number) and not failed:
            text = f"{display.ratio(number)}  ({form(row[value])})"
        axis.text(
            0 if failed or display.is_missing(number) else number,
            place,
            f" {text}",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0},  # over the line of 1
        )
    axis.invert_yaxis()
    axis.axvline(1.0, color="#333333", linewidth=0.8)
    axis.margins(x=0.35)
    axis.set_xlim(left=0)
    axis.grid(visible=False)
