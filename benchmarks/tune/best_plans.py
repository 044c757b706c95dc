"""The best plan of every contender on a cluster: the search, its table, and the commands and other
programs' arguments that run what it found (``zeropp tune``)."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from rich.console import Console

from benchmarks.explain.need import need_lines
from benchmarks.explain.screen import PLAN_WORDS, PlanLine, lost, table_of_plans, written_as
from benchmarks.records.record import write_atomically
from benchmarks.report.network import network_answer
from benchmarks.report.searches import Best, search_rows
from benchmarks.specification import SpecError
from benchmarks.specification.command import check_writable
from benchmarks.specification.contenders import CONTENDERS, ROWS, setting_of, sides
from benchmarks.specification.reading import beside_preset, flat, validated
from benchmarks.specification.run_spec import SearchSpec, check_heads, check_priced
from zeropp.choose.contender import describe, overrides
from zeropp.choose.search import SLOWER
from zeropp.choose.task import Task
from zeropp.price import compute_limit
from zeropp.types.literals import FROM_0_TO_1, MORE_THAN_0, Settings


@dataclass(frozen=True, kw_only=True)
class TuneSpec(SearchSpec):
    """The keys of ``conf/tune.yaml``, checked."""

    contenders: tuple[str, ...]
    tolerance: Annotated[float, FROM_0_TO_1]
    budget: Annotated[float, MORE_THAN_0] = 60.0  # seconds for all searches together
    settings: Settings = "users"
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
        raise SpecError(f"contenders=[]: must be some of {', '.join(ROWS)}")
    if unknown := [name for name in spec.contenders if name not in ROWS]:
        raise SpecError(f"contenders={unknown[0]!r}: must be among {', '.join(ROWS)}")
    check_priced(spec.cluster, spec.precision)
    if spec.out is not None:
        check_writable("out", Path(spec.out))
    return spec


def searched(spec: TuneSpec) -> tuple[list[Best], list[str]]:
    """Search all rows, and print each one's best plan as it comes; returns them, and the labels of
    those whose searches were stopped."""

    def tell(best: Best) -> None:
        words = f"{best.none} with {best.room.words}"
        if best.winner is not None:
            speed = best.winner.result.tokens_per_s_per_gpu
            words = f"{best.winner.step_s:.3g} s, {speed:,.0f} tokens/s/GPU"
            words += f" ({describe(best.winner.plan)})"
        print(f"{best.label}: {words}", flush=True)

    rows = [side.name for name in spec.contenders for side in sides(ROWS[name])]
    found = search_rows(
        spec.task,
        rows,
        spec.budget,
        tell,
        settings=spec.settings,
        memory_margin=spec.memory_margin,
        tolerance=spec.tolerance,
    )
    names = {best.name for best in found}
    return found, [ROWS[name].label for name in rows if name not in names]


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 150)


def show_answer(task: Task, bests: list[Best], missing: list[str]) -> None:
    """Print whether the case needs tensor parallelism: last, where a reader looks first."""
    print()
    for line in need_lines(task, bests, missing):
        _console().print(line, highlight=False)


def show(task: Task, bests: list[Best], tolerance: float) -> None:
    """Print all best plans, what they lose, and how the searches went, which may have left out
    plans that are faster by up to ``tolerance``. A narrow terminal has the plans below the table.
    """
    console = _console()
    narrow = console.width < 120
    fitting = [best.winner for best in bests if best.winner is not None]
    quickest = min(fitting, key=lambda winner: winner.step_s, default=None)
    lines = []
    for best in bests:
        mark, style = ("* ", "bold") if best.winner and best.winner is quickest else ("", "")
        lines.append(PlanLine(mark + best.label, best.winner, f"{best.gap:.1%}", style))
    heads = ["program", *(["plan"] * (not narrow)), "step s", "tokens/s/GPU", "of limit"]
    heads += ["peak GiB", "gap"]
    cluster = task.cluster
    title = (
        f"{task.shape.name}, {task.num_gpus} x {cluster.name} ({cluster.gpus_per_node} in a node "
        f"with {cluster.nics_per_node} x {cluster.inter.bandwidth_gb_s * 8:g} Gb/s), global batch "
        f"{task.global_batch}: best plans, simulated (* the fastest)"
    )
    table = table_of_plans(title, heads, lines)
    table.caption = (
        "gap: by how much a plan that was not looked at may be faster, of those that may be by "
        f"more than {tolerance:.0%} (tolerance=)."
    )
    if narrow:
        plans = [f"{b.label}: {describe(b.winner.plan)}" for b in bests if b.winner]
        table.caption += f" Plans: {'; '.join(plans)}."
    table.caption_justify = "left"
    console.print(table)
    console.print(PLAN_WORDS, style="dim")
    limit = compute_limit(task.shape, task.cluster, task.num_gpus, task.precision)
    tell = partial(console.print, highlight=False)
    tell(
        f"Compute limit: {limit.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, the model's kernels alone "
        f"at {limit.microbatch_size} sequences per microbatch."
    )
    if words := network_answer(bests):
        tell(words)
    for best in bests:
        words = f"{best.label}: {best.none} with {best.room.words}"
        if best.winner:
            words = f"{best.label} loses {lost(best.winner.result, 0.0005)}"
        reasons = Counter[str]()
        for outcome in best.searched:
            reasons.update(outcome.rejected)
        pruned = reasons.pop(SLOWER, 0)
        simulated = sum(outcome.simulated for outcome in best.searched)
        why = ", ".join(f"{reason} ({count:,})" for reason, count in reasons.most_common(3))
        words += f"; {simulated:,} simulated, {pruned:,} pruned by their bounds"
        tell(f"{words}{f'; impossible: {why}' * (best.winner is None)}.")
        for words in best.refusals():
            tell(f"{best.label} {words}.")
    for best in bests:
        if best.winner and best.winner.plan.layout.pp > 1 and best.outcome.contender.caveat:
            tell(best.outcome.contender.caveat)


def print_commands(spec: TuneSpec, outcomes: list[Best]) -> None:
    """Print the command of every winner that can be run, and write it into ``out`` as an
    experiment, in which model and cluster are presets, with what was asked for otherwise."""
    cell: dict[str, Any] = {"num_gpus": spec.num_gpus, "global_batch": spec.global_batch}
    cell["precision"] = spec.precision
    presets = {"model": spec.model.name, "cluster": spec.cluster.name}
    other = {group: beside_preset(group, getattr(spec, group)) for group in presets}
    words = [f"{key}={value}" for key, value in (presets | cell).items()]
    words += chain.from_iterable(flat(values, group) for group, values in other.items())
    for outcome in outcomes:
        winner, contender, name = outcome.winner, outcome.outcome.contender, outcome.name
        if winner is None or contender.name not in CONTENDERS:  # others are simulated only
            continue
        candidate = winner.candidate
        runs = contender.runs(candidate.knobs)
        command = " ".join(["zeropp run", *words, *overrides(candidate)])
        if spec.out is not None:
            groups = presets | {"contender": candidate.knobs.name}
            values = cell | other | {"microbatch_size": candidate.microbatch_size}
            values["contender"] = asdict(candidate.knobs)
            defaults = [{f"override /{group}": preset} for group, preset in groups.items()]
            body = OmegaConf.to_yaml(OmegaConf.create({"defaults": defaults} | values))
            path = Path(spec.out) / "experiment" / f"best_{name}.yaml"
            write_atomically(path, f"# @package _global_\n{body}")
            command = f"zeropp run --config-dir {spec.out} experiment={path.stem}"
        does = "runs its plan" if runs else "simulates its plan, which this suite does not run"
        command += "" if runs else " launcher=simulate"
        print(f"\n# {outcome.label}: this {does}\n{command}")


def write_pictures(task: Task, out: Path, outcomes: list[Best]) -> None:
    """Write the page of the atlas for this one case, and the timelines of the best plans."""
    import pandas as pd  # only for pictures, as what follows

    from benchmarks.records.simulated import BASES, plan_record, prediction
    from benchmarks.report.atlas_page import write_page
    from benchmarks.report.frame import latest_ok, row_of
    from benchmarks.report.timelines import timeline_figure

    records, timelines = [], []
    for outcome in outcomes:
        known: dict[str, Any] = {"words": outcome.none}
        if (winner := outcome.winner) is not None:
            known = {"words": describe(winner.plan), "setting": setting_of(winner.candidate)}
            known["predicted"] = prediction(winner.result)
            title = f"{outcome.label}: {known['words']}"
            timelines.append(replace(winner.result.timeline(), title=title))
        found = {"gap": outcome.gap}
        records.append(plan_record(task, outcome.name, BASES["own"], found=found, **known))
    timeline_figure(timelines).savefig(out / "timelines.svg")
    left_out = write_page(latest_ok(pd.DataFrame(map(row_of, records))), out / "atlas.html")
    print(f"\n{left_out or f'{out}/atlas.html: this case as a page'}; timelines.svg: the plans")


def print_arguments(dialect: str, outcomes: list[Best]) -> None:
    """Print every winner as another program's arguments, or why it has none there."""
    for outcome in outcomes:
        if (winner := outcome.winner) is None:
            continue
        print(f"\n# {outcome.label} as {dialect}'s arguments")
        try:
            print(written_as(dialect, winner.plan, winner.candidate))
        except SpecError as error:
            print(f"# none: {error}")
