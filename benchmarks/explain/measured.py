"""Measured runs beside their prices: the cause of the gap, constants that explain it, the nearest
published runs, and how long a training would take.

A measured run is the configuration of the question, with the words that stand behind its time; the
preset of its cluster is where the fit of the constants begins.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from benchmarks.explain.answer import settled
from benchmarks.explain.question import Question, ask
from benchmarks.measured.causes import Explanation, explain
from benchmarks.measured.fit import Fitted, Priced, Run, fit, scaled_cluster
from benchmarks.measured.logs import Measurement, Step, measurement
from benchmarks.specification import SpecError
from benchmarks.specification.progress import progress_line
from benchmarks.validation.ratio_errors import priced_runs
from benchmarks.validation.rows import COLUMNS, METRICS, POWER_W, SPEEDS, PublishedRow
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
        causes = explain(runs)
    beside = [
        MeasuredRun(asked.task, own, of, run.priced.step_s(), fitted.step_s(run.priced)[0])
        for asked, own, of, run in measured
    ]
    return Comparison(beside, causes, fitted, nearest(measured[0][0]))


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
        plan = question.contender.simulated(question.own_task, settled(question)).plan
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
    """The question on its cluster with the fitted constants."""
    cluster = scaled_cluster(question.task.cluster, fitted.factors)
    tasks = {name: getattr(question, name) for name in ("task", "own_task")}
    return replace(question, **{n: replace(task, cluster=cluster) for n, task in tasks.items()})


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
    return [_near(row, price) for far, row, price in near[:_NEAREST] if far < _FAR]


def _near(row: PublishedRow, price: float) -> PublishedNear:
    step_s = measured_s(row, cluster_of(row).device)
    reached = row.global_batch * row.seq / row.num_gpus / step_s
    ratio = row.measured / price if row.measure.kind == "time" else price / row.measured
    return PublishedNear(row, reached, reached * ratio)


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
    """A training of so many tokens: its days and GPU-hours, and the boards' energy if their nominal
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
        power: Any = POWER_W.get(task.cluster.device.name)
        return cls(tokens, seconds / 86400, hours, power and power * hours / 1e6)
