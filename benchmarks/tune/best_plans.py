"""The best plan of every contender on a cluster: the search, its table, and the commands and other
programs' arguments that run what it found (``zeropp tune``)."""

from __future__ import annotations

import os
import sys
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from rich.console import Console

from benchmarks.explain.screen import PlanLine, lost, spare, table_of_plans, told_apart, written_as
from benchmarks.records.record import write_atomically
from benchmarks.report.ratio_errors import NOTE, ratio_text
from benchmarks.specification import SpecError
from benchmarks.specification.command import check_writable, workers
from benchmarks.specification.contenders import CONTENDERS, PRICED, setting_of
from benchmarks.specification.progress import progress_line
from benchmarks.specification.reading import validated
from benchmarks.specification.run_spec import SearchSpec, check_heads, check_priced
from zeropp.choose.contender import describe, overrides
from zeropp.choose.search import SLOWER, Outcome, search
from zeropp.price import compute_limit
from zeropp.types.literals import FROM_0_TO_1

_TELL_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class TuneSpec(SearchSpec):
    """The keys of ``conf/tune.yaml``, checked."""

    contenders: tuple[str, ...]
    tolerance: Annotated[float, FROM_0_TO_1]
    out: str | None = None
    arguments_as: Literal["torchtitan", "megatron", "overrides"] | None = None

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


def checked(values: dict[str, Any]) -> TuneSpec:
    """The configuration as a specification; raises SpecError with one line for a mistake."""
    if isinstance(values["contenders"], str):  # contenders=zeropp
        values = values | {"contenders": [values["contenders"]]}
    spec = validated(TuneSpec, values)
    check_heads(spec.model)
    if not spec.contenders:
        raise SpecError(f"contenders=[]: must be some of {', '.join(PRICED)}")
    if unknown := [name for name in spec.contenders if name not in PRICED]:
        raise SpecError(f"contenders={unknown[0]!r}: must be among {', '.join(PRICED)}")
    check_priced(spec.cluster, spec.precision)
    if spec.out is not None:
        check_writable("out", Path(spec.out))
    return spec


def searched(spec: TuneSpec) -> list[Outcome[Any]]:
    """Search all contenders under the same memory limit and global batch, one process per core.

    Those that take longest are begun first; the outcomes are in the order of ``spec.contenders``.
    """
    slow_first = sorted(spec.contenders, key=lambda name: -PRICED[name].search_effort)
    begin = partial(search, tolerance=spec.tolerance)
    count = min(os.cpu_count() or 1, len(spec.contenders))
    with workers(count) as pool, progress_line() as bar:
        waiting = {name: pool.submit(begin, spec.task, PRICED[name]) for name in slow_first}
        line = bar.add_task("", total=len(waiting))
        while left := [name for name, found in waiting.items() if not found.done()]:
            done = len(waiting) - len(left)
            bar.update(line, completed=done, description=f"searching {', '.join(left)}")
            wait([waiting[name] for name in left], _TELL_EVERY_S, FIRST_COMPLETED)
        return [waiting[name].result() for name in spec.contenders]


def show(outcomes: list[Outcome[Any]]) -> None:
    """Print winner and runner-up of every contender, what they lose, and how the search went. A
    narrow terminal has the plans below the table."""
    task, console = outcomes[0].task, Console(width=None if sys.stdout.isatty() else 150)
    narrow = console.width < 120
    winners = [outcome.winner for outcome in outcomes if outcome.winner is not None]
    best = min(winners, key=lambda winner: winner.step_s, default=None)
    base = next((o for o in outcomes if o.winner is not None), None) if len(outcomes) > 1 else None
    lines = []
    for outcome in outcomes:
        label = outcome.contender.label
        if outcome.winner is None:
            lines.append(PlanLine(label, None, "-"))
        for name, plan in ((label, outcome.winner), ("  runner-up", outcome.runner_up)):
            if plan is None:
                continue
            gain = ""
            if base and base.winner:
                ratio = base.winner.step_s / plan.step_s
                gain = ratio_text(ratio, one_program=outcome is base)
            mark, style = ("* ", "bold") if plan is best else ("", "")
            lines.append(PlanLine(mark + name, plan, gain, style))
    heads = ["contender", *(["plan"] * (not narrow)), "step s", "tokens/s/GPU"]
    heads += [*(["speed-up"] * bool(base)), "of limit", "peak GiB"]
    title = (
        f"{task.shape.name}, {task.num_gpus} x {task.cluster.name}, global batch "
        f"{task.global_batch}: best plans, simulated (* the fastest)"
    )
    table = table_of_plans(title, heads, lines)
    table.caption = f"Speed-up over {base.contender.label}. {NOTE} " if base else ""
    if narrow:
        plans = [f"{o.contender.label}: {describe(o.winner.plan)}" for o in outcomes if o.winner]
        table.caption += f"Plans: {'; '.join(plans)}."
    table.caption_justify = "left"
    console.print(table)
    limit = compute_limit(task.shape, task.cluster, task.num_gpus, task.precision)
    tell = partial(console.print, highlight=False)
    first, *others = [line for line in lines if "runner-up" not in line.name]
    for line in others:
        if words := told_apart((first, line)):
            tell(words.replace("* ", ""))
    tell(
        f"Compute limit: {limit.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, the model's kernels alone "
        f"at {limit.microbatch_size} sequences per microbatch."
    )
    for outcome in outcomes:
        winner = outcome.winner
        words = f"no plan fits with {task.memory_margin:.0%} to spare"
        if winner:
            words = f"fits with {spare(winner, task)} to spare; loses {lost(winner.result, 0.0005)}"
        tell(f"{outcome.contender.label}: {words}.")
    for outcome in outcomes:
        reasons = dict(outcome.rejected.most_common())
        pruned = reasons.pop(SLOWER, 0)
        words = f"{outcome.simulated:,} simulated, {pruned:,} pruned by their bounds"
        why = ", ".join(f"{reason} ({count:,})" for reason, count in reasons.items())
        words += f", {sum(reasons.values()):,} impossible: {why}" * bool(reasons)
        tell(f"{outcome.contender.label}: {words}.")
    for outcome in outcomes:
        if outcome.contender.caveat:
            tell(outcome.contender.caveat)


def print_commands(spec: TuneSpec, outcomes: list[Outcome[Any]]) -> None:
    """Print the command of every winner that can be run, and write it into ``out`` as an
    experiment, in which model and cluster are presets."""
    cell: dict[str, Any] = {"num_gpus": spec.num_gpus, "global_batch": spec.global_batch}
    cell["precision"] = spec.precision
    presets = {"model": spec.model.name, "cluster": spec.cluster.name}
    words = [f"{key}={value}" for key, value in (presets | cell).items()]
    for outcome in outcomes:
        winner, name = outcome.winner, outcome.contender.name
        if winner is None or name not in CONTENDERS:  # others are priced only
            continue
        candidate = winner.candidate
        runs = outcome.contender.runs(candidate.knobs)
        command = " ".join(["zeropp run", *words, *overrides(candidate)])
        if spec.out is not None:
            groups = presets | {"contender": candidate.knobs.name}
            values = cell | {"microbatch_size": candidate.microbatch_size}
            values["contender"] = asdict(candidate.knobs)
            defaults = [{f"override /{group}": preset} for group, preset in groups.items()]
            body = OmegaConf.to_yaml(OmegaConf.create({"defaults": defaults} | values))
            path = Path(spec.out) / "experiment" / f"best_{name}.yaml"
            write_atomically(path, f"# @package _global_\n{body}")
            command = f"zeropp run --config-dir {spec.out} experiment={path.stem}"
        does = "runs its plan" if runs else "prices its plan, which cannot be run here"
        command += "" if runs else " launcher=simulate"
        print(f"\n# {outcome.contender.label}: this {does}\n{command}")


def write_pictures(out: Path, outcomes: list[Outcome[Any]]) -> None:
    """Write the page of the atlas for this one case, and the timelines of the best plans."""
    import pandas as pd  # only for pictures, as what follows

    from benchmarks.records.simulated import BASES, plan_record, prediction
    from benchmarks.report.atlas_page import write_page
    from benchmarks.report.frame import latest_ok, row_of
    from benchmarks.report.timelines import timeline_figure

    records, timelines = [], []
    for outcome in outcomes:
        known: dict[str, Any] = {"words": "no plan fits"}
        if (winner := outcome.winner) is not None:
            known = {"words": describe(winner.plan), "setting": setting_of(winner.candidate)}
            known["predicted"] = prediction(winner.result)
            title = f"{outcome.contender.label}: {known['words']}"
            timelines.append(replace(winner.result.timeline(), title=title))
        name = outcome.contender.name
        records.append(plan_record(outcome.task, name, BASES["best"], **known))
    timeline_figure(timelines).savefig(out / "timelines.svg")
    left_out = write_page(latest_ok(pd.DataFrame(map(row_of, records))), out / "atlas.html")
    print(f"\n{left_out or f'{out}/atlas.html: this case as a page'}; timelines.svg: the plans")


def print_arguments(dialect: str, outcomes: list[Outcome[Any]]) -> None:
    """Print every winner as another program's arguments, or why it has none there."""
    for outcome in outcomes:
        if (winner := outcome.winner) is None:
            continue
        print(f"\n# {outcome.contender.label} as {dialect}'s arguments")
        try:
            print(written_as(dialect, winner.plan, winner.candidate))
        except SpecError as error:
            print(f"# none: {error}")
