"""What the best plans would take with other constants of the machines.

Some constants of ``conf/cluster`` are assumed, and the others are known within a range. The best
plan of every row and cell is priced again with one constant at a time at either end of its range.
Plans stay as they are: a search with another constant would find plans at least as fast for
everybody, which this leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.records.own_cache import Line, fill, write
from benchmarks.specification.reading import preset
from benchmarks.verdict.cells import CELL, Cell, candidate_of
from zeropp.choose.task import MEMORY_MARGIN
from zeropp.price.cluster import Cluster

REPRICED = "assumptions.csv"  # seconds per step of every best plan under every assumption
_UNITS = {"us": " µs", "tflops": " TFLOP/s"}
_KEYS = [*CELL, "contender", "step_s"]


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A constant of all clusters, and the factors that bound what it may be in truth."""

    name: str  # the field of Device (``device.NAME``) or of a Link (``inter.NAME``)
    label: str
    low: float
    high: float
    why: str  # where the constant is from

    @property
    def source(self) -> str:
        """Where the constant is from, and what it is on A800 and on H100, there of the newest
        kernels."""
        part, _, field = self.name.partition(".")
        owners = [getattr(preset("cluster", name, Cluster), part) for name in ("a800", "h100")]
        newest = (getattr(getattr(of, "newer", None), field, getattr(of, field)) for of in owners)
        values = " and ".join(dict.fromkeys(f"{value:g}" for value in newest))
        return f"{self.why}, {values}{_UNITS.get(field.rpartition('_')[2], '')}"

    @property
    def columns(self) -> tuple[str, str]:
        """The columns of the table of step times: the low end of the range, and the high one."""
        return f"{self.name} x {self.low:g}", f"{self.name} x {self.high:g}"

    def applied(self, cluster: Cluster, factor: float) -> Cluster:
        """The cluster with the constant times a factor. Later kernels of a device that have the
        constant, too, are scaled alike."""
        part, _, field = self.name.partition(".")
        owner = getattr(cluster, part)
        changed = replace(owner, **{field: getattr(owner, field) * factor})
        newer = getattr(owner, "newer", None)
        if newer is not None and hasattr(newer, field):
            scaled = replace(newer, **{field: getattr(newer, field) * factor})
            changed = replace(changed, newer=scaled)
        # Prices are kept by hashes, which are those of names.
        name = f"{cluster.name} with {self.name} x {factor:g}"
        if part == "device":
            changed = replace(changed, name=name)
        return replace(cluster, name=name, **{part: changed})


ASSUMPTIONS = (
    Assumption(
        name="device.overlap_slowdown",
        label="compute beside a collective is slower by",
        low=0.0,
        high=2.1,
        why="arXiv 2507.03114 (19 % on average, at most 40 %)",
    ),
    Assumption(
        name="device.launch_us",
        label="time of the host per kernel",
        low=0.5,
        high=2.0,
        why="assumed",
    ),
    Assumption(
        name="inter.efficiency",
        label="share of the rate between nodes",
        low=0.8,
        high=1.1,
        why="assumed",
    ),
    Assumption(
        name="inter.latency_us",
        label="latency between nodes",
        low=0.5,
        high=2.0,
        why="assumed",
    ),
    Assumption(
        name="intra.efficiency",
        label="share of the rate inside a node",
        low=0.85,
        high=1.1,
        why="measured",
    ),
    Assumption(
        name="device.kernel_us",
        label="fixed time per kernel",
        low=0.6,
        high=1.4,
        why="fitted",
    ),
    Assumption(
        name="device.memory_efficiency",
        label="share of the memory's rate",
        low=0.9,
        high=1.1,
        why="fitted",
    ),
    Assumption(
        name="device.matmul_bf16_tflops",
        label="rate of matrix products",
        low=0.93,
        high=1.09,
        why="fitted (H100's recipes say 634 to 740)",
    ),
    Assumption(
        name="device.attention_efficiency",
        label="rate of fused attention over products",
        low=0.8,
        high=1.2,
        why="fitted",
    ),
)


_COLUMNS = tuple(column for assumption in ASSUMPTIONS for column in assumption.columns)


def repriced(cell: Cell, setting: str, margin: float, of: Line, before: list[Line]) -> list[Line]:
    """The seconds per step of a ``setting`` by column of ``Assumption.columns``, as a line of the
    table whose first columns are ``of``."""
    _, contender, candidate = candidate_of(setting)
    task = replace(cell.priced, memory_margin=margin)
    times = {
        column: contender.simulated(
            replace(task, cluster=assumption.applied(task.cluster, factor)), candidate
        ).step_s
        for assumption in ASSUMPTIONS
        for column, factor in zip(
            assumption.columns, (assumption.low, assumption.high), strict=True
        )
    }
    return [of | times]


def price_assumptions(
    plans: pd.DataFrame, cells: Iterable[Cell], path: Path, *, anew: bool
) -> None:
    """Price the best ``plans`` at the clusters' own bandwidth under every assumption, and write the
    table ``path``, one line per plan. Lines of the same plans are kept unless ``anew``, or if the
    assumptions were others."""
    by_key = {cell.key: cell for cell in cells if cell.bandwidth == 1.0}
    best = plans[(plans["mode"] == "best") & plans["step_s"].notna()]
    keys = best[_KEYS].itertuples(index=False, name=None)
    margins = best.reindex(columns=["memory_margin"])["memory_margin"].fillna(MEMORY_MARGIN)
    chains = {
        key: [(key, partial(repriced, cell, setting, margin, dict(zip(_KEYS, key, strict=True))))]
        for key, setting, margin in zip(keys, best["setting"], margins, strict=True)
        if (cell := by_key.get(key[: len(CELL)])) is not None
    }
    is_other = path.exists() and list(pd.read_csv(path, nrows=0)) != [*_KEYS, *_COLUMNS]
    lines = fill(
        path, chains.values(), _key_of, "plans under other constants", anew=anew or is_other
    )
    found = {_key_of(line): line for line in lines}
    write(path, [found[key] for key in chains])


def _key_of(line: Line) -> tuple[Any, ...]:
    return tuple(line[key] for key in _KEYS)
