"""ZeroPP's schedule (arXiv 2402.03791): scheduling units, breadth-first chunks, split backward.

The microbatches of a step form units of U. Inside a unit all of them run through chunk 0, then
chunk 1 and so on (and back in reverse), so that a chunk's parameters are gathered once per unit for
the forward phase and once for the backward phase. Input gradients run as early as they can; weight
gradients fill what would be bubbles, also across units. With equal durations F = B = W, U >= P
and the default cap of U*V live chunk-activations the step is at most 1 + (P-1)/(3*m*V) times its
ideal, whether U divides m or not (a test holds it).

``step_drafts`` gives the orders to choose from, each with a function that adds gathers, reductions
and transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import accumulate, product
from operator import itemgetter

from zeropp.schedule.list_scheduler import Orders, Planned, Policy, Slot, beginning, list_schedule
from zeropp.schedule.passes import lower
from zeropp.schedule.program import (
    Schedule,
    StageCost,
    collector_paused,
    loop_placement,
)
from zeropp.types.literals import Auto, ReduceEvery, if_auto

_EQUAL_COST_POLICIES = (Policy(), Policy(alternate=True))
# More policies would gain almost nothing, and take time.
_POLICIES = tuple(Policy(alternate=True, patience=patience) for patience in (0.0, 0.25, 0.5))
_MANY_ACTIONS = 100_000  # for longer steps, the policy is chosen on this many units:
_SAMPLED_UNITS = 3
_BEGUN_UNITS = 2  # in this many units a rank usually fills its memory
_LARGEST_BEGINNING = 0.6  # the largest share of a step that is a beginning and not almost all of it


@dataclass(frozen=True, kw_only=True)
class OrderSizes:
    """What sets the order of a ZeroPP step, durations aside.

    ``unit`` is the number of microbatches for which a chunk is gathered once, ``activation_cap``
    the most live chunk-activations per rank: one is live from its forward to the end of its weight
    gradient. Without ``split_backward`` input and weight gradients are one action, and nothing is
    delayed. Where weight gradients are ``merged``, those of up to ``merged`` microbatches of a
    stage and unit follow each other.
    """

    num_ranks: int
    chunks: int
    num_microbatches: int
    unit: int
    activation_cap: int
    split_backward: bool = True
    merged: int = 1

    @property
    def stage_rank(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return loop_placement(self.num_ranks, self.chunks)

    def check(self) -> None:
        """Raise ValueError if the cap is too small for any order to finish."""
        least = smallest_cap(self.chunks, self.num_microbatches, self.unit, self.merged)
        if self.activation_cap < least:
            raise ValueError(
                f"activation_cap={self.activation_cap}: {cap_needs(self.chunks, self.unit, least)}"
            )


def unit_size(
    unit: int | Auto, num_ranks: int, num_microbatches: int, *, hides_collectives: bool = True
) -> int:
    """The microbatches per unit: ``unit``, but at most all; for ``auto`` P, or all where compute
    hides no collectives (on CPUs), because a single unit has the fewest of them."""
    return min(
        if_auto(unit, num_ranks if hides_collectives else num_microbatches), num_microbatches
    )


def smallest_cap(chunks: int, num_microbatches: int, unit: int, merged: int = 1) -> int:
    """The fewest live chunk-activations per rank with which a step can be finished: a unit must
    turn round, with every microbatch of it in all chunks but the last, and in the last one as many
    as have ``merged`` weight gradients."""
    unit = min(unit, num_microbatches)
    return (chunks - 1) * unit + min(merged, unit)


def cap_needs(chunks: int, unit: int, least: int) -> str:
    """The part of a message that says why an activation cap below ``least`` is too small."""
    return (
        f"a unit of {unit} microbatches in {chunks} chunks needs at least {least} live "
        "chunk-activations"
    )


@lru_cache(maxsize=128)
@collector_paused()
def equal_order(sizes: OrderSizes) -> Schedule:
    """The compute-only schedule for equal durations. The next policy is tried if a rank is idle for
    longer than the first microbatch needs to reach it. Raises ValueError if the cap is too small.
    """
    sizes.check()
    costs = [StageCost()] * len(sizes.stage_rank)
    bound = sizes.num_ranks - 1 + 3 * sizes.chunks * sizes.num_microbatches
    tried = []
    for order, policy in product(unit_orders(sizes), _EQUAL_COST_POLICIES):
        tried.append(list_schedule(order, costs, sizes.activation_cap, policy))
        if tried[-1].step_s <= bound:
            break
    return _scheduled(sizes, min(tried, key=lambda plan: plan.step_s))


@lru_cache(maxsize=256)
@collector_paused()
def planned_order(sizes: OrderSizes, costs: tuple[StageCost, ...]) -> Schedule:
    """The best of the compute-only schedules that all policies plan with ``costs``; for a long
    step, its first units decide which policy is best. Raises ValueError if the cap is too small."""
    sizes.check()
    orders, cap = unit_orders(sizes), sizes.activation_cap
    units = _SAMPLED_UNITS * sizes.unit + sizes.num_microbatches % sizes.unit
    if units < sizes.num_microbatches and 3 * len(costs) * sizes.num_microbatches > _MANY_ACTIONS:
        sample = unit_orders(replace(sizes, num_microbatches=units))
        tried = [
            (list_schedule(order, costs, cap, policy).step_s, number, policy)
            for policy, (number, order) in product(_POLICIES, enumerate(sample))
        ]
        _, number, policy = min(tried, key=itemgetter(0))
        return _scheduled(sizes, list_schedule(orders[number], costs, cap, policy))
    plans = (list_schedule(o, costs, cap, policy) for o, policy in product(orders, _POLICIES))
    return _scheduled(sizes, min(plans, key=lambda plan: plan.step_s))


def planned_beginnings(sizes: OrderSizes, costs: tuple[StageCost, ...]) -> Iterator[Schedule]:
    """The beginnings of all orders; ``planned_order`` takes one of these. They are made one by one,
    which is quicker than to make one order; none where they would be almost the whole step."""
    begun = _BEGUN_UNITS * sizes.unit + sizes.num_ranks  # microbatches
    if begun > _LARGEST_BEGINNING * sizes.num_microbatches:
        return
    sizes.check()
    until_s = begun * sum(cost.compute for cost in costs) / sizes.num_ranks
    for number, policy in product(range(len(unit_orders(sizes))), _POLICIES):
        yield _beginning(sizes, costs, number=number, policy=policy, until_s=until_s)


@lru_cache(maxsize=64)
@collector_paused()
def _beginning(
    sizes: OrderSizes, costs: tuple[StageCost, ...], *, number: int, policy: Policy, until_s: float
) -> Schedule:
    return _scheduled(
        sizes,
        beginning(unit_orders(sizes)[number], costs, sizes.activation_cap, policy, until_s=until_s),
    )


def _scheduled(sizes: OrderSizes, planned: Planned) -> Schedule:
    return Schedule(
        name="zeropp",
        num_microbatches=sizes.num_microbatches,
        unit=sizes.unit,
        stage_rank=sizes.stage_rank,
        programs=planned.programs(),
    )


@lru_cache(maxsize=8)
@collector_paused()
def unit_orders(sizes: OrderSizes) -> tuple[Orders, ...]:
    """The orders of forwards and input gradients of all ranks, from which to choose.

    Microbatches that are left over make a short unit, either the last one or the last but one,
    where whole units on both sides fill its gaps; which is better depends on durations and cap.
    """
    unit, m = sizes.unit, sizes.num_microbatches
    in_turn = [range(first, min(first + unit, m)) for first in range(0, m, unit)]
    sequences = [in_turn]
    if m % unit and len(in_turn) > 2:
        sequences.append([*in_turn[:-2], in_turn[-1], in_turn[-2]])
    held = [range(rank, len(sizes.stage_rank), sizes.num_ranks) for rank in range(sizes.num_ranks)]
    return tuple(
        Orders(
            sizes.stage_rank,
            tuple(_breadth_first(stages, units) for stages in held),
            tuple(_breadth_first(stages[::-1], units) for stages in held),
            sizes.split_backward,
            _groups([len(unit) for unit in units for _ in range(sizes.chunks)], sizes.merged)
            if sizes.merged > 1
            else (),
        )
        for units in sequences
    )


def _breadth_first(stages: Sequence[int], units: Sequence[range]) -> tuple[Slot, ...]:
    return tuple((stage, j) for unit in units for stage in stages for j in unit)


def _groups(runs: Sequence[int], most: int) -> tuple[int, ...]:
    """How many weight gradients of a rank are done after the group of each, where runs of a stage
    are cut into groups of at most ``most``."""
    begins = accumulate(runs, initial=0)
    return tuple(
        begin + min(size, (j // most + 1) * most)
        for begin, size in zip(begins, runs, strict=False)
        for j in range(size)
    )


StepDraft = tuple[Schedule, Callable[[], Schedule]]  # compute actions, complete programs


@dataclass(frozen=True, kw_only=True)
class StepSizes(OrderSizes):
    """Everything except for durations on which the programs of a ZeroPP step depend: the sizes of
    the order, and the arguments of ``lower``."""

    gather: bool
    prefetch: int = 1
    reduce_every: ReduceEvery = "unit"
    offloaded: tuple[int, ...] = ()

    @property
    def order(self) -> OrderSizes:
        """The sizes of the order alone."""
        return OrderSizes(**{field.name: getattr(self, field.name) for field in fields(OrderSizes)})


def step_drafts(
    sizes: StepSizes,
    costs: tuple[StageCost, ...] | None = None,
    too_large: Callable[[Schedule], bool] | None = None,
) -> Iterator[StepDraft]:
    """The orders to choose from, one by one: that for equal durations and, with ``costs`` (one per
    stage), one that is planned with these, if it differs. Each comes as compute actions alone, with
    a function that completes it.

    If all orders that are planned with ``costs`` are ``too_large`` by their beginnings already,
    they are not planned to the end, and one of the beginnings stands for them. Orders are cached,
    because many plans that differ in other degrees share them. Raises ValueError if the activation
    cap is too small.
    """
    equal = equal_order(sizes.order)
    yield equal, partial(_complete, sizes)
    if not costs:
        return
    if too_large and (refused := _refused(planned_beginnings(sizes.order, costs), too_large)):
        yield refused, partial(_complete, sizes, costs)
    elif set(costs) != {StageCost()}:
        planned = planned_order(sizes.order, costs)
        if planned.programs != equal.programs:
            yield planned, partial(_complete, sizes, costs)


def _refused(begun: Iterator[Schedule], too_large: Callable[[Schedule], bool]) -> Schedule | None:
    """One of the beginnings if all of them are too large."""
    beginning = None
    for beginning in begun:
        if not too_large(beginning):
            return None
    return beginning


@lru_cache(maxsize=128)
def _complete(sizes: StepSizes, costs: tuple[StageCost, ...] | None = None) -> Schedule:
    """The programs of the order for equal durations, or of the one planned with ``costs``."""
    order = equal_order(sizes.order) if costs is None else planned_order(sizes.order, costs)
    return lower(
        order,
        gather=sizes.gather,
        prefetch=sizes.prefetch,
        reduce_every=sizes.reduce_every,
        offloaded=sizes.offloaded,
    )
