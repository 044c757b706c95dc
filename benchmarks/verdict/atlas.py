"""The atlas: every program's best plan over models, sequences, clusters, GPUs and batches, so that
a reader finds their own case. ``experiment=atlas``; the verdict's own cells are those of the paper.

``plans.csv`` has a line per cell and row of the comparison, and ``atlas.html`` shows them
(``benchmarks.report.atlas_page``). What one search has found is where those of the same model and
number of GPUs begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from benchmarks.records.simulated import TABLE, shape_named
from benchmarks.report.atlas_page import ratios_of, write_page
from benchmarks.report.display import cluster_label, model_label
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.ratio_errors import factor
from benchmarks.report.table import markdown_table
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import ATLAS, program_label
from benchmarks.specification.reading import preset
from benchmarks.verdict.cells import CELL, SETTINGS, as_users, study_spec
from benchmarks.verdict.judge import TIE
from benchmarks.verdict.measured_pairs import pairs_of_case
from benchmarks.verdict.study import REFERENCE, simulate_cells, with_precision
from zeropp.price.cluster import Cluster
from zeropp.price.flops import parameter_count

COMMITTED = REFERENCE / "atlas" / TABLE
_CELL = [*CELL, "precision"]
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
        parts=lambda _: [
            (name, mode)
            for name, row in ATLAS.items()
            for mode in SETTINGS
            if mode == "best" or as_users(row)
        ],
        near=lambda cell: (cell.task.shape.name, cell.task.num_gpus, cell.task.precision),
    )
    console = Console()
    rows = latest_ok(load_frame([out / TABLE])[0])
    left_out = write_page(rows, out / "atlas.html", pairs_of_case)
    for name in ("first", "need"):
        console.print(atlas_tables(pd.read_csv(out / TABLE))[name], markup=False)
    console.print(f"Written to {out}: {TABLE}{'' if left_out else ', atlas.html'}", markup=False)
    if left_out:
        console.print(left_out, markup=False)
    return 0


def atlas_tables(plans: pd.DataFrame) -> dict[str, str]:
    """The tables of the pages, by name, from the rows of ``plans.csv``: ``brief`` (as users run the
    programs; with equal settings, ``equal``), ``first`` (who is fastest), ``need`` (of tensor
    parallelism, by model) and ``moves`` (how that changes with batch, GPUs and network), which have
    both as far as the rows do; and the numbers of their sentences, as users run the programs:
    medians of models are ``MODEL_PRECISION``."""
    plans = with_precision(plans)
    by_mode = {mode: _tables(plans[plans["mode"] == mode]) for mode in SETTINGS
               if (plans["mode"] == mode).any()}  # fmt: skip
    first = next(iter(by_mode.values()))
    both = {
        name: "\n\n".join(f"{_CAPTIONS[m]}:\n\n{of[name]}" for m, of in by_mode.items())
        for name in ("first", "need", "moves")
    }
    return first | both | {"equal": by_mode.get("best", first)["brief"]}


_CAPTIONS = {
    "own": "As users run each program, with gradients in the types that its documents recommend",
    "best": "Equal settings, all gradients in fp32",
}


def _tables(plans: pd.DataFrame) -> dict[str, str]:
    cells = pd.DataFrame([ratios_of(rows) | dict(zip(_CELL, map(_plain, key), strict=True))
                          for key, rows in plans.groupby(_CELL, sort=True)])  # fmt: skip
    cells = cells[cells["fastest"].notna()]
    cells["sequences"] = cells["global_batch"] / cells["num_gpus"]
    cells["apart"] = [_apart(cell) for _, cell in cells.iterrows()]
    cells["reach"] = [factor(one_program=bool(one), tensor=True) for one in cells["one_program"]]
    told, core = cells[~cells["cut"]], cells["core"].dropna()
    reach, own = (factor(one_program=one, tensor=True) for one in (False, True))
    fitting = plans[plans["tokens_per_s_per_gpu"].notna()]
    alone = ~fitting["contender"].str.endswith("_tp") & ~fitting["plan"].str.contains("offloaded")
    numbers = {
        "cells": f"{len(cells)}",
        "cut": f"{cells['cut'].sum()}",
        "without_fits": f"{fitting[alone].groupby(_CELL).ngroups}",
        "factor": f"{reach:.2f}",
        "error": f"± {reach - 1:.0%}",
        "factor_own": f"{own:.2f}",
        "slower": f"{(told['without'] < 1 / told['reach']).sum()}",
        "core": f"{core.median():.2f}",
        "core_slower": f"{(core < 1 / own).sum()}",
    }
    for name in ("without", "without_fsdp"):  # less than the search's tolerance is no loss
        needed = told[name][told[name] < 1 / (1 + _TOLERANCE)]
        numbers[f"{name}_slower"] = f"{len(needed)}"
        numbers[f"{name}_median"] = f"{needed.median():.2f}"
        numbers[f"{name}_lowest"] = f"{needed.min():.2f}"
    for (model, precision), of in cells[cells["apart"] == ""].groupby(["model", "precision"]):
        numbers[f"{model}_{precision}"] = f"{of['without'].median():.2f}"
    speed = plans.pivot(index=_CELL, columns="contender", values="tokens_per_s_per_gpu")
    of_program = speed.T.groupby(program_label, sort=False).max().T
    order = dict.fromkeys(program_label(name) for name in ATLAS)
    return numbers | {
        "brief": _brief(cells),
        "first": _first(of_program[[label for label in order if label in of_program]]),
        "need": _need(cells),
        "moves": _moves(cells),
    }


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


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
    heads = ["fastest of all programs", f"in how many of {len(margin)} cases"]
    heads += [f"by more than {limit - 1:.0%}" for limit in limits]
    return markdown_table([*heads, "cases with a plan"], lines)


def _ratio(cells: pd.DataFrame, name: str) -> str:
    """The median of a column, with the lowest and the highest; with "≥"
    where some are bounds."""
    ratio = cells[name].dropna()
    if ratio.empty:
        return "no plan with TP"
    sign = "≥ " if cells["bound"].any() and ratio.median() >= 1 else ""
    return f"{sign}{ratio.median():.2f} ({ratio.min():.2f} to {ratio.max():.2f})"


def _brief(cells: pd.DataFrame) -> str:
    """Per model, the speed without tensor parallelism over that with it: of all programs, and of
    Megatron-Core alone; the median, and the range in brackets."""
    lines = [
        [label, str(len(of)), *(_ratio(of, each) for each in _RATIOS)]
        for label, of in _by_model(cells)
    ]
    errors = [f"± {factor(one_program=one, tensor=True) - 1:.0%}" for one in (False, True)]
    heads = ["model", "cases", f"all programs ({errors[0]})", "all but Megatron-FSDP"]
    return markdown_table([*heads, f"Megatron-Core alone ({errors[1]})"], lines)


def _apart(cell: pd.Series[Any]) -> str:
    """Words for what sets a case apart: GPUs that share a network card, or sequences."""
    cluster = preset("cluster", cell["cluster"], Cluster)
    if cluster.nics_per_node < cluster.gpus_per_node:
        return ", GPUs share cards"
    return ", less than a sequence per GPU" if cell["sequences"] < 1 else ""


def _by_model(cells: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The cells of every model, those that are set apart behind others, and then those of its
    products in 8 bits, by size; with a label, which names their device where all have one."""
    sizes = cells["model"].map(lambda name: parameter_count(shape_named(name)))
    for (precision, _, model, apart), of in cells.groupby(["precision", sizes, "model", "apart"]):
        devices = {preset("cluster", name, Cluster).device.name for name in of["cluster"]}
        label = model_label(str(model)) + " in 8 bits" * (precision == "fp8")
        yield f"{label}{f' on {min(devices).upper()}' * (len(devices) == 1)}{apart}", of


_RATIOS = ("without", "without_fsdp", "core")


def _need(cells: pd.DataFrame) -> str:
    """Per model, in how many cells tensor parallelism is needed, for memory or for speed."""
    lines = []
    for label, of in _by_model(cells):
        ratio, reach = of["without"], of["reach"]
        limits = (1 + _TOLERANCE, 1 + TIE, reach)
        counts = [(ratio == 0).sum(), *((ratio < 1 / limit).sum() for limit in limits)]
        counts.append((ratio > reach).sum())
        shown = [*map(str, [len(of), *counts, of["cut"].sum()]), _ratio(of, "without")]
        lines.append([label, *shown])
    heads = ["model", "cases", "nothing without TP fits"]
    heads += [f"TP faster by more than {limit:.0%}" for limit in (_TOLERANCE, TIE)]
    heads += ["TP faster beyond the error", "slower beyond it", "search cut"]
    return markdown_table([*heads, "speed without over with"], lines)


def _moves(cells: pd.DataFrame) -> str:
    """The medians of four ratios by sequences per GPU, number of GPUs, cluster and network."""
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
            names = ("without", "core", "over_Megatron-Core", "over_FSDP2")
            medians = [of[name].median() for name in names]
            shown = str(key) if isinstance(key, str) else f"{key:,g}"
            lines.append([words, shown, str(len(of)), *(f"{ratio:.2f}" for ratio in medians)])
    heads = ["by", "", "cases", "speed without TP over with", "Megatron-Core without over with"]
    return markdown_table([*heads, "ZeroPP over Megatron-Core", "ZeroPP over FSDP2"], lines)
