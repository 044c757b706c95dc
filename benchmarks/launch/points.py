"""Points of a sweep: all are planned before the first starts, and those with a record are skipped.

**auto.** The tuner chooses the knobs that a command line leaves open, for all contenders alike. If
the cluster can be priced, values for every knob that is ``auto`` are searched under the limit of
the device's memory, and the spec that runs has the values that were chosen. If it cannot be priced
(CPUs), the planners' simple rules apply. Choices are kept in the user's cache folder, under the
spec and a digest of the code that made the choice.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from benchmarks.launch.attempt import launched_code
from benchmarks.records.record import RunRecord, write_atomically
from benchmarks.records.recorded_spec import read_records
from benchmarks.records.same_run import same_run
from benchmarks.report.searches import best_of
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import CONTENDERS, whole
from benchmarks.specification.run_spec import RunSpec, is_priced, knobs_from
from benchmarks.worker.data import check_data
from zeropp.choose.contender import any_auto, describe
from zeropp.choose.search import SLOWER
from zeropp.price import price_plan
from zeropp.price.peak_memory import peak_memory
from zeropp.schedule.plan import Plan
from zeropp.types.layout import InfeasibleError
from zeropp.types.timeline import Provenance

Rerun = Literal["missing", "failed", "all"]
_TOLERANCE = 0.02  # the search may miss plans that are faster than its choice by up to this share
_KILLED = re.compile(r"signal 9\b|: Killed|without saying why|did not say which")
_BUDGET_S = 30.0  # CPU time of a search; after that the best plan so far is taken


@dataclass(frozen=True)
class Point:
    """A spec with its plan, or with the reason why it has none."""

    spec: RunSpec
    plan: Plan | None
    reason: str = ""  # one line; empty if there is a plan
    why: str = field(default="", compare=False)  # it is to run
    note: str = ""  # what the tuner chose, in one line; empty if nothing was open
    gap: float = field(default=0.0, compare=False)


def plan_point(spec: RunSpec, *, simulated: bool = False) -> Point:
    """Check a spec's data, let the tuner choose knobs that are ``auto``, and plan it, with the
    memory that the cost model predicts. Where it is to be simulated, it may have what its trainer
    cannot run. Raises SpecError on bad input."""
    check_data(spec)
    try:
        spec, note, gap = with_best_plan(spec, simulated=simulated)
        plan = spec.plan()
    except InfeasibleError as error:
        return Point(spec, None, str(error))
    memory = peak_memory(plan, price_plan(plan, spec.cluster))
    return Point(spec, replace(plan, memory=memory), note=note, gap=gap)


def still_to_run(
    points: Iterable[Point],
    runs_dir: Path,
    *,
    provenance: Provenance,
    variant: str,
    rerun: Rerun,
    repeats: int = 1,
) -> tuple[list[Point], list[RunRecord]]:
    """(the points to run, the newest records of points that are settled without a success): to run
    are those that no record of this provenance and variant has settled.

    A point is settled by a success, and by a failure of its own (out of memory, an error), but not
    by an attempt that was interrupted from outside, unless three in a row were killed alike.
    ``rerun=failed`` also returns points without a success, ``rerun=all`` returns every point. A
    point that is to have several successes is returned once for each that is missing, unless it has
    no plan: until a row of a table (``benchmarks.records.same_run``) has them all, which is that of
    the newest run of today's files. All of these are shuffled, so that a drift of the machine meets
    every point alike.
    """
    missing: list[Point] = []
    failed: list[RunRecord] = []
    for point in points:
        alike = [
            record
            for record in records_of(point.spec, runs_dir)
            if rerun != "all" and (record.provenance, record.variant) == (provenance, variant)
        ]
        fine = [record for record in alike if record.status == "ok"]
        runs = Counter(map(same_run, fine))
        todays = [record for record in fine if record.code_digest == launched_code().digest]
        newest = max(todays, key=attrgetter("started_at"), default=None)
        successes = runs[same_run(newest)] if newest else 0
        successes = max([n for n in runs.values() if n >= repeats], default=successes)
        failures = [r for r in alike if r.status != "ok" and not r.interrupted]
        # Three attempts that were killed or ended silently in the same way are no accident.
        last = alike[-3:]
        ways = {re.sub(r"\d+", "", record.reason) for record in last if record.interrupted}
        is_alike = len(last) == 3 and len(ways) == 1
        if not successes and is_alike and _KILLED.search(last[-1].reason):
            failures.append(last[-1])
        if failures and not successes and rerun == "missing":
            failed.append(failures[-1])
        else:
            why = "rerun=all" if rerun == "all" else "no record"
            if alike:
                why = f"last {alike[-1].status}: {alike[-1].reason}"
            if successes:
                why = f"{successes} of {repeats} runs are recorded"
            missing += [replace(point, why=why)] * ((repeats if point.plan else 1) - successes)
    if repeats > 1:
        missing = random.Random(0).sample(missing, len(missing))  # the same order every time
    return missing, failed


def records_of(spec: RunSpec, runs_dir: Path) -> Iterator[RunRecord]:
    """The readable records of a spec, oldest first; ``benchmarks.status`` lists unreadable ones."""
    return read_records([runs_dir / spec.spec_id], [])


def with_best_plan(spec: RunSpec, *, simulated: bool = False) -> tuple[RunSpec, str, float]:
    """(the spec with the tuner's choice for everything that is ``auto``, a line that describes it,
    the gap of its search).

    The spec is returned unchanged, with an empty line, if nothing is ``auto`` or if the cluster has
    no prices; then the planner's simple rules apply. Raises InfeasibleError if no plan fits the
    device's memory, or for what the trainer cannot run, unless it is to be ``simulated``.
    """
    contender = CONTENDERS[spec.contender.name]
    knobs = spec.contender if simulated else contender.as_run(spec.contender)
    if spec.microbatch_size != "auto" and not any_auto(spec.contender):
        return spec, "", 0.0
    if not is_priced(spec.cluster, spec.precision):
        return replace(spec, microbatch_size=spec.candidate.microbatch_size), "", 0.0
    spec = replace(spec, contender=knobs)
    question = json.dumps(
        [asdict(spec.task), asdict(spec.contender), spec.microbatch_size],  # type: ignore[call-overload]
        sort_keys=True,
    )
    digest = hashlib.sha256((launched_code().digest + question).encode()).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(home) / "zeropp" / "plans" / f"{digest[:32]}.json"
    choice, source = _read(path), "remembered"
    if choice is None:
        choice, source = _search(spec)
        with suppress(OSError):  # without a cache, the search is only repeated
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(choice))
    where = f"{spec.model.name} on {spec.num_gpus} x {spec.cluster.name}"
    line = f"auto: {contender.label}, {where}: {choice['words']} ({source})"
    asked = {name: value for name, value in asdict(spec.contender).items() if value != "auto"}  # type: ignore[call-overload]
    # A unit that the planner cuts stays as it was asked.
    knobs, size = knobs_from(choice["knobs"] | asked), choice["microbatch_size"]
    return replace(spec, contender=knobs, microbatch_size=size), line, choice["gap"]


def _search(spec: RunSpec) -> tuple[dict[str, Any], str]:
    """(the choice: knobs, microbatch size, the plan and its speed in words; how it was found)."""
    best = best_of(
        spec.task,
        whole(CONTENDERS[spec.contender.name]),
        asked=spec.contender,
        microbatch_size=spec.microbatch_size,
        tolerance=_TOLERANCE,
        runner_up=False,
        budget_s=_BUDGET_S,
    )
    outcome, winner = best.outcome, best.outcome.winner
    if winner is None:
        spec.plan()  # if a fixed value is the reason, the planner's message says so
        gib, margin = spec.cluster.device.usable_bytes / 2**30, spec.task.memory_margin
        opened = [name for name, value in vars(spec.contender).items() if value == "auto"]
        none = (
            "no choice for what is auto fits"
            if outcome.is_complete
            else "the search has ended, and has found nothing that fits"
        )
        raise InfeasibleError(
            f"contender={spec.contender.name}: {none} {spec.num_gpus} x {gib:.1f} GiB with "
            f"{margin:.0%} of its simulated memory to spare (use more GPUs, or set "
            f"{', '.join(opened) or 'microbatch_size'} to run it all the same)"
        )
    speed = winner.result.tokens_per_s_per_gpu
    choice = {
        "knobs": asdict(winner.candidate.knobs),
        "microbatch_size": winner.candidate.microbatch_size,
        "words": f"{describe(winner.plan)}, {speed:,.0f} tokens/s/GPU simulated",
        "gap": best.gap,
    }
    pruned = outcome.rejected[SLOWER]
    ended = f"the best plan ({outcome.simulated:,} simulated, {pruned:,} pruned by their bounds)"
    return choice, ended if outcome.is_complete else f"{ended} until time was up"


def _read(path: Path) -> dict[str, Any] | None:
    """The choice in a cache file; None if there is none or if it cannot be read."""
    try:
        choice: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        knobs_from(choice["knobs"])
        return choice if {*choice} == {"knobs", "microbatch_size", "words", "gap"} else None
    except (OSError, ValueError, TypeError, KeyError, SpecError):
        return None
