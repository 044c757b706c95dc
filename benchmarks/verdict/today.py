"""Today's question: who trains Llama models at long sequences fastest, and whether that needs
tensor parallelism. ``experiment=today``; the verdict's own cells are those of the paper.

``plans.csv`` has a line per cell and row, with every program at its best plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pandas as pd
from rich.console import Console

from benchmarks.records.simulated import TABLE
from benchmarks.report.table import markdown_table
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import TODAY
from benchmarks.specification.reading import preset, validated
from benchmarks.verdict.cells import CELL, Cell
from benchmarks.verdict.judge import TIE
from benchmarks.verdict.study import REFERENCE, known_settings, report_folder, simulate_cells
from zeropp.choose.task import Task
from zeropp.price.cluster import Cluster
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model at a sequence length, and the numbers of GPUs that train it."""

    model: str
    seq: int
    num_gpus: list[int]

    __pydantic_config__ = _STRICT

    @property
    def shape(self) -> ModelShape:
        """The preset at the sequence, which its name says where it is not the preset's own."""
        own: ModelShape = preset("model", self.model, ModelShape)
        if self.seq == own.seq:
            return own
        return replace(own, seq=self.seq, name=f"{own.name}_{self.seq // 1024}k")


@dataclass(frozen=True, kw_only=True)
class TodaySpec:
    """The ``today`` mapping of ``conf/experiment/today.yaml``, checked."""

    tolerance: float
    cluster: str
    sequences_per_gpu: list[int]
    models: list[ModelSpec]

    __pydantic_config__ = _STRICT

    def cells(self, precision: Precision) -> Iterator[Cell]:
        """All cells, largest first within a model."""
        cluster = preset("cluster", self.cluster, Cluster)
        for of in self.models:
            for gpus in reversed(of.num_gpus):
                for sequences in reversed(self.sequences_per_gpu):
                    yield Cell(
                        Task(
                            shape=of.shape,
                            cluster=cluster,
                            num_gpus=gpus,
                            global_batch=gpus * sequences,
                            precision=precision,
                        )
                    )


def run(config: dict[str, Any]) -> int:
    """Write plans.csv into ``report_dir`` and print the table. Cells that are in it are not
    simulated again unless ``rerun=all``."""
    spec: TodaySpec = validated(TodaySpec, config["today"], "today")
    if config["launcher"]["kind"] != "simulate":
        raise SpecError("launcher: study=today simulates (use launcher=simulate)")
    out = report_folder(config)
    simulate_cells(
        list(spec.cells(config["precision"])),
        out / TABLE,
        tolerance=spec.tolerance,
        known=known_settings(config, REFERENCE / "today" / TABLE),
        anew=config["rerun"] == "all",
        parts=lambda _: [(name, "best") for name in TODAY],
    )
    plans = pd.read_csv(out / TABLE)
    console = Console()
    console.print(today_tables(plans)["summary"].replace("**", ""), markup=False)
    console.print(f"Written to {out}: {TABLE}", markup=False)
    return 0


def today_tables(plans: pd.DataFrame) -> dict[str, str]:
    """The tables and sentences of the pages, by name, from the rows of ``plans.csv``."""
    steps = plans.pivot(index=CELL, columns="contender", values="step_s")
    plan = plans.pivot(index=CELL, columns="contender", values="plan")
    ratios = steps.div(steps["zeropp"], axis=0).reindex(columns=[*TODAY])
    return {
        "speeds": _speeds(ratios),
        "plans": _plans(plans),
        "summary": _needs_tensor_parallelism(steps, plan),
    }


def _speeds(ratios: pd.DataFrame) -> str:
    """ZeroPP's speed over every other row's, per model and number of GPUs: with 1, 4 and 16
    sequences per GPU."""
    others = [row for row in TODAY.values() if row.name != "zeropp"]
    lines = []
    for (model, gpus), of in ratios.groupby(level=["model", "num_gpus"], sort=False):
        cells = of.sort_index(level="global_batch")
        texts = [
            " / ".join("-" if pd.isna(ratio) else f"{ratio:.2f}" for ratio in cells[row.name])
            for row in others
        ]
        lines.append([str(model), f"{gpus:,}", *texts])
    return markdown_table(["model", "GPUs", *(row.label for row in others)], lines)


def _plans(plans: pd.DataFrame) -> str:
    """The best plans with 4 sequences per GPU, fastest first."""
    lines = []
    of = plans[plans["global_batch"] == 4 * plans["num_gpus"]].dropna(subset="step_s")
    for (model, gpus), rows in of.groupby(["model", "num_gpus"], sort=False):
        for row in rows.sort_values("step_s").to_dict("records"):
            label = TODAY[row["contender"]].label
            lines.append([model, f"{gpus:,}", label, f"{row['step_s']:.2f}", row["plan"]])
    return markdown_table(["model", "GPUs", "program", "step, s", "plan"], lines)


def _needs_tensor_parallelism(steps: pd.DataFrame, plan: pd.DataFrame) -> str:
    """In how many cells the fastest plan with tensor parallelism is faster than the fastest without
    it, with and without ZeroPP's fourth axis."""
    tensor = plan.apply(lambda column: column.str.contains(r"\btp=", na=False))
    with_tp = steps.where(tensor).min(axis=1)
    without = steps.where(~tensor)
    sides = {
        "the sequence divided where that is faster": without.min(axis=1),
        "whole sequences in ZeroPP": without.drop(columns="zeropp").min(axis=1),
    }
    parts = []
    for words, side in sides.items():
        ratio = (side / with_tp).fillna(float("inf"))
        needed, ahead = (ratio > 1 + TIE).sum(), (ratio < 1 / (1 + TIE)).sum()
        parts.append(
            f"with {words}, the fastest plan without tensor parallelism takes "
            f"**{median(ratio):.2f}** times as long as the fastest with it in the median over "
            f"{len(ratio)} cells; tensor parallelism is ahead by more than {TIE:.0%} in "
            f"**{needed}** of them and behind by more in {ahead}"
        )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."
