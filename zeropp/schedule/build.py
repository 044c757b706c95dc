"""The entry to schedules: from a name and sizes to a schedule.

``build`` gives the compute actions of any generator by its name. For ZeroPP, ``step_drafts`` gives
the orders to choose from, each with a function that adds gathers, reductions and transfers. The
planner and the tuner let the simulator choose, which looks at memory, too; ``build`` chooses by the
step time in the event loop alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial

from zeropp.literals import ReduceEvery
from zeropp.schedule import event_loop, generators
from zeropp.schedule.passes import lower
from zeropp.schedule.program import (
    Program,
    Schedule,
    StageCost,
    collector_paused,
    loop_placement,
    v_placement,
)
from zeropp.schedule.zeropp_order import (
    OrderSizes,
    candidates,
    equal_order,
    planned_beginnings,
    planned_order,
    unit_size,
)

GENERATORS = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "interleaved_zb",
    "zbv",
    "zeropp",
)


_StepDraft = tuple[Schedule, Callable[[], Schedule]]  # compute actions, complete programs


@dataclass(frozen=True, kw_only=True)
class StepSizes(OrderSizes):
    """Everything except for durations on which the programs of a ZeroPP step depend: the sizes of
    the order, and the arguments of ``lower``."""

    gather: bool
    prefetch: int = 1
    reduce_every: ReduceEvery = "unit"

    @property
    def order(self) -> OrderSizes:
        """The sizes of the order alone."""
        return OrderSizes(**{field.name: getattr(self, field.name) for field in fields(OrderSizes)})


def step_drafts(
    sizes: StepSizes,
    costs: tuple[StageCost, ...] | None = None,
    too_large: Callable[[Schedule], bool] | None = None,
) -> Iterator[_StepDraft]:
    """The orders to choose from, one by one: that for equal durations and, with ``costs`` (one per
    stage), one that is planned with these, if it differs. Each comes as compute actions alone, with
    a function that completes it.

    If all orders that are planned with ``costs`` are ``too_large`` by their beginnings already,
    they are not planned to the end, and one of the beginnings stands for them. Orders are cached,
    because many plans that differ in other degrees share them. Raises ValueError if the activation
    cap is too small.
    """
    yield equal_order(sizes.order), partial(_equal_step, sizes)
    if costs:
        refused = _refused(planned_beginnings(sizes.order, costs), too_large) if too_large else None
        if refused:
            yield refused, partial(_planned_step, sizes, costs)
            return
        for planned in candidates(sizes.order, costs)[1:]:
            yield planned, partial(_planned_step, sizes, costs)


def _refused(begun: Iterator[Schedule], too_large: Callable[[Schedule], bool]) -> Schedule | None:
    """One of the beginnings if all of them are too large."""
    beginning = None
    for beginning in begun:
        if not too_large(beginning):
            return None
    return beginning


@lru_cache(maxsize=96)
def _equal_step(sizes: StepSizes) -> Schedule:
    return _lowered(equal_order(sizes.order), sizes)


@lru_cache(maxsize=32)
def _planned_step(sizes: StepSizes, costs: tuple[StageCost, ...]) -> Schedule:
    return _lowered(planned_order(sizes.order, costs), sizes)


def _lowered(order: Schedule, sizes: StepSizes) -> Schedule:
    return lower(
        order, gather=sizes.gather, prefetch=sizes.prefetch, reduce_every=sizes.reduce_every
    )


@collector_paused()
def build(
    name: str,
    *,
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    group: int | None = None,
    unit: int | None = None,
    activation_cap: int | None = None,
    split_backward: bool = True,
    costs: Sequence[StageCost] | None = None,
) -> Schedule:
    """The compute actions of one optimizer step.

    ``group`` (default: P) is how many microbatches the interleaved schedules send through a chunk
    before they go on to the next. The others concern ZeroPP alone: ``unit`` (default: P, at most
    m), ``activation_cap`` (live chunk-activations per rank, default ``unit * chunks``),
    ``split_backward`` and ``costs`` (durations, one per stage; default: all equal). Raises
    ValueError where the generator has no order for these sizes.
    """
    _check_chunks(name, chunks)
    m = num_microbatches
    if name != "zeropp":
        return _without_units(name, num_ranks, chunks, m=m, group=group or num_ranks)
    unit = unit_size(unit or "auto", num_ranks, m)
    sizes = StepSizes(
        num_ranks=num_ranks,
        chunks=chunks,
        num_microbatches=m,
        unit=unit,
        activation_cap=activation_cap or unit * chunks,
        split_backward=split_backward,
        gather=any(cost.unshard for cost in costs or ()),
    )
    return _cheapest(step_drafts(sizes, tuple(costs or ())), costs or ())[0]


def _check_chunks(name: str, chunks: int) -> None:
    if name not in GENERATORS:
        raise ValueError(f"schedule={name!r}: no such generator (known: {', '.join(GENERATORS)})")
    if chunks > 1 and name in ("gpipe", "1f1b", "zb_h1"):
        raise ValueError(f"chunks={chunks}: {name} has one chunk per rank")
    if chunks != 2 and name == "zbv":
        raise ValueError(f"chunks={chunks}: zbv has two chunks per rank")


def _cheapest(drafts: Iterator[_StepDraft], costs: Sequence[StageCost]) -> _StepDraft:
    """The draft whose complete programs the event loop prices lowest on these costs; the first of
    equals, which is the order for equal durations."""
    first, *others = drafts
    if not others:
        return first
    return min([first, *others], key=lambda draft: event_loop.run(draft[1](), costs).step_s)


def _without_units(name: str, num_ranks: int, chunks: int, *, m: int, group: int) -> Schedule:
    """A schedule of a generator other than ZeroPP's."""
    return Schedule(
        name=name,
        num_microbatches=m,
        unit=m,
        stage_rank=v_placement(num_ranks) if name == "zbv" else loop_placement(num_ranks, chunks),
        programs=_programs(name, num_ranks, chunks, m=m, group=group),
    )


def _programs(name: str, num_ranks: int, chunks: int, *, m: int, group: int) -> tuple[Program, ...]:
    if name == "1f1b":
        return generators.one_f_one_b(num_ranks, m)
    if name == "interleaved_1f1b":
        return generators.interleaved_1f1b(num_ranks, chunks, m, group)
    if name == "zb_h1":
        return generators.zb_h1(num_ranks, m)
    if name == "interleaved_zb":
        return generators.interleaved_zb(num_ranks, chunks, m, group)
    if name == "zbv":
        return generators.zbv(num_ranks, m)
    return generators.looped_bfs(num_ranks, chunks, m)
