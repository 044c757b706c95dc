"""Draws all figures of a report, with one process per core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks.report.ablation import ablation_figure
from benchmarks.report.bars import bars
from benchmarks.report.breakdown import memory_breakdown
from benchmarks.report.evidence import evidence_distance_figure
from benchmarks.report.losses import loss_curves
from benchmarks.report.picture import Picture, SavedPicture, save
from benchmarks.report.published import published_figure
from benchmarks.report.scaling import scaling_curves
from benchmarks.report.speedup_map import speedup_maps
from benchmarks.report.step_timelines import step_timelines
from benchmarks.specification.command import leave_interrupts_to_parent
from benchmarks.specification.progress import told

Draw = Callable[[pd.DataFrame], Iterator[Picture]]


def draw(
    rows: pd.DataFrame,
    base: str,
    against: Mapping[str, str],
    out: Path,
    *,
    every_timeline: bool = False,
) -> list[SavedPicture]:
    """Draw and write every figure, and return them in the order of the page."""
    light = rows.drop(columns=["source"])  # it is large, and only the page reads it
    each: list[Draw] = [
        bars,
        partial(speedup_maps, base=base),
        scaling_curves,
        partial(ablation_figure, against=against),
        memory_breakdown,
        partial(step_timelines, every=every_timeline),
        loss_curves,
    ]
    groups = [g for _, g in light.groupby(["evidence", "basis", "cluster"], sort=True)]
    tasks = [(function, group) for function in each for group in groups]
    tasks += [(evidence_distance_figure, light), (published_figure, light)]
    workers = min(os.cpu_count() or 1, len(tasks))
    context = multiprocessing.get_context("fork")  # matplotlib is imported already
    with ProcessPoolExecutor(workers, context, leave_interrupts_to_parent) as pool:
        jobs = [pool.submit(_drawn, function, group, out) for function, group in tasks]
        for _ in told(as_completed(jobs), len(jobs), "groups of figures"):
            pass
        return [picture for job in jobs for picture in job.result()]


def _drawn(function: Draw, rows: pd.DataFrame, out: Path) -> list[SavedPicture]:
    return [save(picture, out) for picture in function(rows)]
