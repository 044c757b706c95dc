"""Compares two sets of runs: which configurations became faster or slower beyond noise.

The sets may be of two commits, two clusters, two machines, or measured in two ways. Configurations
are matched by everything but what says where and how they were measured and is the same within
either set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from benchmarks.records.samples import ratio_of_medians
from benchmarks.report import display
from benchmarks.report.display import varied
from benchmarks.report.frame import CELL, KEPT_APART, latest_ok, load_frame
from benchmarks.report.table import Column, Table, key_columns, print_table, table, write_table
from benchmarks.report.write import report_folder

LEAST_CHANGE = 0.02  # a smaller change is not reported, however narrow its interval
_MOST_KEYS = 3  # that are named where nothing can be compared
# How settings of place and method begin.
_PLACE = ("cluster", "machine.", "environment.", "measure.", "seed")


@dataclass(frozen=True)
class Comparison:
    """The files that were written, and of every configuration why it became worse, if it did."""

    files: list[Path]
    worse: dict[str, str]


def write_comparison(
    before: Sequence[Path],
    after: Sequence[Path],
    out: Path,
    console: Console | None = None,
    slower: float | None = None,
) -> Comparison:
    """Print and write the comparison table; ``slower`` is the loss of speed from
    which a configuration counts as worse. No file is written if the sets have no configuration in
    common."""
    console = console or Console()
    frames = []
    for roots in (before, after):
        frame, skipped = load_frame(roots)
        frames.append(latest_ok(frame))
        for line in skipped:
            console.print(f"skipped {line}", markup=False)
    changes = compare(*frames)
    if changes.empty:
        why = f"the two sets have no configuration in common{_what_differs(*frames)}"
        console.print(why)
        return Comparison([], {"all": why})
    made = comparison_table(changes)
    print_table(made, console)
    counts = changes["verdict"].str.split(":").str[0].value_counts()
    console.print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    with report_folder(out) as folder:
        names = [path.name for path in write_table(made, [made.grid()], folder)]
    worse = {
        f"{row['model']}, {row['num_gpus']} GPUs, batch {row['global_batch']}, {row['precision']}"
        f"{display.setting_words(row, varied(changes))}, {row['contender']} {row['layout']}"
        f"{', ' * ('cluster' in row)}{row.get('cluster', '')}, {row['evidence']} {row['basis']}": (
            why_worse(row, slower)
        )
        for row in changes.to_dict("records")
    }
    for label, why in worse.items():
        if why:
            console.print(f"worse: {label}: {why}", markup=False, soft_wrap=True)
    return Comparison([out / name for name in names], worse)


def why_worse(change: Mapping[Any, Any], slower: float | None = None) -> str:
    """Why a row of ``compare`` became worse, in a few words: it is gone or no longer ends ok, or it
    is slower beyond noise, by more than the share ``slower``, if that is given. Where samples
    spread much, the loss must be larger than their spread. Empty if it did not."""
    verdict, loss = change["verdict"], 1.0 - change["ratio"]
    if change["was"] == "ok" and verdict == "only before":
        return "is gone"
    if verdict.startswith("ok -> "):
        return str(verdict)
    noisy = verdict.startswith("unsettled: spread") and loss > change["spread"]
    is_slower = verdict == "slower" or (noisy and change["high"] < 1.0)
    return f"{100 * loss:.0f} % slower" if is_slower and loss >= (slower or 0.0) else ""


def compare(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration of either set: ``ratio`` of the throughput after to that before,
    with its interval, ``memory_ratio``, and ``verdict`` in words."""
    if before.empty or after.empty:
        return pd.DataFrame()
    left_out, different = _between(before, after)
    old, new = (
        {_key(row, left_out): row for row in frame.to_dict("records")} for frame in (before, after)
    )
    apart = {*KEPT_APART, *different}
    shown = [key for key in ("contender", "layout", *CELL) if key not in apart]
    told = [*dict.fromkeys([*varied(before), *varied(after)])]
    if not old.keys() & new.keys():
        return pd.DataFrame()
    lines = []
    for key in sorted(old.keys() | new.keys()):
        first, last = old.get(key), new.get(key)
        either = first or last
        assert either is not None
        line = {name: either[name] for name in shown}
        line |= {name: either["settings"].get(name) for name in told if name not in different}
        line |= {"on_cpu": either["on_cpu"], "default_degrees": False, "ratio": np.nan}
        line |= {"memory_ratio": np.nan, "was": first["status"] if first else ""}
        if first is None or last is None:
            line["verdict"] = "only before" if last is None else "only after"
        else:
            line |= _change(first, last)
        lines.append(line)
    return pd.DataFrame(lines)


def _between(before: pd.DataFrame, after: pd.DataFrame) -> tuple[set[str], set[str]]:
    """(the settings that say where or how something was measured and have one value within either
    set, those of them whose values differ): configurations need not agree in them."""
    sets = [list(frame["settings"]) for frame in (before, after)]
    left_out, different = {"machine", "environment"}, set[str]()
    for key in {key for settings in sets for words in settings for key in words}:
        first, last = ({words[key] for words in of if key in words} for of in sets)
        if key.startswith(_PLACE) and max(len(first), len(last)) == 1:
            left_out.add(key)
            different |= {key} if first != last else set()
    return left_out, different


def _what_differs(before: pd.DataFrame, after: pd.DataFrame) -> str:
    """The first keys without a value that two sets share, in words."""
    if before.empty or after.empty:
        return ": one has no records"
    sets = [[*frame["settings"]] for frame in (before, after)]
    apart = ""
    for key in dict.fromkeys(key for of in sets for words in of for key in words):
        first, last = ({words.get(key, "none") for words in of} for of in sets)
        is_place = key.startswith(("machine", "environment", *_PLACE))
        if not (first & last or is_place or apart.count(";") == _MOST_KEYS):
            apart += f"; {key} is {' or '.join(sorted(first))}, and {' or '.join(sorted(last))}"
    return apart


def _key(row: Mapping[Any, Any], left_out: set[str]) -> tuple[str, ...]:
    settings = {k: v for k, v in row["settings"].items() if k not in left_out}
    named = ("evidence", "basis", "contender", "layout", "configuration")
    return json.dumps(settings, sort_keys=True), *(str(row[name]) for name in named)


def _change(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {}
    if old["memory_kind"] == new["memory_kind"] and pd.notna(old["peak_gib"]):
        line["memory_ratio"] = new["peak_gib"] / old["peak_gib"]
    if old["status"] != "ok" or new["status"] != "ok":
        same = old["status"] == new["status"]
        return line | {"verdict": old["status"] if same else f"{old['status']} -> {new['status']}"}
    ratio = ratio_of_medians(old["samples_step_s"], new["samples_step_s"])
    line |= {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "spread": ratio.spread}
    if new["evidence"] == "measured" and ratio.doubt:
        verdict = f"unsettled: {ratio.doubt}"
    elif ratio.low <= 1.0 <= ratio.high or abs(ratio.median - 1.0) < LEAST_CHANGE:
        verdict = "no difference shown"
    else:
        verdict = "faster" if ratio.median > 1.0 else "slower"
    return line | {"verdict": verdict}


def comparison_table(changes: pd.DataFrame) -> Table:
    """The table of changes: those of status first, then the largest, and last the configurations
    that one set lacks."""
    size = pd.Series(np.log(changes["ratio"].astype(float))).abs().fillna(np.inf)
    size[changes["verdict"].str.startswith("only ")] = -1.0
    changes = changes.loc[size.sort_values(ascending=False, kind="stable").index]
    columns = (
        *(column for column in key_columns(changes) if column.name in changes),
        Column("layout", "configuration"),
        Column("ratio", "throughput after / before", form=display.ratio, interval=True),
        Column("memory_ratio", "peak memory after / before", form=display.ratio),
        Column("verdict", "verdict"),
    )
    return table("comparison", "After against before", columns, changes)
