"""The simulator's answers to a question: the plan itself, changes of one knob, and best plans.

Every search here is the tuner's, under the same memory limit and global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from benchmarks.explain.question import Question
from benchmarks.records.metrics import share_of_peak
from benchmarks.report.network import network_steps
from benchmarks.report.searches import Best, search_rows
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import ATLAS, PRICED
from benchmarks.specification.progress import progress_line
from zeropp.choose.contender import describe
from zeropp.choose.outcome import Evaluated
from zeropp.choose.search import OOM, search
from zeropp.choose.task import Candidate
from zeropp.price import model_flops_per_token
from zeropp.price.simulator import SimResult
from zeropp.types.layout import InfeasibleError

# Plans that are faster than the winner by less than the tolerance may be missed.
_search = partial(search, tolerance=0.01, runner_up=False)
BEST_TOLERANCE = 0.06  # of best plans: a third of the error of their ratios
SEARCH_S = 15.0  # CPU time of a search over all knobs; over one knob, a fifth of it
# Degrees that must change together, since their product is the number of GPUs.
_FOLLOWS = ("replicate", "shard")
_DEGREES = ("tp", "pp", "context", "shard", "replicate")
# Knobs that are opened with another one: chunks belong to a schedule.
_TOGETHER = dict.fromkeys(_DEGREES, _FOLLOWS) | {
    "tp": (*_FOLLOWS, "sequence_parallel"),
    "pp": (*_FOLLOWS, "chunks", "schedule"),
    "chunks": ("schedule",),
    "schedule": ("chunks",),
    "recompute": ("recompute_blocks",),
}
_FIXED = ("name", "split_backward")


@dataclass(frozen=True)
class Answer:
    """The plan of a question, with its price. Nothing of it is kept, so there is no record."""

    question: Question
    asked: Evaluated[Any]
    host_s: float  # by which the step would be shorter with a host that takes no time per launch
    network_s: tuple[float, float] | None  # the step with the slowest and with the fastest network

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within the device's memory for tensors, and what it sends
        within its host's."""
        return self.asked.result.fits(self.question.task.cluster.device.usable_bytes)


def answer(question: Question, search_s: float | None = None) -> Answer:
    """Price a question's plan; raises SpecError in one line where none exists. ``search_s``:
    seconds of CPU time after which a search of what is left open takes the best plan so far."""
    with progress_line() as bar:
        search_s = search_s or SEARCH_S
        bar.add_task(f"the plan itself (at most {search_s:.0f} s of CPU time)", total=None)
        candidate = settled(question, search_s)
        try:
            plan = Evaluated(candidate, question.contender.simulated(question.task, candidate))
            cluster = question.task.cluster
            cluster = replace(cluster, device=replace(cluster.device, launch_us=0.0))
            at_once = question.contender.simulated(
                replace(question.task, cluster=cluster), candidate
            )
        except InfeasibleError as error:
            raise SpecError(str(error)) from None
    network_s = network_steps(question.contender, question.task, candidate)
    return Answer(question, plan, plan.step_s - at_once.step_s, network_s)


def best_plans(
    question: Question,
    search_s: float | None = None,
    beside: Callable[[], None] = lambda: None,
) -> list[Best]:
    """The best plans of all programs on the same GPUs, to ``BEST_TOLERANCE`` (``zeropp tune``
    searches closer), in four times ``search_s`` (``SEARCH_S``) seconds of wall time. ``beside`` is
    what this process does meanwhile."""
    return search_rows(
        question.task,
        ATLAS,
        4 * (search_s or SEARCH_S),
        beside=beside,
        memory_margin=question.memory_margin,
        tolerance=BEST_TOLERANCE,
        climbs=BEST_TOLERANCE / 2,
    )


def settled(question: Question, search_s: float = SEARCH_S) -> Candidate[Any]:
    """The candidate that the file describes; what it leaves open is chosen by the tuner."""
    size = question.microbatch_size
    opened = [name for name, value in vars(question.knobs).items() if value == "auto"]
    if size != "auto" and set(opened) <= {"recompute_blocks", "placement"}:
        return Candidate(question.knobs, size)
    own = _search(question.task, question.contender, question.knobs, size, budget_s=search_s)
    if own.winner is not None:
        return own.winner.candidate
    if own.is_complete and OOM not in own.rejected:  # by simple rules, whose refusal says why
        return Candidate(question.knobs, 1 if size == "auto" else size)
    if size != "auto" and not set(opened) & set(_DEGREES):
        return Candidate(question.knobs, size)  # the screen says what misses
    task, gib = question.task, question.task.cluster.device.usable_bytes / 2**30
    left = [name for name in _DEGREES if name in opened] + ["microbatch_size"] * (size == "auto")
    more = ", contender.recompute=full" * (getattr(question.knobs, "recompute", "") == "none")
    host = [f"; {line}" for line in question.reading.named if "without offloading" in line]
    found = "no plan with these settings fits"
    if not own.is_complete:
        found = f"in {search_s:.0f} s of CPU time no plan with these settings was found that fits"
    raise SpecError(
        f"num_gpus={task.num_gpus}: {found} {gib:.1f} GiB with {task.memory_margin:.0%} of its "
        f"simulated memory to spare (use more GPUs{more} or memory_margin=0, "
        f"or set {', '.join(left)} to see what each rank would need)" + "".join(host)
    )


def changes_of(answered: Answer, search_s: float | None = None) -> dict[str, Evaluated[Any]]:
    """The best change of each knob (of a degree with the data parallelism that follows from it)
    that fits and is faster, the fastest first. If the plan itself does not fit, every plan that
    does is an improvement. ``search_s`` is as in ``answer``; a knob has a fifth of it."""
    question, now = answered.question, answered.asked
    limit = question.task.cluster.device.usable_bytes
    slowest = now.step_s if now.peak_bytes <= limit else float("inf")
    changes: dict[str, Evaluated[Any]] = {}
    plans = set()  # several knobs may lead to the same plan
    budget_s = (search_s or SEARCH_S) / 5
    best = partial(_search, question.task, question.contender, budget_s=budget_s)
    with progress_line() as bar:
        line = bar.add_task("", total=None)
        for knob, asked, size in _opened(now.candidate):
            bar.update(line, description=f"changes of {knob}")
            winner = best(asked, size).winner
            if winner is None or winner.step_s >= 0.999 * slowest:
                continue
            pair = (winner.candidate, now.candidate)
            if len({getattr(of.knobs, knob, of.microbatch_size) for of in pair}) == 1:
                continue  # another knob, which follows from this one, changed: it is tried alone
            if (words := describe(winner.plan)) not in plans:
                plans.add(words)
                changes[knob] = winner
    if question.reading.eager:
        own = PRICED[question.contender.name]
        compiled = Evaluated(now.candidate, own.simulated(question.task, now.candidate))
        if compiled.peak_bytes <= limit and compiled.step_s < 0.999 * slowest:
            changes["compile"] = compiled
    return dict(sorted(changes.items(), key=lambda change: change[1].step_s))


def _opened(candidate: Candidate[Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, knobs with that one open, microbatch size), for each knob that can be searched."""
    knobs = candidate.knobs
    yield "microbatch_size", knobs, "auto"
    for field in fields(knobs):
        if field.name in _FIXED or "Auto" not in str(field.type):
            continue
        others = [name for name in _TOGETHER.get(field.name, ()) if hasattr(knobs, name)]
        opened = dict.fromkeys([field.name, *others], "auto")
        yield field.name, replace(knobs, **opened), candidate.microbatch_size


def mfu(result: SimResult, question: Question) -> float | None:
    """Model FLOP/s divided by the device's dense peak (arXiv 2204.02311, appendix B)."""
    task = question.task
    flops = model_flops_per_token(task.shape) * result.tokens_per_s_per_gpu
    return share_of_peak(task.cluster.device, task.precision, flops / 1e12)
