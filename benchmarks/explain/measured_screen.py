"""Prints measured runs beside their prices, and how long a training would take."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from benchmarks.explain.answer import Answer
from benchmarks.explain.measured import Comparison, Training, priced
from benchmarks.explain.screen import indented, table_of
from benchmarks.measured.fit import CONSTANTS

_LEAST_PROBABILITY = 0.05
_SURE = 0.5  # a probability from which on a cause is worth acting on
_LEAST_CHANGE = 0.02  # of a constant that is shown


def show_measured(comparison: Comparison, console: Console) -> None:
    """Print the runs, the causes, the constants, and the nearest published runs."""
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
            f"{comparison.runs[0].task.cluster.name} (and where they are with 90 %); all prices "
            "below are with these:"
        )
    for line in changed:
        indented(line, console)
    for constant, factor in zip(CONSTANTS, comparison.fitted.factors, strict=True):
        if not constant.low <= factor <= constant.high:
            indented(
                f"{constant.name}: {factor:.2f} is beyond {constant.low} to {constant.high}, by "
                "which machines of one kind differ; did another configuration run?",
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
    """Print how long the question's plan takes for so many tokens."""
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
