"""The one search for the best plan of a row of a comparison, by which ``zeropp tune``, ``explain``,
sweeps and studies find the same.

It knows what a program's users have published. *Types of gradients* are those that its documents
recommend, or fp32 for all (``settings``). *Room*: a plan leaves as much memory as the program's
published peaks have taken beyond their price (``ratio_errors.memory_room``). *Published plans* of
the same model are tried first, at the task's number of GPUs, and one that ran on such devices fits,
whatever its price. Searches of several rows begin with ``atlas_plans``.
"""

from __future__ import annotations

import csv
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, log
from operator import itemgetter
from time import monotonic
from typing import Any

from benchmarks.records.simulated import TABLE, shape_named
from benchmarks.report.ratio_errors import Room, memory_room, priced_runs
from benchmarks.specification import DTYPES, SpecError
from benchmarks.specification.command import workers
from benchmarks.specification.contenders import ROWS, Compared, candidate_in
from benchmarks.specification.progress import progress_line
from zeropp.choose.bounds import least_bytes, least_step_s
from zeropp.choose.contender import Contender, describe
from zeropp.choose.outcome import Evaluated, Outcome
from zeropp.choose.search import search
from zeropp.choose.task import Candidate, Task
from zeropp.types.data import DATA
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Settings

MOST_GAP = 0.02  # of a search, above which its best plan decides nothing
_TELL_EVERY_S = 2.0
_NEAREST = 6  # plans of the atlas that a search begins with
_MODES: dict[Settings, str] = {"users": "own", "equal": "best"}  # of the atlas's lines
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "seq")  # sources differ in the rest
_AXES = {"tp": "tp", "pp": "pp", "context": "cp"}  # a degree and its column


@dataclass(frozen=True)
class Best:
    """The best plan of a row of a comparison, by its name and label, and how it was found."""

    name: str
    label: str
    outcome: Outcome[Any]  # of the row's contender that has the best plan
    room: Room  # that its plans had to leave
    searched: tuple[Outcome[Any], ...]  # of all contenders of the row
    refused: tuple[Evaluated[Any], ...] = ()  # a faster published plan that leaves less room

    @property
    def winner(self) -> Evaluated[Any] | None:
        """The best plan; None if none fits."""
        return self.outcome.winner

    @property
    def is_complete(self) -> bool:
        """Whether no search was ended by its budget."""
        return all(outcome.is_complete for outcome in self.searched)

    @property
    def least_s(self) -> float:
        """The least that an unopened plan takes, by its bound."""
        return min(outcome.bound_s for outcome in self.searched)

    @property
    def gap(self) -> float:
        """The share by which an unopened plan may be faster than the best, by its bound; 1 where
        searches that were cut have found none."""
        if self.winner is None:
            return float(not self.is_complete)
        return max(0.0, 1.0 - self.least_s / self.winner.step_s)

    @property
    def none(self) -> str:
        """What a search that has no plan says: that none fits only where it has tried all."""
        return "no plan fits" if self.is_complete else "no plan found in time"

    def refusals(self) -> Iterator[str]:
        """Per published plan that was refused, the plan and by how much it exceeds the limit."""
        limit = self.outcome.task.limit_bytes
        for plan in self.refused:
            yield (
                f"refused: the published {describe(plan.plan)}, {plan.step_s:.3g} s: "
                f"{plan.peak_bytes / 2**30:.1f} GiB is {(plan.peak_bytes - limit) / 2**30:.1f} "
                f"over the {limit / 2**30:.1f} that {self.room.words} leaves"
            )


def best_of(
    task: Task,
    row: Compared,
    *,
    settings: Settings = "users",
    memory_margin: float | None = None,
    asked: Any = None,
    microbatch_size: Any = "auto",
    known: Iterable[Candidate[Any]] = (),
    **options: Any,
) -> Best:
    """Search a row's best plan. ``memory_margin``: the room instead of the measured one.
    ``asked``: knobs of the row's contender; those that are ``auto`` are searched; None:
    all but the types of gradients. ``known``: plans that are tried first. ``options`` are those of
    ``zeropp.choose.search.search``."""
    found: list[tuple[Outcome[Any], Room, list[Evaluated[Any]]]] = []
    for contender in row.searched:
        room = memory_room(contender.published_as)
        if memory_margin is not None:
            room = Room(memory_margin)
        own = replace(task, memory_margin=room.share)
        types = contender.types_as(settings, task.precision)
        wanted = asked or replace(contender.knobs(), **types)
        fixed = {name: value for name, value in vars(wanted).items() if value != "auto"}
        may_be = partial(_may_be, row, contender, {**fixed, "name": contender.name})
        published: defaultdict[Candidate[Any], list[Mapping[str, str]]] = defaultdict(list)
        for candidate, run in published_plans(own, contender, types | fixed):
            if may_be(candidate) and microbatch_size in ("auto", candidate.microbatch_size):
                published[candidate].append(run)
        fastest, refused = None, []
        for bound_s, candidate in sorted(_bounds(published, own, contender), key=itemgetter(0)):
            if bound_s >= _step_s(fastest):
                break
            plan = Evaluated(candidate, contender.simulated(own, candidate))
            runs, fits = published[candidate], plan.result.fits(own.limit_bytes)
            if fits or any(_ran(plan, own, contender, run) for run in runs):
                fastest = plan if plan.step_s < _step_s(fastest) else fastest
            elif plan.peak_bytes <= task.cluster.device.usable_bytes:
                refused.append(plan)
        first = [*filter(may_be, known), *([fastest.candidate] if fastest else [])]
        outcome = search(own, contender, wanted, microbatch_size, known=first, **options)
        if fastest:
            outcome.offer(fastest)
        found.append((outcome, room, refused))
    outcome, room, _ = min(found, key=lambda each: _step_s(each[0].winner))
    faster = [p for *_, plans in found for p in plans if p.step_s < _step_s(outcome.winner)]
    searched = tuple(each[0] for each in found)
    return Best(
        row.name, row.label, outcome, room, searched, tuple(sorted(faster, key=_step_s)[:1])
    )


def _step_s(plan: Evaluated[Any] | None) -> float:
    return plan.step_s if plan else float("inf")


def _bounds(
    candidates: Iterable[Candidate[Any]], task: Task, contender: Contender[Any]
) -> Iterator[tuple[float, Candidate[Any]]]:
    """The candidates that may fit the device, with lower bounds of their steps in seconds."""
    for candidate in candidates:
        plan = contender.size(task, candidate.knobs, candidate.microbatch_size)
        held = contender.prices.memory(plan, task.cluster)
        if least_bytes(plan, held) <= (1 + task.memory_margin) * task.cluster.device.usable_bytes:
            yield least_step_s(plan, contender.prices.times(plan, task.cluster)), candidate


def _may_be(
    row: Compared, contender: Contender[Any], fixed: Mapping[str, Any], candidate: Candidate[Any]
) -> bool:
    """Whether a plan is the contender's, has what is ``fixed`` and is one that the row allows."""
    knobs = candidate.knobs
    own = isinstance(knobs, contender.knobs) and fixed.items() <= vars(knobs).items()
    return bool(own and row.allows(knobs))


def search_rows(
    task: Task,
    names: Iterable[str],
    budget_s: float,
    tell: Callable[[Best], None] = lambda _: None,
    beside: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[Best]:
    """The best plans of rows of ``ROWS``, each searched in a process of its own, on all cores.
    ``budget_s`` are seconds of wall time. Every row gets its share of what is left of them when
    its search begins; those that were cut begin once more, with what they found, where more
    is left for them at the end. ``tell`` gets each as it comes; ``beside`` is what this process
    does first while the others search. The one that takes longest has a core of its own, if there
    are several; of the others, those that take longest begin last. Ctrl-C ends the searches, and
    gives those that had come; raised again where there is none."""
    spaces = {name: ROWS[name].contender for name in names}
    *others, longest = sorted(spaces, key=lambda name: spaces[name].search_effort)
    cores = min(os.cpu_count() or 1, len(spaces))
    order = [longest, *others] if cores > 1 else [*others, longest]
    left = enumerate(reversed(order), start=1)
    rounds = {name: ceil(count / max(1, cores - 1)) for count, name in left} | {longest: 1}
    ends_s, found = monotonic() + budget_s, dict[str, Best]()
    try:
        with workers(cores, "fork") as pool:  # before there is a thread; all is imported already
            begin = partial(_best_of_row, task, ends_s=ends_s, runner_up=False, **options)
            waiting = {pool.submit(begin, name, rounds[name]): name for name in order}
            beside()
            with progress_line() as bar:
                line = bar.add_task("", total=len(order))
                while waiting:
                    ended = len(spaces) - len(waiting)
                    bar.update(line, completed=ended, description="searching best plans")
                    for done in wait(waiting, _TELL_EVERY_S, FIRST_COMPLETED).done:
                        found[waiting.pop(done)] = done.result()
                        tell(done.result())
                    if not waiting:
                        cut = [name for name in order if not found[name].is_complete]
                        share, order = ceil(len(cut) / cores), []
                        if (ends_s - monotonic()) * max(rounds.values()) > share * budget_s:
                            waiting = {
                                pool.submit(begin, name, share, found[name].winner): name
                                for name in cut
                            }
    except KeyboardInterrupt:
        if not found:
            raise
    return [found[name] for name in spaces if name in found]


def _best_of_row(
    task: Task,
    name: str,
    rounds: int,
    before: Evaluated[Any] | None = None,
    *,
    ends_s: float,
    settings: Settings = "users",
    **options: Any,
) -> Best:
    """``best_of`` in a process of its own, with half as much again as an equal share of the time
    until ``ends_s`` (by ``monotonic``) where ``rounds`` searches in a row are to come, as most
    end sooner, and at least a second. It begins with the plan that was found ``before``, and with
    those of the atlas. What it returns has no row, which cannot be sent."""
    own, left_s = ROWS[name], max(1.0, (ends_s - monotonic()) * 1.5 / (rounds + 0.5))
    known = atlas_plans(task, name, settings)
    if before:
        known.insert(0, before.candidate)
    best = best_of(task, own, settings=settings, known=known, budget_s=left_s, **options)
    for outcome in best.searched:
        searched = (own.contender, *own.others)
        outcome.contender = next(c for c in searched if c.name == outcome.contender.name)
    return best


def atlas_plans(task: Task, row: str, settings: Settings) -> list[Candidate[Any]]:
    """The best plans of a row in the committed cases of the atlas with the task's model and
    precision and these ``settings``, at most ``_NEAREST`` different ones: those of the same cluster
    first, then by number of GPUs and by sequences per GPU."""

    def distance(case: Mapping[str, str]) -> tuple[bool, float]:
        gpus = int(case["num_gpus"]) / task.num_gpus
        batch = int(case["global_batch"]) / task.global_batch
        return case["cluster"] != task.cluster.name, abs(log(gpus)) + abs(log(batch / gpus))

    shape = replace(task.shape, name="")
    cases = [
        case
        for case in _atlas()
        if (case["contender"], case["precision"]) == (row, task.precision) and case["setting"]
        if case["mode"] == _MODES[settings]
        if replace(shape_named(case["model"]), name="") == shape
    ]
    known = dict.fromkeys(case["setting"] for case in sorted(cases, key=distance))
    plans = []
    for setting in map(json.loads, [*known][:_NEAREST]):
        with suppress(SpecError):  # of a knob that there is no more
            plans.append(candidate_in(row, setting["knobs"], setting["microbatch_size"])[2])
    return plans


@cache
def _atlas() -> list[dict[str, str]]:
    """The lines of the committed atlas."""
    with (DATA / "results/reference/atlas" / TABLE).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def published_plans(
    task: Task, contender: Contender[Any], types: Mapping[str, Any]
) -> Iterator[tuple[Candidate[Any], Mapping[str, str]]]:
    """The plans of a program's published runs of the task's model, at the task's number of GPUs:
    what is left of them multiplies the replicas, or the shards if these were all ranks. Knobs that
    no row states are those of the fastest published runs (``_UNSTATED``). Beside each is the run,
    as its cells."""
    for run in priced_runs():
        if run["program"] not in contender.published_as:
            continue
        if any(int(run[name]) != getattr(task.shape, name) for name in _SHAPE):
            continue
        if candidate := _candidate(run, task, contender, types):
            yield candidate, run


# What makes no difference to which plan a row has, or what tuned runs have.
_UNSTATED = {
    "compile": True,
    "placement": "dp_inner",
    "cp_comm_type": "p2p",
    "reduce_every": "unit",
    "reshard_after_forward": True,
    "reshard_after_backward": True,
    "use_multi_rank_bucket_allreduce": True,
    "fsdp_reshard_after_forward": "default",
}


def _candidate(
    run: Mapping[str, str], task: Task, contender: Contender[Any], types: Mapping[str, Any]
) -> Candidate[Any] | None:
    """The plan of a published run at the task's number of GPUs; None where the contender has none.
    Without ZeRO, bf16 has plans of some programs alone; those of others have stage 1."""
    known = contender.knobs.__dataclass_fields__
    degrees = {axis: int(run[column]) for axis, column in _AXES.items()}
    ranks, rest = divmod(task.num_gpus, degrees["tp"] * degrees["pp"] * degrees["context"])
    if rest or not ranks:
        return None
    zero, dp = int(run["zero"]), int(run["dp"])
    group = int(run["zero3_group"] or dp) if zero == 3 else 1
    shard = ranks if 1 < group == dp else group
    stages = degrees["pp"] * int(run["chunks"]) if "pp" in known else 1
    values = _UNSTATED | degrees | {
        "shard": shard,
        "replicate": ranks // shard,
        "chunks": int(run["chunks"]),
        "schedule": "1f1b" if run["schedule"] == "none" else run["schedule"],
        "sequence_parallel": run["sequence_parallel"] == "yes",
        "recompute": run["recompute"],
        "recompute_blocks": int(run["recompute_blocks"] or 0) // stages or "auto",
    }  # fmt: skip
    left_out = [axis for axis in (*_AXES, "shard", "replicate") if axis not in known]
    if ranks % shard or any(values[axis] != 1 for axis in left_out):
        return None
    size = int(run["micro_batch"])
    for stage in {3: (0,), 0: (0, 1)}.get(zero, (zero,)):
        stated = {name: value for name, value in values.items() if name in known}
        stated |= {"replicate_zero": stage} if "replicate_zero" in known else {}
        knobs = replace(contender.knobs(), **stated, **{k: types[k] for k in types.keys() - stated})
        with suppress(InfeasibleError):
            contender.size(task, knobs, size)
            return Candidate(knobs, size)
    return None


def _ran(
    plan: Evaluated[Any], task: Task, contender: Contender[Any], run: Mapping[str, str]
) -> bool:
    """Whether a published run on the task's devices held as much as the plan does: then it fits,
    whatever its price."""
    if run["device"] != task.cluster.device.name or run["dtype"] not in DTYPES[task.precision]:
        return False
    memory_gib = task.cluster.device.memory_gib  # sources state the nominal size
    if not 0.95 < float(run["memory_gib"] or memory_gib) / memory_gib < 1.05:
        return False
    shape = replace(task.shape, vocab=int(run["vocab"]))
    gpus, batch = int(run["num_gpus"]), int(run["global_batch"])
    there = replace(task, shape=shape, num_gpus=gpus, global_batch=batch)
    own = _candidate(run, there, contender, contender.types_as("users", task.precision))
    if own is None:
        return False
    return plan.peak_bytes <= 1.001 * contender.simulated(there, own).peak_bytes
