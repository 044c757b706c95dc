"""Measures how fast plans are priced: plans per minute and core, and the share of every phase.

The plans are for 64 GPUs and evenly spread over everything that the tuner may try for one model.
Each is sized, priced, ordered, simulated, and its Timeline is made. Times are processor times, so
that other work on the machine changes little; each core takes an equal part of the plans.

    python -m benchmarks.studies.pricing_speed --plans 5000 --cores 2
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from time import process_time
from typing import Any

from benchmarks.specification.command import CommandParser, leave_interrupts_to_parent, run_command
from benchmarks.specification.compose import preset
from benchmarks.specification.contenders import PRICED
from zeropp.cluster import Cluster
from zeropp.cost import price_plan
from zeropp.layout import InfeasibleError
from zeropp.plan import Candidate, Task
from zeropp.shape import ModelShape
from zeropp.sim.simulator import simulate
from zeropp.tune.contender import Contender
from zeropp.tune.space import points

Found = tuple[Contender[Any], Candidate[Any]]
PHASES = ("size", "price", "order", "simulate", "timeline")


def task(model: str, cluster: str) -> Task:
    """A task of 64 GPUs with four sequences per GPU and step."""
    shape, machine = preset("model", model, ModelShape), preset("cluster", cluster, Cluster)
    return Task(shape=shape, cluster=machine, num_gpus=64, global_batch=256)


def everything(what: Task) -> Iterator[Found]:
    """All candidates that the tuner may try, contender by contender."""
    for contender in PRICED.values():
        space, asked = contender.space, contender.knobs()
        for point, size in points(what, space, asked, "auto", fallen=Counter()):
            for family in space.families(point):
                try:
                    plan = contender.size(what, family, size)
                except InfeasibleError:
                    continue
                for knobs in space.members(asked, family, plan):
                    yield contender, Candidate(knobs, size)


def priced(what: Task, found: Found, spent: Counter[str]) -> bool:
    """Price one candidate and add the seconds of every phase to ``spent``; returns False if it is
    infeasible."""
    contender, candidate = found
    clock = [process_time()]
    try:
        plan = contender.size(what, candidate.knobs, candidate.microbatch_size)
        clock.append(process_time())
        price = price_plan(plan, what.cluster)
        clock.append(process_time())
        plan = next(contender.order(plan, candidate.knobs, price))
    except InfeasibleError:
        return False
    clock.append(process_time())
    result = simulate(plan, what.cluster, price=price)
    clock.append(process_time())
    result.timeline()
    clock.append(process_time())
    for phase, before, after in zip(PHASES, clock, clock[1:], strict=False):
        spent[phase] += after - before  # type: ignore[assignment]
    return True


def part(job: tuple[str, str, int, int, int]) -> tuple[int, Counter[str]]:
    """One core's part of the plans: (how many were priced, the seconds of every phase)."""
    model, cluster, plans, cores, core = job
    what = task(model, cluster)
    count = sum(1 for _ in everything(what))
    chosen = islice(everything(what), 0, None, max(1, count // plans))
    spent: Counter[str] = Counter()
    done = sum(priced(what, found, spent) for found in islice(chosen, core, plans, cores))
    return done, spent


def main() -> int:
    """Print plans per minute and core, and each phase's share; see ``--help``."""
    return run_command(_main)


def _main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--model", default="gpt_14_6b", help="name in conf/model (%(default)s)")
    parser.add_argument("--cluster", default="a800", help="name in conf/cluster (%(default)s)")
    parser.add_argument("--plans", type=int, default=5000, help="about how many (%(default)s)")
    parser.add_argument("--cores", type=int, default=2, help="processes (%(default)s)")
    asked = parser.parse_args()
    jobs = [(asked.model, asked.cluster, asked.plans, asked.cores, i) for i in range(asked.cores)]
    with ProcessPoolExecutor(asked.cores, initializer=leave_interrupts_to_parent) as pool:
        parts = list(pool.map(part, jobs))
    plans = sum(done for done, _ in parts)
    spent = sum((seconds for _, seconds in parts), Counter())
    total = sum(spent.values())
    print(f"{plans} plans in {total:.1f} s of processor time: {60 * plans / total:.0f} per minute")
    print(", ".join(f"{phase} {100 * spent[phase] / total:.0f} %" for phase in PHASES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
