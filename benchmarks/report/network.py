"""What the network between nodes may do to an answer, where nobody has measured it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.report.ratio_errors import factor
from benchmarks.report.searches import MOST_GAP, Best
from zeropp.choose.contender import Contender
from zeropp.choose.task import Candidate, Task
from zeropp.price.cluster import NETWORK_PRIOR, network_range

_MEASURE = (
    "Measure this first (all_reduce_perf of nccl-tests over your nodes) and give its busbw, or a "
    "row of its table: cluster.busbw_gb_s=N."
)


def network_steps(
    contender: Contender[Any], task: Task, candidate: Candidate[Any]
) -> tuple[float, float] | None:
    """Seconds of a plan's step with the slowest and with the fastest network that the cluster may
    have (``zeropp.price.cluster.network_range``); None where its rate was measured, or where there
    is one node. This is the one place that turns the prior into a range of prices."""
    ends = network_range(task.cluster, task.num_gpus)
    if ends is None:
        return None
    slow, fast = (contender.simulated(replace(task, cluster=end), candidate) for end in ends)
    return slow.step_s, fast.step_s


def network_words(steps: tuple[float, float]) -> str:
    """The range of a step over what the network may reach, and whether it is to be measured first:
    where it moves the step more than the simulator errs in a ratio."""
    words = "The network between nodes was not measured: a step of " + " or ".join(
        f"{seconds:.3f} s at {share:.0%} of its nominal rate"
        for seconds, share in zip(steps, NETWORK_PRIOR, strict=True)
    )
    decides = steps[0] / steps[1] >= factor(one_program=True)
    return f"{words}. {_MEASURE if decides else 'It decides little.'}"


def network_answer(bests: Sequence[Best]) -> str:
    """Which of the best plans is the fastest at either end of what the network may reach, with the
    speed without tensor parallelism over that with it, and whether it is to be measured first:
    where that is another one. Empty where it was measured."""
    ends: tuple[list[tuple[float, str, bool]], ...] = ([], [])
    for best in bests:
        if plan := best.winner:
            steps = network_steps(best.outcome.contender, best.outcome.task, plan.candidate)
            for found, step_s in zip(ends, steps or (), strict=bool(steps)):
                found.append((step_s, best.label, plan.plan.layout.tp > 1))
    if not ends[0]:
        return ""
    is_cut = any(best.gap > MOST_GAP for best in bests)
    words = "; ".join(
        f"at {share:.0%} of its nominal rate, {_fastest(found, is_cut)}"
        for found, share in zip(ends, NETWORK_PRIOR, strict=True)
    )
    told = f"The network between nodes was not measured. The fastest of these plans: {words}."
    return told + f" {_MEASURE}" * (min(ends[0])[1] != min(ends[1])[1])


def _fastest(plans: list[tuple[float, str, bool]], is_cut: bool) -> str:
    """The fastest plan, and the ratio of both sides, if there are plans of both and no search was
    cut."""
    sides = {tensor: step_s for step_s, _, tensor in sorted(plans, reverse=True)}
    words = f"{min(plans)[1]} ({min(plans)[0]:.3f} s"
    if len(sides) == 2 and not is_cut:
        ratio = sides[True] / sides[False]
        words += f"; speed without tensor parallelism over with it {ratio:.2f}"
    return f"{words})"
