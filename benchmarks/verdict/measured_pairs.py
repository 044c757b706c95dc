"""What was measured on the question itself: published runs with and without tensor parallelism.

A pair has one model, device, number of GPUs, sequence and number of bits, and on each side the
fastest published run. Programs, formats and recomputation may differ. Of every such group there is
a pair per batch that both sides have, and where they share none, one of the nearest batches. The
simulator's ratio for the same two plans stands beside, from the committed validation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import isnan
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import style
from benchmarks.report.evidence import VALIDATION
from benchmarks.report.table import markdown_table
from benchmarks.specification import DTYPES
from benchmarks.validation.rows import PublishedRow, read_rows, training_tables
from benchmarks.validation.stated import measured_s, preset_of
from zeropp.price.programs import entry_named

# Models of these shapes are named by their size, in which alone publishers' names agree.
_TICKS = (0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5)
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
            key = (row.layers, row.hidden, row.ffn, row.device, row.num_gpus, row.seq)
            own = (row.source, row.program) if one_program else ""
            groups[*key, _precision(row), own].append((row, simulated))
    pairs = [pair for group in groups.values() for pair in _pairs_of(group)]
    return sorted(pairs, key=lambda p: (p.without.hidden, p.without.layers, p.without.device,
                                        _precision(p.without), p.without.num_gpus,
                                        p.without.global_batch))  # fmt: skip


def _pairs_of(group: Iterable[tuple[PublishedRow, float]]) -> Iterator[Pair]:
    """The pairs of runs that differ in their plans and batches alone."""
    fastest: dict[tuple[bool, int], tuple[PublishedRow, float]] = {}
    for run in sorted(group, key=lambda run: tokens_per_s_per_gpu(run[0])):
        fastest[run[0].tp > 1, run[0].global_batch] = run
    having, lacking = (
        {b: run for (has, b), run in fastest.items() if has is tensor} for tensor in (True, False)
    )
    chosen = [(batch, batch) for batch in lacking.keys() & having.keys()]
    if having and lacking and not chosen:
        near = product(lacking, having)
        chosen = [min(near, key=lambda two: (max(two) / min(two), -max(two)))]
    for first, second in chosen:
        (without, simulated), (tensor, other) = lacking[first], having[second]
        yield Pair(without, tensor, simulated / other)


def pairs_table(which: str) -> str:
    """A table of pairs: ``llama_70b`` (its shape on H100), or a line per model, device and
    precision with the range of ratios, of ``all`` or of those of ``one_program``."""
    pairs = measured_pairs(one_program=which == "one_program")
    if which == "llama_70b":
        lines = [
            [
                f"{p.without.num_gpus:,}", _sides_of([p], _format), f"{p.without.seq:,}",
                *_side(p.without), *_side(p.tensor), f"{p.ratio:.2f}",
            ]
            for p in pairs
            if (p.without.layers, p.without.hidden, p.without.device) == (80, 8192, "h100")
        ]  # fmt: skip
        heads = ["GPUs", "format", "sequence", "without TP", "tokens/s/GPU", "with TP",
                 "tokens/s/GPU", "speed without over with"]  # fmt: skip
        return markdown_table(heads, lines)
    lines = []
    for (size, device, precision), own in _grouped(pairs).items():
        ratios = sorted(pair.ratio for pair in own)
        gpus = sorted(pair.without.num_gpus for pair in own)
        simulated = sorted(pair.simulated for pair in own if not isnan(pair.simulated))
        counts = [size, device, precision, _range(gpus, ",d"), str(len(own))]
        counts.append(str(sum(p.without.global_batch == p.tensor.global_batch for p in own)))
        both = [_sides_of(own, of) for of in (_format, _program)]
        counts += [*both, _range(ratios, ".2f")]
        lines.append([*counts, _range(simulated, ".2f") if simulated else "not simulated"])
    heads = ["model", "device", "precision", "GPUs", "pairs", "of one batch", "formats"]
    heads += ["programs", "speed without over with", "simulated"]
    return markdown_table(heads, lines)


def pairs_range(size: str, device: str, precision: str) -> str:
    """The range of the ratios of a line of the table of all pairs."""
    return _range(sorted(p.ratio for p in _grouped(_all_pairs())[size, device, precision]), ".2f")


def pairs_of_case(case: Mapping[Any, Any]) -> str:
    """The measured pairs of a case's model, device, sequence and precision, and of one batch, as a
    sentence; empty if there are none."""
    model, device = case["source"]["spec"]["model"], case["source"]["spec"]["cluster"]["device"]
    own = [
        pair
        for pair in _all_pairs()
        if (pair.without.layers, pair.without.hidden, pair.without.seq)
        == (model["layers"], model["hidden"], model["seq"])
        and pair.without.device == device["name"]
        and pair.without.dtype in DTYPES[case["precision"]]
        and pair.without.global_batch == pair.tensor.global_batch
    ]
    if not own:
        return ""
    ratios, gpus = sorted(p.ratio for p in own), sorted(p.without.num_gpus for p in own)
    return f"Measured, on {_range(gpus, ',d')} GPUs: {_range(ratios, '.2f')} without over with."


@cache
def _all_pairs() -> list[Pair]:
    return measured_pairs()


def _sides_of(pairs: Iterable[Pair], of: Callable[[PublishedRow], str]) -> str:
    """What the rows of both sides have, ``without / with``, or once where both have the same."""
    without, tensor = set(), set()
    for pair in pairs:
        without.add(of(pair.without))
        tensor.add(of(pair.tensor))
    words = [", ".join(sorted(side)) for side in (without, tensor)]
    return " / ".join(dict.fromkeys(words))


def _format(row: PublishedRow) -> str:
    return row.dtype


def _grouped(pairs: Iterable[Pair]) -> dict[tuple[str, str, str], list[Pair]]:
    """The pairs by size of model, device and precision."""
    groups: defaultdict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        row = pair.without
        size = _SIZES.get((row.layers, row.hidden), row.model)
        groups[size, row.device.upper(), _precision(row)].append(pair)
    return groups


def pairs_figure() -> Figure:
    """The ratios of all pairs, a line per model, device and precision: what was measured as
    a dot (a cross where the batches differ), and the simulator's ratio for the same two plans as a
    ring."""
    groups = _grouped(measured_pairs())
    figure = Figure(figsize=(9.0, 0.36 * len(groups) + 1.1), layout="constrained")
    axis = figure.subplots()
    for place, own in enumerate(groups.values()):
        shift = [0.5 * (number / len(own) - 0.5) for number in range(len(own))]
        heights = [place + each for each in shift]
        is_equal = [p.without.global_batch == p.tensor.global_batch for p in own]
        for equal, marker in ((True, "o"), (False, "x")):
            chosen = [number for number, same in enumerate(is_equal) if same is equal]
            axis.plot(
                [own[number].ratio for number in chosen],
                [heights[number] for number in chosen],
                marker,
                ms=4.5,
                color=style.COOL,
                label=f"measured, of {'one batch' if equal else 'two batches'}" * (place == 0)
                or None,
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
        words = _sides_of(own, _program).replace(" / ", " /\n")
        axis.text(1.01, place, words, transform=axis.get_yaxis_transform(), va="center", fontsize=7)
    gpus = [_range(sorted(p.without.num_gpus for p in own), ",d") for own in groups.values()]
    labels = [
        f"{model}, {count} {device}, {bits}"
        for (model, device, bits), count in zip(groups, gpus, strict=True)
    ]
    axis.set_yticks(range(len(groups)), labels, fontsize=8)
    axis.set_ylim(len(groups) - 0.4, -0.6)
    axis.set_xscale("log")
    axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS], minor=False)
    axis.minorticks_off()
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.grid(axis="x")
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8)
    axis.set_xlabel(
        "speed without tensor parallelism over speed with it (right: programs without / with)",
        fontsize=9,
    )
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
    bits = {"bf16": "16", "fp16": "16", "fp8": "8", "mxfp8": "8"}.get(row.dtype)
    return f"{bits} bits" if bits else row.dtype


def _program(row: PublishedRow) -> str:
    """The program that ran with its year: the head of its entry's version, unless the row's remark
    names a program that has no entry."""
    entry = re.split(r"[,;]| \(| at | with ", entry_named(row.program).version)[0]
    ran = re.match(r"real program: ([^,;(]+?)(?= *[,;(]|$)", row.remark)
    return ran[1] if ran and not entry.startswith(ran[1]) else entry


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
