"""What was measured on the question itself: published runs with and without tensor parallelism.

A pair has one model, device, number of GPUs, sequence and precision, and on each side the fastest
published run. Programs and recomputation may differ. Batches may differ by a factor of two at most.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.report.table import markdown_table
from benchmarks.validation.rows import PublishedRow, read_rows, training_tables

# Models are named by their size, in which alone publishers' names agree.
_SIZES = {(32, 4096): "7B to 8B", (40, 5120): "13B", (60, 6656): "30B", (80, 8192): "65B to 70B"}


@dataclass(frozen=True)
class Pair:
    """The fastest published run without tensor parallelism and the fastest with it."""

    without: PublishedRow
    tensor: PublishedRow

    @property
    def ratio(self) -> float:
        """Speed without tensor parallelism over speed with it."""
        return tokens_per_s_per_gpu(self.without) / tokens_per_s_per_gpu(self.tensor)


def tokens_per_s_per_gpu(row: PublishedRow) -> float:
    """A run's tokens per second and GPU; NaN if its metric needs a count of FLOPs."""
    metric = row.measure
    value = row.measured / metric.units[row.unit]
    if metric.kind == "time":
        return row.global_batch * row.seq / value / row.num_gpus
    if metric.kind != "rate":
        return float("nan")
    tokens = {"steps": row.global_batch * row.seq, "samples": row.seq}.get(
        row.metric.partition("_")[0], 1
    )
    return tokens * value / (1 if metric.per_gpu else row.num_gpus)


def measured_pairs(rows: Iterable[PublishedRow] | None = None) -> list[Pair]:
    """All pairs among published ``rows`` (default: all of ``results/published``), smallest model
    first."""
    groups: defaultdict[tuple[object, ...], list[PublishedRow]] = defaultdict(list)
    for row in _published() if rows is None else rows:
        if tokens_per_s_per_gpu(row) > 0:
            key = (row.layers, row.hidden, row.ffn, row.device, row.num_gpus, row.seq, row.dtype)
            groups[key].append(row)
    pairs = []
    for group in groups.values():
        without = [row for row in group if row.tp == 1]
        tensor = [row for row in group if row.tp > 1]
        if not (without and tensor):
            continue
        best = [max(side, key=tokens_per_s_per_gpu) for side in (without, tensor)]
        if max(row.global_batch for row in best) <= 2 * min(row.global_batch for row in best):
            pairs.append(Pair(*best))
    return sorted(pairs, key=lambda p: (p.without.hidden, p.without.layers, p.without.device,
                                        p.without.dtype, p.without.num_gpus))  # fmt: skip


def pairs_table(which: str) -> str:
    """A table of pairs: ``llama_70b`` (its shape on H100), or ``all``, a line per size of model,
    device and precision with the range of ratios."""
    pairs = measured_pairs()
    if which == "llama_70b":
        lines = [
            [
                str(p.without.num_gpus), _precision(p.without), f"{p.without.seq:,}",
                *_side(p.without), *_side(p.tensor), f"{p.ratio:.2f}",
            ]
            for p in pairs
            if (p.without.layers, p.without.hidden, p.without.device) == (80, 8192, "h100")
        ]  # fmt: skip
        heads = ["GPUs", "precision", "sequence", "without TP", "tokens/s/GPU", "with TP",
                 "tokens/s/GPU", "speed without over with"]  # fmt: skip
        return markdown_table(heads, lines)
    groups: defaultdict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        row = pair.without
        size = _SIZES.get((row.layers, row.hidden), f"{row.layers} blocks of {row.hidden:,}")
        groups[size, row.device.upper(), _precision(row)].append(pair)
    lines = []
    for (size, device, precision), own in groups.items():
        ratios = sorted(pair.ratio for pair in own)
        gpus = sorted(pair.without.num_gpus for pair in own)
        lines.append(
            [size, device, precision, _range(gpus, "d"), str(len(own)), _range(ratios, ".2f")]
        )
    heads = ["model", "device", "precision", "GPUs", "pairs", "speed without over with"]
    return markdown_table(heads, lines)


def _published() -> Iterator[PublishedRow]:
    for path in training_tables():
        yield from (line.row for line in read_rows(path) if line.row is not None)


def _range(values: list[float] | list[int], form: str) -> str:
    low, high = format(values[0], form), format(values[-1], form)
    return low if low == high else f"{low} to {high}"


def _precision(row: PublishedRow) -> str:
    return {"bf16": "16 bits", "fp16": "16 bits", "fp8": "8 bits"}.get(row.dtype, row.dtype)


def _side(row: PublishedRow) -> tuple[str, str]:
    """The program that ran, which a row's remark names where it is priced as another, with its
    degrees; and its tokens/s/GPU."""
    degrees = [("tp", row.tp), ("pp", row.pp), ("cp", row.cp)]
    words = [f"{name}={degree}" for name, degree in degrees if degree > 1]
    words += [f"zero{row.zero}"] if row.zero else []
    each = row.global_batch / row.num_gpus
    ran = re.match(r"real program: ([^,;(]+?)(?= *[,;(]|$)", row.remark)
    return (
        f"{ran[1] if ran else row.program} {' '.join(words)}, {each:g} sequences per GPU",
        f"{tokens_per_s_per_gpu(row):,.0f}",
    )
