"""Finds the best feasible plan of every contender on a cluster, by the simulator.

    python -m benchmarks.tune model=gpt_14_6b cluster=a800 num_gpus=64 global_batch=512

The same code (``zeropp.tune``) searches for all contenders under the same memory limit and global
batch. For each winner it prints the command that runs it, and with ``out=FOLDER`` it writes an
experiment file. The exit status is 0, or 2 with one line on bad input or if nothing fits. Every
number is simulated, and for PP x ZeRO-3 with gathers per unit (ZeroPP) there is no published
measurement to compare it with.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.records.record import write_atomically
from benchmarks.specification.command import (
    check_writable,
    run_command,
    told,
    workers,
)
from benchmarks.specification.compose import compose
from benchmarks.specification.contenders import CONTENDERS, PRICED
from benchmarks.specification.run_spec import (
    SpecError,
    TaskSpec,
    check_heads,
    check_priced,
    validated,
)
from zeropp.cost import compute_limit
from zeropp.literals import AT_LEAST_0
from zeropp.plan import Candidate
from zeropp.tune.contender import describe, overrides
from zeropp.tune.search import Evaluated, Outcome, search


@dataclass(frozen=True, kw_only=True)
class TuneSpec(TaskSpec):
    """The keys of ``conf/tune.yaml``, checked."""

    contenders: tuple[str, ...]
    tolerance: Annotated[float, AT_LEAST_0]
    out: str | None = None

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


def main() -> int:
    """Run the command line, whose keys are those of ``conf/tune.yaml``; returns its exit status."""
    return run_command(_tune)


def _tune() -> int:
    specs = [_checked(config) for config in compose("tune")]
    statuses = []
    for spec in specs:
        outcomes = tune(spec)
        show(outcomes)
        statuses.append(hand_over(spec, outcomes))
    return max(statuses, default=0)


def hand_over(spec: TuneSpec, outcomes: list[Outcome[Any]]) -> int:
    """Print the command of every winner that can be run, and write it into ``out`` as an
    experiment. Returns 2 if no contender has a plan that fits, else 0."""
    winners = [outcome.winner for outcome in outcomes if outcome.winner is not None]
    if not winners:
        print("error: no plan of any contender fits (try more GPUs)", file=sys.stderr)
        return 2
    cell: dict[str, Any] = {"num_gpus": spec.num_gpus, "global_batch": spec.global_batch}
    cell["precision"] = spec.precision
    words = [f"model={spec.model.name}", f"cluster={spec.cluster.name}"]
    words += [f"{key}={value}" for key, value in cell.items()]
    for winner in winners:
        name = winner.candidate.knobs.name
        if name not in CONTENDERS:  # it is priced only
            continue
        command = " ".join(["python -m benchmarks.run", *words, *overrides(winner.candidate)])
        if spec.out is not None:
            path = Path(spec.out) / "experiment" / f"best_{name}.yaml"
            check_writable("out", Path(spec.out))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, _experiment(spec, cell, winner.candidate))
            command = f"python -m benchmarks.run --config-dir {spec.out} experiment={path.stem}"
        print(command)
    return 0


def _experiment(spec: TuneSpec, cell: dict[str, Any], candidate: Candidate[Any]) -> str:
    """The YAML of a Hydra experiment that runs one candidate; model and cluster are presets."""
    groups = {"model": spec.model.name, "cluster": spec.cluster.name}
    groups["contender"] = candidate.knobs.name
    values = cell | {"microbatch_size": candidate.microbatch_size}
    values["contender"] = asdict(candidate.knobs)
    defaults = [{f"override /{group}": name} for group, name in groups.items()]
    body = OmegaConf.to_yaml(OmegaConf.create({"defaults": defaults} | values))
    return f"# @package _global_\n{body}"


def tune(spec: TuneSpec) -> list[Outcome[Any]]:
    """Search all contenders, one process per core, with a progress line on the terminal.

    Those that take longest are begun first; the outcomes are in the order of ``spec.contenders``.
    """
    if len(spec.contenders) == 1:
        return [search_one(spec, spec.contenders[0])]
    slow_first = sorted(spec.contenders, key=_search_effort, reverse=True)
    with workers(min(os.cpu_count() or 1, len(spec.contenders))) as pool:
        waiting = {name: pool.submit(search_one, spec, name) for name in slow_first}
        for _ in told(as_completed(waiting.values()), len(waiting), "contenders"):
            pass
        return [waiting[name].result() for name in spec.contenders]


def _search_effort(name: str) -> int:
    return PRICED[name].search_effort


def search_one(spec: TuneSpec, name: str) -> Outcome[Any]:
    """Search one contender."""
    return search(spec.task, PRICED[name], tolerance=spec.tolerance)


def show(outcomes: list[Outcome[Any]]) -> None:
    """Print winner and runner-up of every contender, and why other configurations failed."""
    task = outcomes[0].task
    table = Table(
        title=f"{task.shape.name}, {task.num_gpus} x {task.cluster.name}, global batch "
        f"{task.global_batch}: best plans (simulated)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("contender", "plan", "step s", "tokens/s/GPU", "of limit", "peak GiB"):
        table.add_column(heading, justify="left" if heading in ("contender", "plan") else "right")
    for outcome in outcomes:
        if outcome.winner is None:
            table.add_row(outcome.contender.label, "no plan fits", "-", "-", "-", "-")
        for label, found in (
            (outcome.contender.label, outcome.winner),
            ("  runner-up", outcome.runner_up),
        ):
            if found is not None:
                table.add_row(label, *_row(found))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    limit = compute_limit(task.shape, task.cluster, task.num_gpus, task.precision)
    console.print(
        f"Compute limit: {limit.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, the model's kernels alone "
        f"at {limit.microbatch_size} sequences per microbatch."
    )
    for outcome in outcomes:
        console.print(_lost(outcome))
    for outcome in outcomes:
        reasons = ", ".join(
            f"{reason} ({count:,})" for reason, count in outcome.rejected.most_common()
        )
        console.print(
            f"{outcome.contender.label}: {outcome.simulated} simulated, others failed: {reasons}"
        )
    for outcome in outcomes:
        if outcome.contender.caveat:
            console.print(outcome.contender.caveat)


def _row(found: Evaluated[Any]) -> tuple[str, ...]:
    result = found.result
    return (
        describe(found.plan),
        f"{result.step_s:.3f}",
        f"{result.tokens_per_s_per_gpu:,.0f}",
        f"{100 * result.limit_share:.1f} %",
        f"{result.peak_bytes / 2**30:.1f}",
    )


def _lost(outcome: Outcome[Any]) -> str:
    """The shares of the winner's step that it loses against the compute limit, by cause, the
    largest first."""
    if outcome.winner is None:
        return f"{outcome.contender.label}: no plan fits"
    result = outcome.winner.result
    kinds = result.losses.by_kind()
    del kinds["limit"]
    words = [
        f"{kind.replace('_', ' ')} {100 * seconds / result.step_s:.1f} %"
        for kind, seconds in sorted(kinds.items(), key=itemgetter(1), reverse=True)
        if abs(seconds) >= 0.0005 * result.step_s
    ]
    return f"{outcome.contender.label} loses: " + ", ".join(words)


def _checked(values: object) -> TuneSpec:
    spec = validated(TuneSpec, values)
    check_heads(spec.model)
    if not spec.contenders:
        raise SpecError(f"contenders=[]: must be some of {', '.join(PRICED)}")
    unknown = [name for name in spec.contenders if name not in PRICED]
    if unknown:
        raise SpecError(f"contenders={unknown[0]!r}: must be among {', '.join(PRICED)}")
    check_priced(spec.cluster, spec.precision)
    return spec


if __name__ == "__main__":
    sys.exit(main())
