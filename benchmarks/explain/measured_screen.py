"""Prints measured runs beside their prices, and how long a training would take."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from benchmarks.explain.answer import Answer
from benchmarks.explain.measured import Comparison, MeasuredRun, Training, priced
from benchmarks.explain.screen import table_of
from benchmarks.measured.causes import NO_CAUSE
from benchmarks.measured.fit import RUN_ERROR

_LEAST_PROBABILITY = 0.05
_LEAST_CHANGE = 0.02  # of a constant that is shown


def show_measured(comparison: Comparison, console: Console) -> None:
    """Print the runs, the causes, the constants, and the nearest published runs."""
    table = table_of("Measured beside the price")
    for heading in (
        "measured",
        "step s",
        "tokens/s/GPU",
        "priced s",
        "measured/priced",
        "fitted s",
    ):
        table.add_column(heading, justify="left" if heading == "measured" else "right")
    for run in comparison.runs:
        table.add_row(
            _source(run),
            f"{run.measured.step_s:.3f}",
            f"{run.tokens_per_s_per_gpu:,.0f}",
            f"{run.priced_s:.3f}",
            f"{run.measured.step_s / run.priced_s:.2f}",
            f"{run.fitted_s:.3f}",
        )
    console.print(table)
    _print_causes(comparison, console)
    _print_constants(comparison, console)
    _print_nearest(comparison, console)


def _source(run: MeasuredRun) -> str:
    measured = run.measured
    if measured.steps == 1:
        return measured.source
    return f"{measured.source} ({measured.steps} steps, spread {100 * measured.spread:.1f} %)"


def _print_causes(comparison: Comparison, console: Console) -> None:
    console.print("What explains the gap, and how probable it is among these causes:")
    for cause in comparison.causes:
        if cause.probability < _LEAST_PROBABILITY:
            continue
        words = (
            f", best by: {cause.words}" if cause.words else f" ({100 * RUN_ERROR:.0f} % of time)"
        )
        steps = ", ".join(f"{step_s:.3f}" for step_s in cause.steps_s)
        where = "" if cause.cause == NO_CAUSE else f", priced {steps} s"
        console.print(f"  {100 * cause.probability:3.0f} %  {cause.cause}{words}{where}")


def _print_constants(comparison: Comparison, console: Console) -> None:
    words = [
        f"{name} {factor:.2f} ({low:.2f} to {high:.2f})"
        for name, (factor, low, high) in comparison.fitted.intervals().items()
        if abs(factor - 1) >= _LEAST_CHANGE
    ]
    if words:
        console.print(f"Fitted, over the preset's, with 90 %: {'; '.join(words)}.")
        console.print("All that follows is priced with these constants.")


def _print_nearest(comparison: Comparison, console: Console) -> None:
    if not comparison.near:
        return
    console.print("Published runs that are nearest to the first measured one:")
    mine = comparison.runs[0]
    own = mine.task.global_batch * mine.task.shape.seq / mine.task.num_gpus / mine.priced_s
    for near in comparison.near:
        row = near.row
        ratio = mine.tokens_per_s_per_gpu / near.tokens_per_s_per_gpu
        console.print(
            f"  {row.model} on {row.num_gpus} x {row.device}, sequence {row.seq}, {row.dtype} "
            f"({row.source}, {row.table}): {near.tokens_per_s_per_gpu:,.0f} tokens/s/GPU; yours is "
            f"{ratio:.2f} of it, and {own / near.priced:.2f} by the prices of both"
        )


def show_training(
    tokens: float, answer: Answer, comparison: Comparison | None, console: Console
) -> None:
    """Print how long the question's plan takes for so many tokens."""
    task, step_s = answer.question.task, answer.asked.step_s
    training = Training.of(tokens, task, step_s)
    words = (
        f"For {tokens:.3g} tokens: {training.days:,.1f} days, {training.gpu_hours:,.0f} GPU-hours"
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
