"""What happens around collectives, counted while a step runs: copies (none), and the collectives
themselves (those of the plan)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from tests.gloo.cases import Case, build_model_of, local_microbatches
from tests.gloo.world import World, on_ranks
from zeropp.engine.engine import Engine
from zeropp.engine.parameters import flat
from zeropp.engine.ranks import lanes
from zeropp.engine.ranks.lanes import Ticket, Work
from zeropp.schedule.program import Action, Op, RankProgram

# The operators by which torch copies values from one place to another.
COPIES = {
    f"aten::{name}"
    for name in ("cat", "clone", "copy_", "index_copy_", "split_with_sizes_copy", "stack")
} | {"aten::_to_copy", "aten::_foreach_copy_"}
WINDOW, COLLECTIVE = "work of a lane", "collective"
AROUND = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)
ORDERS = ("as planned", "reversed")
CASES = [
    Case(pp=2, shard=2, chunks=2, batch=8),
    Case(pp=1, shard=2, replicate=2, zero=True, chunks=2, batch=8),
    Case(pp=1, shard=3, chunks=3, batch=6, reduce_every="step"),
    Case(pp=1, shard=2, chunks=2, batch=4, precision="bf16"),
]


class WatchedLane:
    """A lane that runs its work at once, inside a window of the profiler."""

    def __init__(self, device: torch.device, name: str) -> None:
        del device, name

    def run(self, work: Work, after: Sequence[Ticket] = ()) -> Any:
        del after
        with record_function(WINDOW), torch.no_grad():
            work()
        return self

    def wait(self) -> None:
        """Return at once, since all work is done."""

    def close(self) -> None:
        """Do nothing, since there is nothing to end."""


def below(event: FunctionEvent) -> Iterator[FunctionEvent]:
    """All operators that an event contains, except what a collective does inside (gloo reduces
    and scatters a copy)."""
    for child in event.cpu_children:
        yield child
        if child.name != COLLECTIVE:
            yield from below(child)


def marked(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that runs inside a window of the profiler."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        with record_function(COLLECTIVE):
            return collective(*arguments, **keywords)

    return run


def operators_around(case: Case, injected: bool) -> tuple[list[str], int, int]:
    """Names of the copies around this rank's collectives in one step, how many operators there
    were to look at, and how many flat buffers the step gathers. ``injected``: a gather copies what
    it has gathered."""
    original = flat.FlatParameters._gather

    def gather_and_copy(buffer: flat.FlatParameters) -> None:
        original(buffer)
        buffer._buffer.clone()

    gather = gather_and_copy if injected else original
    scatter = marked(vars(flat)["reduce_scatter_single"])
    with (
        mock.patch.object(lanes, "make_lane", WatchedLane),
        mock.patch.object(flat.FlatParameters, "_gather", gather),
        mock.patch.object(flat, "all_gather_single", marked(vars(flat)["all_gather_single"])),
        mock.patch.object(flat, "reduce_scatter_single", scatter),
        mock.patch.object(dist, "all_reduce", marked(dist.all_reduce)),
    ):
        engine = build_model_of(case).engine
        engine.step(local_microbatches(case, 0))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            engine.step(local_microbatches(case, 1))
    program = engine.interpreter._program
    windows = {WINDOW, *(str(action) for action in program if action.op in AROUND)}
    found = {  # by identity, because a lane's window lies in an action's
        id(operator): operator.name
        for event in profiler.events()
        if event.name in windows
        for operator in below(event)
    }
    gathers = [action.stage for action in program if action.op is Op.UNSHARD]
    gathered = sum(len(engine.chunks[stage].flats) for stage in gathers)
    engine.close()
    return [name for name in found.values() if name in COPIES], len(found), gathered


@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_nothing_is_copied_around_a_collective(case: Case, world: World) -> None:
    for copies, looked_at, _ in world.run(operators_around, case, False, size=case.world):
        assert looked_at > 10  # collectives and views
        # Rows of other replicas are copied behind their gather, where gloo would write one's own.
        assert set(copies) <= ({"aten::copy_"} if case.zero else set())


def test_a_copy_around_a_collective_would_be_seen(world: World) -> None:
    for copies, _, _ in world.run(operators_around, CASES[0], True, size=CASES[0].world):
        assert set(copies) == {"aten::clone", "aten::copy_"}


def test_mixed_precision_casts_its_own_part_alone(world: World) -> None:
    case = CASES[-1]
    for copies, _, gathered in world.run(operators_around, case, False, size=case.world):
        assert gathered > 0
        assert copies == ["aten::copy_"] * gathered


@contextmanager
def counting(engine: Engine, found: Counter[tuple[str, str]]) -> Iterator[None]:
    """Count collectives and messages as (kind, group)."""
    groups = engine._groups
    names = {id(groups.gather): "gather", id(groups.reduce): "reduce"}
    names |= {id(groups.replicate): "replicate", id(groups.world): "world"}
    names[id(None)] = "default"  # which is given as none, as groups of one rank are

    def counted(kind: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        message = kind in ("isend", "irecv")
        found[kind, "pair" if message else names[id(keywords.get("group"))]] += 1
        return call(*arguments, **keywords)

    gather = partial(counted, "gather", vars(flat)["all_gather_single"])
    scatter = partial(counted, "reduce-scatter", vars(flat)["reduce_scatter_single"])
    with (
        mock.patch.object(flat, "all_gather_single", gather),
        mock.patch.object(flat, "reduce_scatter_single", scatter),
        mock.patch.object(dist, "all_reduce", partial(counted, "all-reduce", dist.all_reduce)),
        mock.patch.object(dist, "isend", partial(counted, "isend", dist.isend)),
        mock.patch.object(dist, "irecv", partial(counted, "irecv", dist.irecv)),
    ):
        yield


def planned(case: Case, engine: Engine) -> Counter[tuple[str, str]]:
    """The collectives and messages of a step, by this rank's program in the plan and by how many
    buffers hold the parameters of a chunk (weights with delayed gradients have their own); beside
    them one sum of losses and norms."""
    plan = case.plan()
    rank = plan.layout.coordinates(dist.get_rank())["pp"]
    program = plan.schedule.programs[rank]
    flats = {stage: len(chunk.flats) for stage, chunk in engine.chunks.items()}

    def of(op: Op) -> list[int]:
        return [action.stage for action in program if action.op is op]

    reduced = of(Op.REDUCE_GRAD)
    expected = Counter({("all-reduce", "world"): 1})
    expected["isend", "pair"] = len(of(Op.SEND_F)) + len(of(Op.SEND_B))
    expected["irecv", "pair"] = len(of(Op.RECV_F)) + len(of(Op.RECV_B))
    if case.shard > 1:
        expected["gather", "gather"] = sum(flats[stage] for stage in of(Op.UNSHARD))
        expected["reduce-scatter", "reduce"] = sum(flats[stage] for stage in reduced)
    if case.replicate > 1:
        kind = "reduce-scatter" if case.zero else "all-reduce"
        expected[kind, "replicate"] = sum(flats[stage] for stage in of(Op.REDUCE_REPLICAS))
    if of(Op.GATHER_UPDATED):
        expected["gather", "replicate"] = sum(flats.values())
    return +expected


def settle(engine: Engine) -> None:
    """Wait for the rows that other replicas have updated."""
    for one in engine.flats:
        one.settle()


@pytest.mark.parametrize("case", [*CASES, Case(pp=2, replicate=2, chunks=2, batch=8)], ids=str)
@on_ranks(lambda case: case.world)
def test_collectives_per_step_are_the_plans(case: Case) -> None:
    engine = build_model_of(case).engine
    found: Counter[tuple[str, str]] = Counter()
    engine.step(local_microbatches(case, 0))
    settle(engine)
    with counting(engine, found):
        engine.step(local_microbatches(case, 1))
        settle(engine)
    expected = planned(case, engine)
    assert sum(expected.values()) > 1
    assert found == expected
    engine.close()


def reductions_of(case: Case, order: str) -> tuple[list[int], list[float]]:
    """The stages that a step reduces over the replicas, in turn, and the losses of two steps, with
    the reductions in another ``order`` than the plan's, or without them."""
    plan = case.plan()
    programs = tuple(tuple(_reordered(program, order)) for program in plan.schedule.programs)
    changed = replace(plan, schedule=replace(plan.schedule, programs=programs))
    stages: list[int] = []
    reduce = flat.FlatParameters.reduce_over_replicas

    def watched(buffer: flat.FlatParameters) -> None:
        stages.extend(stage for stage, one in engine.chunks.items() if one.flats[0] is buffer)
        reduce(buffer)

    with (
        mock.patch.object(Case, "plan", return_value=changed),
        mock.patch.object(flat.FlatParameters, "reduce_over_replicas", watched),
    ):
        engine = build_model_of(case, torch.float64).engine
        losses = [float(engine.step(local_microbatches(case, n)).loss) for n in (0, 1)]
    engine.close()
    return stages[: len(stages) // 2], losses


def _reordered(program: RankProgram, order: str) -> Iterator[Action]:
    crossed = [action for action in program if action.op is Op.REDUCE_REPLICAS]
    for action in program:
        if action.op is Op.UPDATE and order == "reversed":
            yield from reversed(crossed)
        if action not in crossed or order == "as planned":
            yield action


def test_replicas_are_reduced_in_the_order_of_the_program(world: World) -> None:
    case = Case(pp=1, shard=2, replicate=2, zero=True, chunks=3, batch=8)
    runs = {order: world.run(reductions_of, case, order, size=4) for order in ORDERS}
    stages = [a.stage for a in case.plan().schedule.programs[0] if a.op is Op.REDUCE_REPLICAS]
    assert len(stages) == 3
    for planned, moved in zip(*runs.values(), strict=True):
        assert (planned[0], moved[0]) == (stages, stages[::-1])
        assert planned[1] == moved[1]


@on_ranks(2)
def test_a_program_that_misses_a_part_of_the_step_is_refused() -> None:
    with pytest.raises(Exception, match="the plan asks for 0REDUCE_REPLICAS"):
        reductions_of(Case(pp=1, replicate=2), "none")


@on_ranks(8)
def test_closing_destroys_every_process_group() -> None:
    engine = build_model_of(Case(pp=4, shard=2, chunks=1, unit=4, tied=True)).engine
    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) > 4
    engine.close()
    assert len(groups) == 1  # the default group
