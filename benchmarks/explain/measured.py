"""Measured runs beside their prices and the nearest published runs, and how these are printed.

A measured run is the configuration of the question, with the words that stand behind its time.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from typing import Any

from rich.console import Console

from benchmarks.explain.answer import settled
from benchmarks.explain.logs import Measurement, Step, measurement
from benchmarks.explain.question import Question, ask
from benchmarks.explain.screen import indented, lost, table_of
from benchmarks.report.ratio_errors import priced_runs
from benchmarks.specification import DTYPES, SpecError
from benchmarks.validation.rows import COLUMNS, METRICS, SPEEDS, PublishedRow
from benchmarks.validation.stated import at_rate, cluster_of, measured_s
from zeropp.choose.task import Candidate
from zeropp.price import parameter_count
from zeropp.price.cluster import Cluster, Link
from zeropp.price.memory import reserved_bytes
from zeropp.price.programs import program_named
from zeropp.price.simulator import SimResult
from zeropp.types.layout import InfeasibleError

_NEAREST = 3
_UNLIKE = 20.0  # a ratio of measured and priced time that no machine of the kind explains
_SLOWER = 1.15  # than its price, from which on a run is asked for what would explain it
_LEAST_SHARE = 0.003  # of its rate, which a part of a machine may have
_FAR = 3.0  # of ``_distance``: other models, or other numbers of GPUs by a factor of some four


@dataclass(frozen=True)
class MeasuredRun:
    """A run, the words in which it differs from the question, what was measured of it, its plan,
    and its simulated step."""

    question: Question
    words: str
    measured: Measurement
    candidate: Candidate[Any]
    priced: SimResult

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Measured tokens per second and GPU."""
        task = self.question.task
        return task.global_batch * task.shape.seq / task.num_gpus / self.measured.step_s

    @property
    def priced_peak(self) -> float:
        """The priced GiB of what the log's are of: reserved, or allocated."""
        program, peak = program_named(self.priced.plan.program), float(self.priced.peak_bytes)
        if self.measured.peak and self.measured.peak[1] == "reserved":
            peak = reserved_bytes(self.priced.peak_bytes, program)
        return peak / 2**30


@dataclass(frozen=True)
class PublishedNear:
    """A published run of a similar model on the same device: its tokens per second and GPU, as
    measured and as priced."""

    row: PublishedRow
    tokens_per_s_per_gpu: float
    priced: float


def measured_run(
    text: str, files: Sequence[str], words: Sequence[str], arguments: Sequence[str]
) -> MeasuredRun:
    """Price a measured run: the question of ``ask`` with the words behind the time in ``text``.
    Raises SpecError for a text that says no time, or words that cannot be asked."""
    try:
        first, *others = shlex.split(text) or [""]
    except ValueError as error:
        raise SpecError(f"--measured {text}: {error}") from None
    own = [word for word in others if "=" in word]
    keys = {word.partition("=")[0] for word in own}  # own words replace the question's
    given = [word for word in words if word.partition("=")[0] not in keys]
    question = ask(files, [*given, *own], arguments)
    task, value = question.task, " ".join([first, *(word for word in others if "=" not in word)])
    measured = measurement(value, Step(task.global_batch, task.shape.seq, task.num_gpus))
    candidate = settled(question)
    try:
        priced = question.contender.simulated(task, candidate)
    except InfeasibleError as error:
        raise SpecError(f"--measured {text}: {error}") from None
    ratio = measured.step_s / priced.step_s
    if not 1 / _UNLIKE <= ratio <= _UNLIKE:
        raise SpecError(
            f"--measured {text}: a step of {measured.step_s:.3g} s, {ratio:.3g} of "
            "the simulated one, is probably not of this run or in this unit (check the unit, or "
            "add the words in which that run differs)"
        )
    return MeasuredRun(question, " ".join(own), measured, candidate, priced)


# Parts of the machine that may be slower than the preset's, those that most often are first.
_PARTS = {
    "inter": "the network between nodes, at {rate:.3g} of its {nominal:g} GB/s per card (TCP, NICs "
    "without work, a shared switch): measure it first, with zeropp calibrate or nccl-tests",
    "intra": "links inside nodes, at {rate:.3g} of their {nominal:g} GB/s per GPU",
    "device": "every kernel, at {share:.2g} of its rate (a cap of the power, low clocks, another "
    "board, or kernels that are not the program's)",
}


def explanations(run: MeasuredRun) -> list[str]:
    """What would alone make the simulated step as long as the measured one, each with the rate at
    which it would: no step time tells them apart. None where a run is hardly slower than its
    price."""
    cluster, waits_s = run.question.task.cluster, run.measured.step_s - run.priced.step_s
    if run.measured.step_s < _SLOWER * run.priced.step_s:
        return []
    found = []
    for part, words in _PARTS.items():
        if share := _share(run, part):
            nominal = 1.0 if part == "device" else getattr(cluster, part).bandwidth_gb_s
            found.append(words.format(share=share, rate=share * nominal, nominal=nominal))
    program = program_named(run.priced.plan.program)
    if reserved_bytes(run.priced.peak_bytes, program) > cluster.device.usable_bytes:
        found.append("retries of torch's allocator, which has little memory left")
    return [*found, f"a wait of {waits_s:.3g} s in every step (data, logs, the host, slow ranks)"]


def _share(run: MeasuredRun, part: str) -> float | None:
    """The share of its rate, within 3 %, at which a part makes the step as long as it was measured;
    None if none does."""
    task = run.question.task

    def is_too_slow(share: float) -> bool:
        changed = replace(task, cluster=_slowed(task.cluster, part, share))
        step_s = run.question.contender.simulated(changed, run.candidate).step_s
        return step_s > run.measured.step_s

    low, high = _LEAST_SHARE, 1.0
    if not is_too_slow(low):
        return None
    for _ in range(8):
        middle = sqrt(low * high)
        low, high = (middle, high) if is_too_slow(middle) else (low, middle)
    return sqrt(low * high)


def _slowed(cluster: Cluster, part: str, share: float) -> Cluster:
    if part == "device":
        device = at_rate(cluster.device, share)
        moved = share * device.memory_bandwidth_gb_s
        return replace(cluster, device=replace(device, memory_bandwidth_gb_s=moved))
    link: Link = getattr(cluster, part)
    slow = replace(link, bandwidth_gb_s=share * link.bandwidth_gb_s)
    return replace(cluster, **{part: slow})  # type: ignore[arg-type]


def nearest(question: Question) -> list[PublishedNear]:
    """The published runs that are nearest to a configuration, of the same device."""
    near = []
    for cells in priced_runs():
        same = cells["device"] == question.task.cluster.device.name
        if same and METRICS[cells["metric"]].kind in SPEEDS:
            stated = {name: cell for name, cell in cells.items() if name in COLUMNS and cell}
            row = PublishedRow.model_validate(
                stated | {"url": cells["place"], "table": cells["place"]}
            )
            near.append((_distance(row, question), row, float(cells["predicted"])))
    near.sort(key=lambda found: found[0])
    found = []
    for far, row, price in near[:_NEAREST]:
        if far < _FAR:
            reached = row.global_batch * row.seq / row.num_gpus
            reached /= measured_s(row, cluster_of(row).device)
            ratio = row.measured / price if row.measure.kind == "time" else price / row.measured
            found.append(PublishedNear(row, reached, reached * ratio))
    return found


def _distance(row: PublishedRow, question: Question) -> float:
    """How far a published run is from the question's, as a sum of logarithms of ratios; another
    type of products, or full recomputation on one side alone, counts as a factor of e."""
    task = question.task
    recomputes = getattr(question.knobs, "recompute", "none") == "full"
    return (
        2 * abs(log(parameter_count(row.shape) / parameter_count(task.shape)))
        + 0.5 * abs(log(row.num_gpus / task.num_gpus))
        + 0.5 * abs(log(row.seq / task.shape.seq))
        + ((row.dtype in DTYPES["fp8"]) != (task.precision == "fp8"))
        + ((row.recompute == "full") != recomputes)
    )


_HEADINGS = ("step s", "tokens/s/GPU", "simulated s", "times simulated")


def show_measured(runs: Sequence[MeasuredRun], console: Console) -> None:
    """Print what grows, the runs beside their prices, what their simulated steps are lost to, and
    the published runs that are nearest to the first."""
    table = table_of("Measured beside simulated")
    table.add_column("measured", overflow="fold")
    has_peaks = any(run.measured.peak for run in runs)
    for heading in (*_HEADINGS, *(("GiB", "simulated GiB") if has_peaks else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        of, priced_s = run.measured, run.priced.step_s
        if of.grown:
            console.print(
                f"{of.source}: its steps grow from {of.grown[0]:.3g} to {of.grown[1]:.3g} s. "
                "What grows while it runs (memory in fragments, a queue of data, heat) is not "
                "simulated: look for that first; below, the last half of the steps counts.",
                style="yellow",
            )
        count = f"{of.lines} line{'s' * (of.lines > 1)}"
        lines = f" ({count}, spread {100 * of.spread:.1f} %)" if of.lines else ""
        peaks = [f"{of.peak[0]:.1f} {of.peak[1]}", f"{run.priced_peak:.1f}"] if of.peak else []
        table.add_row(
            f"{of.source}{lines} {run.words}".rstrip(),
            f"{of.step_s:.3f}",
            f"{run.tokens_per_s_per_gpu:,.0f}",
            f"{priced_s:.3f}",
            f"{of.step_s / priced_s:.2f}",
            *peaks,
        )
    console.print(table)
    for run in runs:
        if alone := explanations(run):
            ratio = run.measured.step_s / run.priced.step_s
            console.print(
                f"{run.measured.source}: {ratio:.2f} times the simulated step, as by one of these:"
            )
        for line in alone:
            indented(line, console)
    cluster = runs[0].question.task.cluster
    device = cluster.device
    power = "" if device.power_w is None else f" of {device.power_w:g} W"
    console.print(
        f"First see that the machine is the preset's, {cluster.gpus_per_node} boards {device.name}"
        f"{power} a node, {cluster.intra.bandwidth_gb_s:g} GB/s per GPU within it and "
        f"{cluster.nics_per_node} x {cluster.inter.bandwidth_gb_s:g} GB/s out of it (cluster.KEY="
        "VALUE says otherwise), and whether rows are packed of documents (model.document=N)."
    )
    for run in runs:
        console.print(f"What the simulated step of {run.priced.step_s:.3f} s is lost to:")
        for loss in lost(run.priced, 0.005).split(", "):
            indented(loss, console)
    if near := nearest(runs[0].question):
        console.print("Published runs that are nearest to the first measured one:")
    for published in near:
        row = published.row
        ratio = runs[0].tokens_per_s_per_gpu / published.tokens_per_s_per_gpu
        by_prices = runs[0].priced.tokens_per_s_per_gpu / published.priced
        indented(
            f"{row.model} on {row.num_gpus} x {row.device}, sequence {row.seq}, {row.dtype}: "
            f"{published.tokens_per_s_per_gpu:,.0f} tokens/s/GPU; yours is {ratio:.2f} of it, and "
            f"would be {by_prices:.2f} in simulation ({row.source}, {row.table})",
            console,
        )
    console.print()
