"""Measured runs beside their prices: the cause of the gap, constants that explain it, the nearest
published runs, and how long a training would take; and how these are printed.

A measured run is the configuration of the question, with the words that stand behind its time; the
preset of its cluster is where the fit of the constants begins.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from rich.console import Console

from benchmarks.explain.answer import Answer, settled
from benchmarks.explain.question import Question, ask
from benchmarks.explain.screen import indented, table_of
from benchmarks.measured.causes import Explanation, explain
from benchmarks.measured.fit import CONSTANTS, Fitted, Priced, Run, fit, scaled_cluster
from benchmarks.measured.logs import Measurement, Step, measurement
from benchmarks.report.ratio_errors import priced_runs
from benchmarks.specification import SpecError
from benchmarks.specification.progress import progress_line
from benchmarks.validation.rows import COLUMNS, METRICS, SPEEDS, PublishedRow
from benchmarks.validation.stated import cluster_of, measured_s
from zeropp.choose.task import Task
from zeropp.price import parameter_count
from zeropp.price.programs import program_of
from zeropp.schedule.plan import Plan
from zeropp.types.layout import InfeasibleError

MOST_RUNS = 3
_NEAREST = 3
_UNLIKE = 20.0  # a ratio of measured and priced time that no machine of the kind explains
_FAR = 3.0  # of ``_distance``: other models, or other numbers of GPUs by a factor of some four
_LEAST_PROBABILITY = 0.05
_SURE = 0.5  # a probability from which on a cause is worth acting on
_LEAST_CHANGE = 0.02  # of a constant that is shown


@dataclass(frozen=True)
class MeasuredRun:
    """A run, the words in which it differs from the question, what was measured of it, and its
    step's seconds by the preset and with the fitted constants."""

    task: Task
    words: str
    measured: Measurement
    priced_s: float
    fitted_s: float

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Measured tokens per second and GPU."""
        task = self.task
        return task.global_batch * task.shape.seq / task.num_gpus / self.measured.step_s


@dataclass(frozen=True)
class PublishedNear:
    """A published run of a similar model on the same device: its tokens per second and GPU, as
    measured and as priced."""

    row: PublishedRow
    tokens_per_s_per_gpu: float
    priced: float


@dataclass(frozen=True)
class Comparison:
    """What measured runs say about a cluster."""

    runs: list[MeasuredRun]
    causes: list[Explanation]
    fitted: Fitted
    near: list[PublishedNear]


def compare(
    question: Question,
    texts: Sequence[str],
    files: Sequence[str],
    words: Sequence[str],
    arguments: Sequence[str],
) -> Comparison:
    """Price measured runs and fit the constants of the question's cluster to them. Raises SpecError
    for a text that says no time, or words that cannot be asked."""
    if len(texts) > MOST_RUNS:
        raise SpecError(
            f"--measured: given {len(texts)} times; at most {MOST_RUNS} runs are fitted"
        )
    with progress_line() as bar:
        line = bar.add_task("the measured runs", total=None)
        measured = [_measured(text, files, words, arguments) for text in texts]
        if any(of.task.cluster != question.task.cluster for of, *_ in measured):
            raise SpecError("--measured: all runs must be on the same cluster as the question")
        runs = [run for *_, run in measured]
        bar.update(line, description="constants that explain them")
        fitted = fit(runs)
        bar.update(line, description="causes that explain them")
        stated = _stated(measured[0][0])
        causes = explain(runs, stated)
    beside = [
        MeasuredRun(asked.task, own, of, run.priced.step_s(), fitted.step_s(run.priced)[0])
        for asked, own, of, run in measured
    ]
    return Comparison(beside, causes, fitted, nearest(measured[0][0]))


def _stated(question: Question) -> set[str]:
    """The causes that the configuration itself excludes."""
    reading = question.reading
    left_open = any(line.startswith("recomputation: ") for line in reading.derived)
    settled_so = getattr(question.knobs, "recompute", "auto") != "auto" and not left_open
    stated = {"recomputation"} if settled_so else set()
    stated |= {"overlap"} if any("overlap" in trait for trait in reading.traits) else set()
    return stated if any("8-bit" in line for line in reading.named) else stated | {"precision"}


def _measured(
    text: str, files: Sequence[str], words: Sequence[str], arguments: Sequence[str]
) -> tuple[Question, str, Measurement, Run]:
    try:
        first, *others = shlex.split(text) or [""]
    except ValueError as error:
        raise SpecError(f"--measured {text}: {error}") from None
    own = [word for word in others if "=" in word]
    keys = {word.partition("=")[0] for word in own}
    value = " ".join([first, *(word for word in others if "=" not in word)])
    given = [
        word for word in words if word.partition("=")[0] not in keys
    ]  # own words replace these
    question = ask(files, [*given, *own], arguments)
    task = question.task
    measured = measurement(value, Step(task.global_batch, task.shape.seq, task.num_gpus))
    try:
        plan = question.contender.simulated(question.task, settled(question)[0]).plan
    except InfeasibleError as error:
        raise SpecError(f"--measured {text}: {error}") from None
    run = Run(priced(plan, task), measured.step_s)
    ratio = run.measured_s / run.priced.step_s()
    if not 1 / _UNLIKE <= ratio <= _UNLIKE:
        raise SpecError(
            f"--measured {text}: a step of {run.measured_s:.3g} s, {ratio:.3g} of the price, is "
            "probably not of this run or in this unit, so nothing is fitted (check the unit, or "
            "add the words in which that run differs)"
        )
    return question, " ".join(own), measured, run


def priced(plan: Plan, task: Task) -> Priced:
    """What the price of a plan depends on."""
    return Priced(plan, task.cluster, program_of(plan))


def on_fitted(question: Question, fitted: Fitted) -> Question:
    """The question on its cluster with the fitted constants, if a machine of its kind may have
    them."""
    if fitted.beyond:
        return question
    cluster = scaled_cluster(question.task.cluster, fitted.factors)
    return replace(question, task=replace(question.task, cluster=cluster))


def nearest(question: Question) -> list[PublishedNear]:
    """The published runs that are nearest to a configuration, of the same device."""
    near = []
    for cells in priced_runs():
        same = cells["device"] == question.task.cluster.device.name
        if same and METRICS[cells["metric"]].kind in SPEEDS:
            stated = {name: cell for name, cell in cells.items() if name in COLUMNS and cell}
            place = {"url": cells["place"], "table": cells["place"]}
            row = PublishedRow.model_validate(stated | place)
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
    eight_bit = row.dtype not in ("bf16", "fp16", "fp32")
    recomputes = getattr(question.knobs, "recompute", "none") == "full"
    return (
        2 * abs(log(parameter_count(row.shape) / parameter_count(task.shape)))
        + 0.5 * abs(log(row.num_gpus / task.num_gpus))
        + 0.5 * abs(log(row.seq / task.shape.seq))
        + eight_bit
        + ((row.recompute == "full") != recomputes)
    )


@dataclass(frozen=True)
class Training:
    """A training of some tokens: its days and GPU-hours, and the boards' energy if their nominal
    power is known."""

    tokens: float
    days: float
    gpu_hours: float
    megawatt_hours: float | None

    @classmethod
    def of(cls, tokens: float, task: Task, step_s: float) -> Training:
        """The training of a task whose step takes so long."""
        seconds = tokens / (task.global_batch * task.shape.seq) * step_s
        hours = seconds / 3600 * task.num_gpus
        power = task.cluster.device.power_w
        return cls(tokens, seconds / 86400, hours, power and power * hours / 1e6)


def show_measured(comparison: Comparison, console: Console) -> None:
    """Print what grows, the runs, the causes, the constants, and the nearest published runs."""
    for run in comparison.runs:
        if grown := run.measured.grown:
            console.print(
                f"{run.measured.source}: its steps grow from {grown[0]:.3g} to {grown[1]:.3g} s. "
                "What grows while it runs (memory in fragments, a queue of data, heat) has no "
                "price: look for that first; below, the last half of the steps counts.",
                style="yellow",
            )
    table = table_of("Measured beside the price")
    table.add_column("measured", overflow="fold")
    for heading in ("step s", "tokens/s/GPU", "priced s", "times priced", "fitted s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in comparison.runs:
        of = run.measured
        log = f" ({of.lines} lines, spread {100 * of.spread:.1f} %)" if of.lines else ""
        table.add_row(
            f"{of.source}{log} {run.words}".rstrip(),
            f"{of.step_s:.3f}",
            f"{run.tokens_per_s_per_gpu:,.0f}",
            f"{run.priced_s:.3f}",
            f"{of.step_s / run.priced_s:.2f}",
            f"{run.fitted_s:.3f}",
        )
    console.print(table)
    for part in (_print_causes, _print_constants, _print_nearest):
        part(comparison, console)
        console.print()


def _print_causes(comparison: Comparison, console: Console) -> None:
    task = comparison.runs[0].task
    cluster, device = task.cluster, task.cluster.device
    power = "" if device.power_w is None else f" of {device.power_w:g} W"
    console.print(
        f"First see that the machine is the preset's, {cluster.gpus_per_node} boards {device.name}"
        f"{power} a node, {cluster.intra.bandwidth_gb_s:g} GB/s per GPU within it and "
        f"{cluster.nics_per_node} x {cluster.inter.bandwidth_gb_s:g} GB/s out of it (cluster.KEY="
        "VALUE says otherwise), and whether rows are packed of documents (model.document=N)."
    )
    console.print("What explains the gap, and how probable it is among these causes:")
    for cause in comparison.causes:
        if cause.probability < _LEAST_PROBABILITY:
            continue
        steps = ", ".join(f"{step_s:.3f}" for step_s in cause.steps_s)
        words = f": {cause.words} (then {steps} s per step)" if cause.words else ""
        indented(f"{100 * cause.probability:3.0f} %  {cause.cause}{words}", console)
    first = comparison.causes[0]
    if first.probability < _SURE:
        console.print("None stands out; runs that differ more in GPUs or degrees would tell more.")
    elif first.words and first.cause not in {constant.cause for constant in CONSTANTS}:
        console.print(
            f"The likeliest, {first.cause}, is none of the constants that are fitted below: mend "
            "it, or say it in the configuration, and measure again before relying on them.",
            style="yellow",
        )


def _print_constants(comparison: Comparison, console: Console) -> None:
    changed = [
        f"{factor:.2f} ({low:.2f} to {high:.2f})  {name}"
        for name, (factor, low, high) in comparison.fitted.intervals().items()
        if abs(factor - 1) >= _LEAST_CHANGE
    ]
    if changed:
        console.print(
            "Constants of this cluster that explain the runs, as factors on those of the preset "
            f"{comparison.runs[0].task.cluster.name} (and where they are with 90 %); "
            + ("not used for prices" if comparison.fitted.beyond else "all prices are with these")
            + ":"
        )
    for line in changed:
        indented(line, console)
    for constant, factor in comparison.fitted.beyond.items():
        indented(
            f"{constant.name}: {factor:.2f} is beyond {constant.low} to {constant.high}, by which "
            "machines of one kind differ; did another configuration run?",
            console,
            style="yellow",
        )


def _print_nearest(comparison: Comparison, console: Console) -> None:
    if not comparison.near:
        return
    console.print("Published runs that are nearest to the first measured one:")
    mine = comparison.runs[0]
    own = mine.task.global_batch * mine.task.shape.seq / mine.task.num_gpus / mine.priced_s
    for near in comparison.near:
        row = near.row
        ratio = mine.tokens_per_s_per_gpu / near.tokens_per_s_per_gpu
        indented(
            f"{row.model} on {row.num_gpus} x {row.device}, sequence {row.seq}, {row.dtype}: "
            f"{near.tokens_per_s_per_gpu:,.0f} tokens/s/GPU; yours is {ratio:.2f} of it, and would "
            f"be {own / near.priced:.2f} by the prices of both ({row.source}, {row.table})",
            console,
        )


def show_training(
    tokens: float, answer: Answer, comparison: Comparison | None, console: Console
) -> None:
    """Print how long the question's plan takes for this many tokens."""
    task, step_s = answer.question.task, answer.asked.step_s
    training = Training.of(tokens, task, step_s)
    words = (
        f"For {tokens / 1e9:,g} billion tokens: {training.days:,.1f} days, "
        f"{training.gpu_hours:,.0f} GPU-hours"
    )
    if comparison is not None:
        plan = answer.asked.result.plan
        preset = comparison.runs[0].task.cluster
        within = comparison.fitted.step_s(priced(plan, replace(task, cluster=preset)))
        low, high = (Training.of(tokens, task, end).days for end in within[1:])
        words += f" ({low:,.1f} to {high:,.1f} days with 90 %)"
    if training.megawatt_hours is not None:
        words += (
            f", {training.megawatt_hours:,.1f} MWh at the boards' nominal power, hosts left out"
        )
    console.print(f"{words}.")
