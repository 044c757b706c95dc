"""Maps of ZeroPP's speed-up over GPU count and batch, and over inter-node bandwidth and batch."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from benchmarks.report import loss_split, words
from benchmarks.report.picture import Picture, save
from benchmarks.studies.claim_33.grid import BandwidthSpec, VerdictSpec
from benchmarks.studies.claim_33.judge import BASELINES, CLAIM, JUDGED, with_bound
from zeropp.sim.lost_time import Losses


def draw(verdicts: pd.DataFrame, spec: VerdictSpec, out: Path) -> list[Path]:
    """Write the speed-ups over all contenders and both maps, as PNG and SVG."""
    best = verdicts[verdicts["mode"] == "best"]
    grid, band = spec.map, spec.bandwidth
    own = best[(best.model == grid.model) & (best.cluster == grid.cluster) & (best.bandwidth == 1)]
    own = own[own.num_gpus.isin(grid.num_gpus) & own.sequences_per_gpu.isin(grid.sequences_per_gpu)]
    wires = best[(best.model == band.model) & (best.cluster == band.cluster)]
    wires = wires[(wires.num_gpus == band.num_gpus) & wires.bandwidth.isin(band.factors)]
    wires = wires[wires.sequences_per_gpu.isin(band.sequences_per_gpu)]
    where = f"{words.model_label(grid.model)} on {words.cluster_label(grid.cluster)}"
    pictures = [
        _speedups(best[best.bandwidth == 1]),
        _map(
            own,
            column="num_gpus",
            label="GPUs",
            title=f"{where}, best plans, simulated",
            name="map_gpus_batch",
        ),
        _map(
            wires,
            column="bandwidth",
            label="inter-node bandwidth, multiples of the cluster's own",
            title=_place(band),
            name="map_bandwidth_batch",
        ),
    ]
    return [path for picture in pictures for path in save(picture, out).paths]


def draw_losses(plans: pd.DataFrame, spec: VerdictSpec, out: Path) -> list[Path]:
    """Write a picture of what every contender's best plan loses against the compute limit.

    It is drawn for the model, cluster and GPU count of the bandwidth's map, with one panel per
    batch and one bar per contender. Older rows have no losses, and give no picture.
    """
    if "limit_s" not in plans:
        return []
    band = spec.bandwidth
    plans = with_bound(plans)
    own = plans[(plans.model == band.model) & (plans.cluster == band.cluster)]
    own = own[(own["mode"] == "best") & (own.num_gpus == band.num_gpus) & (own.bandwidth == 1.0)]
    cells = [
        loss_split.Cell(f"{sequences} sequences per GPU", _losses(own, sequences * band.num_gpus))
        for sequences in band.sequences_per_gpu
    ]
    where = _place(band)
    return list(save(loss_split.loss_split(cells, "losses", where), out).paths)


def _place(band: BandwidthSpec) -> str:
    model, cluster = words.model_label(band.model), words.cluster_label(band.cluster)
    return f"{model} on {band.num_gpus} {cluster}, best plans, simulated"


def _losses(plans: pd.DataFrame, global_batch: int) -> dict[str, dict[str, float]]:
    """Per contender, the seconds of its step by cause, for the plans at one batch."""
    kinds = [kind.name for kind in fields(Losses)]
    rows = plans[(plans.global_batch == global_batch) & plans.limit_s.notna()]
    labels = {"zeropp": "ZeroPP", **BASELINES}
    return {
        labels.get(row["contender"], row["contender"]): {kind: row[f"{kind}_s"] for kind in kinds}
        for _, row in rows.iterrows()
    }


def _speedups(cells: pd.DataFrame) -> Picture:
    """Draw one dot per cell, with one line per contender other than ZeroPP and bars at medians."""
    names = list(BASELINES)
    batches = sorted(cells.sequences_per_gpu.unique())
    figure, axis = plt.subplots(figsize=(9.0, 4.2), layout="constrained")
    for place, name in enumerate(reversed(names)):
        for shift, batch in enumerate(batches):
            height = place + 0.25 * (1 - shift)
            values = cells[cells.sequences_per_gpu == batch][f"speedup_over_{name}"].dropna()
            plural = "" if batch == 1 else "s"
            label = f"{batch:g} sequence{plural} per GPU and step" if place == 0 else None
            axis.plot(values, [height] * len(values), "o", ms=4, alpha=0.5, color=f"C{shift}")
            axis.plot([values.median()], [height], "|", ms=14, mew=2.5, color=f"C{shift}")
            axis.plot([], [], "o", color=f"C{shift}", label=label)
    axis.set_yticks(range(len(names)), [BASELINES[name] for name in reversed(names)])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.axvline(CLAIM, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlabel("speed of ZeroPP over that of ... (dotted: the claim, 1.33)")
    title = "ZeroPP at its best plan over every contender at its own: simulated, one dot per cell"
    axis.set_title(title, fontsize=10)
    axis.legend(loc="lower right", fontsize=8)
    return Picture(section="Verdict", name="speedups", caption=title, figure=figure)


def _map(rows: pd.DataFrame, *, column: str, label: str, title: str, name: str) -> Picture:
    figure, axes = plt.subplots(1, len(JUDGED), figsize=(12.0, 3.2), layout="constrained")
    for axis, over in zip(axes, JUDGED, strict=True):
        table = rows.pivot(index="sequences_per_gpu", columns=column, values=f"speedup_over_{over}")
        _panel(axis, table)
        axis.set_title(f"ZeroPP over {BASELINES[over]}")
        axis.set_xlabel(label)
    axes[0].set_ylabel("sequences per GPU and step")
    figure.suptitle(f"Speed-up of ZeroPP: {title}", fontsize=10)
    return Picture(section="Verdict", name=name, caption=title, figure=figure)


def _panel(axis: Axes, table: pd.DataFrame) -> None:
    """Draw a heat map with its numbers: blue where ZeroPP is faster, grey where nothing fits."""
    axis.grid(visible=False)
    axis.set_facecolor("#cccccc")
    norm = TwoSlopeNorm(1.0, vmin=0.67, vmax=1.33)
    axis.imshow(table.to_numpy(), cmap="RdBu", norm=norm, aspect="auto", origin="lower")
    axis.set_xticks(range(table.shape[1]), [f"{value:g}" for value in table.columns])
    axis.set_yticks(range(table.shape[0]), [f"{value:g}" for value in table.index])
    for y, values in enumerate(table.to_numpy()):
        for x, value in enumerate(values):
            text = "no fit" if pd.isna(value) else f"{value:.2f}"
            dark = not pd.isna(value) and abs(value - 1.0) > 0.22
            axis.text(
                x, y, text, ha="center", va="center", color="white" if dark else "black", fontsize=8
            )
