"""What was measured on the question itself: published runs with and without tensor parallelism.

A pair has one model, device, number of GPUs, sequence and precision, and on each side the fastest
published run. Programs and recomputation may differ. Batches may differ by a factor of two at most.
The simulator's ratio for the same two plans stands beside, from the committed validation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isnan

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import style
from benchmarks.report.evidence import VALIDATION
from benchmarks.report.table import markdown_table
from benchmarks.validation.rows import PublishedRow, read_rows, training_tables
from benchmarks.validation.stated import measured_s, preset_of

# Models are named by their size, in which alone publishers' names agree.
_TICKS = (0.6, 0.8, 1.0, 1.25, 1.5, 2.0)
_SIZES = {(32, 4096): "7B to 8B", (40, 5120): "13B", (60, 6656): "30B", (80, 8192): "65B to 70B"}


@dataclass(frozen=True)
class Pair:
    """The fastest published run without tensor parallelism and the fastest with it."""

    without: PublishedRow
    tensor: PublishedRow
    simulated: float  # the simulator's ratio for these two plans; NaN where one has no price

    @property
    def ratio(self) -> float:
        """Speed without tensor parallelism over speed with it."""
        return tokens_per_s_per_gpu(self.without) / tokens_per_s_per_gpu(self.tensor)


def tokens_per_s_per_gpu(row: PublishedRow) -> float:
    """A run's tokens per second and GPU; NaN if its metric needs a count of FLOPs."""
    if row.measure.kind not in ("time", "rate"):
        return float("nan")
    step_s = measured_s(row, preset_of(row.device).device)
    return row.global_batch * row.seq / row.num_gpus / step_s


def measured_pairs(*, one_program: bool = False) -> list[Pair]:
    """All pairs in ``results/published``, smallest model first; with ``one_program``, those whose
    sides are of one program and source."""
    groups: defaultdict[tuple[object, ...], list[tuple[PublishedRow, float]]] = defaultdict(list)
    for row, simulated in _published():
        if tokens_per_s_per_gpu(row) > 0:
            key = (row.layers, row.hidden, row.ffn, row.device, row.num_gpus, row.seq, row.dtype)
            groups[*key, (row.source, row.program) if one_program else ""].append((row, simulated))
    pairs = []
    for group in groups.values():
        sides = [[run for run in group if (run[0].tp > 1) is tensor] for tensor in (False, True)]
        if not all(sides):
            continue
        (without, first), (tensor, second) = (
            max(side, key=lambda run: tokens_per_s_per_gpu(run[0])) for side in sides
        )
        batches = sorted((without.global_batch, tensor.global_batch))
        if batches[1] <= 2 * batches[0]:
            pairs.append(Pair(without, tensor, first / second))
    return sorted(pairs, key=lambda p: (p.without.hidden, p.without.layers, p.without.device,
                                        p.without.dtype, p.without.num_gpus))  # fmt: skip


def pairs_table(which: str) -> str:
    """A table of pairs: ``llama_70b`` (its shape on H100), or a line per size of model, device and
    precision with the range of ratios, of ``all`` or of those of ``one_program``."""
    pairs = measured_pairs(one_program=which == "one_program")
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
    lines = []
    for (size, device, precision), own in _grouped(pairs).items():
        ratios = sorted(pair.ratio for pair in own)
        gpus = sorted(pair.without.num_gpus for pair in own)
        simulated = sorted(pair.simulated for pair in own if not isnan(pair.simulated))
        counts = [size, device, precision, _range(gpus, "d"), str(len(own)), _range(ratios, ".2f")]
        lines.append([*counts, _range(simulated, ".2f") if simulated else "no price"])
    heads = ["model", "device", "precision", "GPUs", "pairs", "speed without over with"]
    return markdown_table([*heads, "simulated"], lines)


def _grouped(pairs: Iterable[Pair]) -> dict[tuple[str, str, str], list[Pair]]:
    """The pairs by size of model, device and precision."""
    groups: defaultdict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        row = pair.without
        size = _SIZES.get((row.layers, row.hidden), f"{row.layers} blocks of {row.hidden:,}")
        groups[size, row.device.upper(), _precision(row)].append(pair)
    return groups


def pairs_figure() -> Figure:
    """The ratios of all pairs, a line per size of model, device and precision: what was measured as
    a dot, and the simulator's ratio for the same two plans as a ring."""
    groups = _grouped(measured_pairs())
    figure = Figure(figsize=(9.0, 0.36 * len(groups) + 1.1), layout="constrained")
    axis = figure.subplots()
    for place, own in enumerate(groups.values()):
        shift = [0.5 * (number / len(own) - 0.5) for number in range(len(own))]
        heights = [place + each for each in shift]
        axis.plot(
            [p.ratio for p in own],
            heights,
            "o",
            ms=4.5,
            color=style.COOL,
            label="measured" if place == 0 else None,
        )
        axis.plot(
            [p.simulated for p in own],
            heights,
            "o",
            ms=6,
            mfc="none",
            color=style.WARM,
            label="simulated, the same two plans" if place == 0 else None,
        )
        sides = ({_program(getattr(p, side)) for p in own} for side in ("without", "tensor"))
        words = " / ".join(", ".join(sorted(names)) for names in sides)
        axis.text(1.01, place, words, transform=axis.get_yaxis_transform(), va="center", fontsize=7)
    axis.set_yticks(range(len(groups)), [", ".join(key) for key in groups], fontsize=8)
    axis.set_ylim(len(groups) - 0.4, -0.6)
    axis.set_xscale("log")
    axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS], minor=False)
    axis.minorticks_off()
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.grid(axis="x")
    axis.legend(loc="lower right", fontsize=8)
    axis.set_xlabel("speed without tensor parallelism over speed with it (right: programs of both)")
    return figure


def _published() -> Iterator[tuple[PublishedRow, float]]:
    """Every published run, with its simulated tokens per second and GPU, NaN without a price."""
    prices = pd.read_csv(VALIDATION, usecols=["place", "predicted"], dtype=str).dropna()
    simulated = dict(zip(prices["place"], prices["predicted"], strict=True))
    for path in training_tables():
        for line in read_rows(path):
            if (row := line.row) is not None and row.unit != "yes/no":
                priced = row.model_copy(update={"value": simulated.get(line.place, "nan")})
                yield row, tokens_per_s_per_gpu(priced)


def _range(values: list[float] | list[int], form: str) -> str:
    low, high = format(values[0], form), format(values[-1], form)
    return low if low == high else f"{low} to {high}"


def _precision(row: PublishedRow) -> str:
    return {"bf16": "16 bits", "fp16": "16 bits", "fp8": "8 bits"}.get(row.dtype, row.dtype)


def _program(row: PublishedRow) -> str:
    """The program that ran, which a row's remark names where its entry has another name."""
    ran = re.match(r"real program: ([^,;(]+?)(?= *[,;(]|$)", row.remark)
    return ran[1] if ran else row.program


def _side(row: PublishedRow) -> tuple[str, str]:
    """The program that ran, with its degrees; and its tokens/s/GPU."""
    degrees = [("tp", row.tp), ("pp", row.pp), ("cp", row.cp)]
    words = [f"{name}={degree}" for name, degree in degrees if degree > 1]
    words += [f"zero{row.zero}"] if row.zero else []
    each = row.global_batch / row.num_gpus
    return (
        f"{_program(row)} {' '.join(words)}, {each:g} sequences per GPU",
        f"{tokens_per_s_per_gpu(row):,.0f}",
    )
