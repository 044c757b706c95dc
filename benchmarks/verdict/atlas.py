"""The atlas: every program's best plan over models, sequences, clusters, GPUs and batches, so that
a reader finds their own case. ``experiment=atlas``; the verdict's own cells are those of the paper.

``plans.csv`` has a line per cell and row of the comparison, and ``atlas.html`` shows them
(``benchmarks.report.atlas_page``). What one search has found is where those of the same model and
number of GPUs begin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from benchmarks.records.simulated import TABLE
from benchmarks.report.atlas_page import write_page
from benchmarks.report.display import cluster_label, model_label, program_label
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.ratio_errors import factor
from benchmarks.report.table import markdown_table
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import ATLAS
from benchmarks.verdict.cells import CELL, study_spec
from benchmarks.verdict.judge import TIE
from benchmarks.verdict.study import REFERENCE, simulate_cells

COMMITTED = REFERENCE / "atlas" / TABLE
_TOLERANCE = 0.02  # of the committed atlas: smaller differences are the search's own


def run(config: dict[str, Any]) -> int:
    """Write plans.csv and atlas.html into ``report_dir`` and print what they say. Rows that are in
    plans.csv are not searched again unless ``rerun=all``."""
    spec = study_spec("atlas", config["atlas"])
    if config["launcher"]["kind"] != "simulate":
        raise SpecError("launcher: study=atlas simulates (use launcher=simulate)")
    out = simulate_cells(
        config,
        spec,
        COMMITTED,
        parts=lambda _: [(name, "best") for name in ATLAS],
        near=lambda cell: (cell.task.shape.name, cell.task.num_gpus),
    )
    console = Console()
    left_out = write_page(latest_ok(load_frame([out / TABLE])[0]), out / "atlas.html")
    for name in ("first", "need"):
        console.print(atlas_tables(pd.read_csv(out / TABLE))[name], markup=False)
    console.print(f"Written to {out}: {TABLE}{'' if left_out else ', atlas.html'}", markup=False)
    if left_out:
        console.print(left_out, markup=False)
    return 0


def atlas_tables(plans: pd.DataFrame) -> dict[str, str]:
    """The tables of the pages, by name, from the rows of ``plans.csv``: ``brief`` (of README),
    ``first`` (who is fastest), ``need`` (of tensor parallelism, by model) and ``moves`` (how that
    changes with batch, GPUs and network); and the numbers of their sentences."""
    speed = plans.pivot(index=CELL, columns="contender", values="tokens_per_s_per_gpu")
    words = plans.pivot(index=CELL, columns="contender", values="plan")
    has_tp = words.apply(lambda column: column.str.contains(r"(?<!\S)tp=", na=False))
    of_program = speed[[*ATLAS]].T.groupby(program_label, sort=False).max().T
    without = speed.where(~has_tp)
    cells = pd.DataFrame(
        {
            "without": without.max(axis=1),
            "without_fsdp": without.drop(columns="megatron_fsdp").max(axis=1),
            "fastest": speed.max(axis=1),
            "fastest_fsdp": speed.drop(columns="megatron_fsdp").max(axis=1),
            "over_core": speed["zeropp"] / speed["megatron_core"],
            "over_fsdp": speed["zeropp"] / speed["fsdp"],
            "core_tp1": speed["megatron_core_tp1"] / speed["megatron_core"],
        }
    )
    cells = cells[cells["fastest"].notna()].reset_index()
    for name in ("without", "without_fsdp"):  # 0: nothing without tensor parallelism fits
        cells[name] = cells[name].fillna(0.0) / cells[name.replace("without", "fastest")]
    cells["sequences"] = cells["global_batch"] // cells["num_gpus"]
    core, reach = cells["core_tp1"].dropna(), factor(one_program=False)
    numbers = {
        "cells": f"{len(cells)}",
        "without_fits": f"{(cells['without'] > 0).sum()}",
        "factor": f"{reach:.2f}",
        "slower": f"{(cells['without'] < 1 / reach).sum()}",
        "core": f"{core.median():.2f}",
        "core_slower": f"{(core < 1 / factor(one_program=True)).sum()}",
    }
    for name in ("without", "without_fsdp"):  # less than the search's tolerance is no loss
        needed = cells[name][cells[name] < 1 / (1 + _TOLERANCE)]
        numbers[f"{name}_slower"] = f"{len(needed)}"
        numbers[f"{name}_median"] = f"{needed.median():.2f}"
        numbers[f"{name}_lowest"] = f"{needed.min():.2f}"
    return numbers | {
        "brief": _brief(cells),
        "first": _first(of_program),
        "need": _need(cells),
        "moves": _moves(cells),
    }


def _first(of_program: pd.DataFrame) -> str:
    """In how many cells every program is the fastest, and by how much."""
    of_program = of_program[of_program.notna().any(axis=1)]
    winner, ranked = of_program.idxmax(axis=1), np.sort(of_program.fillna(0.0).to_numpy(), axis=1)
    with np.errstate(divide="ignore"):
        margin = pd.Series(ranked[:, -1] / ranked[:, -2], of_program.index)
    limits, lines = (1 + TIE, factor(one_program=False)), []
    for label in of_program:
        own = margin[winner == label]
        counts = [len(own), *((own > limit).sum() for limit in limits)]
        fits = f"{of_program[label].notna().sum()}"
        lines.append([str(label), *(f"{n / len(margin):.0%}" for n in counts), fits])
    heads = ["fastest of all programs", f"in how many of {len(margin)} cells"]
    heads += [f"by more than {limit - 1:.0%}" for limit in limits]
    return markdown_table([*heads, "cells in which it fits"], lines)


def _brief(cells: pd.DataFrame) -> str:
    """Per model, the speed without tensor parallelism over that with it: of all programs, and of
    Megatron-Core alone; the median, and the lowest in brackets."""
    lines = []
    for name, of in cells.groupby("model", sort=False):
        ratios = [of["without"], of["without_fsdp"], of["core_tp1"].fillna(0.0)]
        shares = [f"{ratio.median():.2f} ({ratio.min():.2f})" for ratio in ratios]
        lines.append([model_label(str(name)), str(len(of)), *shares])
    errors = [f"± {factor(one_program=one) - 1:.0%}" for one in (False, True)]
    heads = ["model", "cases", f"all programs ({errors[0]})", "all but Megatron-FSDP"]
    return markdown_table([*heads, f"Megatron-Core alone ({errors[1]})"], lines)


def _need(cells: pd.DataFrame) -> str:
    """Per model, in how many cells tensor parallelism is needed, for memory or for speed."""
    reach, lines = factor(one_program=False), []
    for name, of in cells.groupby("model", sort=False):
        ratio = of["without"]
        limits = (1 + _TOLERANCE, 1 + TIE, reach)
        counts = [(ratio == 0).sum(), *((ratio < 1 / limit).sum() for limit in limits)]
        shares = [f"{ratio.median():.2f}", f"{ratio.min():.2f}"]
        lines.append([model_label(str(name)), *map(str, [len(of), *counts]), *shares])
    heads = ["model", "cells", "nothing without TP fits"]
    heads += [f"TP faster by more than {limit:.0%}" for limit in (_TOLERANCE, TIE, reach - 1)]
    return markdown_table([*heads, "fastest without TP over fastest: median", "lowest"], lines)


def _moves(cells: pd.DataFrame) -> str:
    """The medians of three ratios by sequences per GPU, number of GPUs, cluster and network."""
    network = cells["cluster"].map(cluster_label) + cells["bandwidth"].map(
        lambda share: "" if share == 1 else f", {share:g} of its network"
    )
    groups = {
        "sequences per GPU": cells["sequences"],
        "GPUs": cells["num_gpus"],
        "cluster": network,
    }
    lines = []
    for words, keys in groups.items():
        for key, of in cells.groupby(keys, sort=words != "cluster"):
            medians = [
                of[name].median() for name in ("without", "core_tp1", "over_core", "over_fsdp")
            ]
            shown = f"{key:,}" if isinstance(key, int) else str(key)
            lines.append([words, shown, str(len(of)), *(f"{ratio:.2f}" for ratio in medians)])
    heads = [
        "by",
        "",
        "cells",
        "fastest without TP over fastest",
        "Megatron-Core without over with",
    ]
    return markdown_table([*heads, "ZeroPP over Megatron-Core", "ZeroPP over FSDP2"], lines)
