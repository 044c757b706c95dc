"""The engine on real processes against one process and torch's own runtime, and what happens
around collectives, counted while a step runs: copies (none), and the collectives of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed.pipelining import PipelineStage
from torch.profiler import ProfilerActivity, profile, record_function

from baselines.model import build_piece
from baselines.torch_pp.private_names import Runtime, load_programs
from tests.gloo.cases import (
    ADAMW,
    SEED,
    Case,
    Outcome,
    build_model_of,
    local_microbatches,
    loss_function,
    train,
    train_alone,
    worst_error,
)
from tests.gloo.world import World, on_ranks
from zeropp.engine.engine import Engine
from zeropp.engine.parameters import flat
from zeropp.engine.ranks import lanes
from zeropp.engine.ranks.collectives import Channels, neighbours
from zeropp.engine.ranks.lanes import Ticket, Work
from zeropp.schedule.program import Action, Op, RankProgram
from zeropp.types.training import OptimizerConfig

SGD = OptimizerConfig(kind="sgd", lr=0.1)
CASES = [
    Case(pp=1, chunks=1, unit=3, batch=4),
    Case(pp=2, replicate=2, chunks=3, unit=4, batch=12, layers=6, recompute="full"),
    Case(pp=2, chunks=2, unit=4, batch=8, layers=9, recompute="full", recomputed=(1, 0, 2, 1)),
    Case(pp=4, chunks=2, unit=4, batch=8, layers=8, cap=7),
    Case(pp=2, shard=2, chunks=2, unit=2, batch=8, recompute="selective"),
    Case(pp=1, shard=4, chunks=2, unit=2, batch=16, reduce_every="step"),
    Case(pp=1, replicate=2, zero=True, chunks=2, unit=2, batch=8, tied=True),
    Case(pp=2, shard=2, replicate=2, zero=True, batch=16, tied=True, recompute="full"),
    Case(pp=2, replicate=3, zero=True, tied=True, chunks=2, batch=12, placement="pp_inner"),
    Case(pp=2, shard=2, chunks=2, batch=8, dropout=0.2, recompute="full"),
    Case(pp=2, shard=2, chunks=3, unit=1, batch=12, layers=6, cap=3, reduce_every="step"),
    Case(pp=2, shard=2, chunks=2, unit=3, batch=10, split_backward=False, recompute="full"),
    # With those above: pp, shard and replicate in {1, 2, 3}, alone and in pairs. Units that do not
    # divide the microbatches, and fewer microbatches than pipeline ranks.
    Case(pp=1, shard=3, chunks=1, unit=2, batch=9),
    Case(pp=1, replicate=3, chunks=3, unit=2, batch=9),
    Case(pp=1, shard=2, replicate=2, zero=True, chunks=2, unit=3, batch=16),
    Case(pp=1, shard=2, replicate=3, chunks=1, unit=1, batch=6, layers=2),
    Case(pp=2, shard=3, chunks=1, unit=2, batch=9, tied=True),
    Case(pp=3, shard=2, unit=3, batch=4, layers=6, recompute="full", placement="pp_inner"),
    Case(pp=3, replicate=2, zero=True, chunks=1, unit=3, batch=2),
    # Gradients in parts: of full and of delayed backwards, over shards, replicas and a single rank.
    Case(pp=1, shard=2, chunks=4, unit=2, batch=8, parts=3),
    Case(pp=2, shard=2, chunks=2, unit=2, batch=8, parts=4, split_backward=False, recompute="full"),
    Case(pp=2, shard=2, replicate=2, zero=True, batch=16, tied=True, parts=3, recompute="mlp"),
    Case(pp=2, replicate=2, chunks=2, batch=8, parts=2, reduce_every="step"),
    Case(pp=4, shard=1, chunks=1, unit=4, batch=6, parts=9),
    # Weight gradients of several microbatches in one product, also fewer than a group.
    Case(pp=1, shard=2, chunks=4, unit=3, batch=16, merged=3, parts=3, split_backward=False),
    Case(pp=2, shard=2, chunks=2, unit=6, batch=14, merged=3, recompute="full"),
]


def check(outcomes: list[Outcome], expected: Outcome, tolerance: float) -> None:
    names: set[str] = set()
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerance)
        assert outcome.norms == pytest.approx(expected.norms, rel=tolerance)
        assert worst_error(outcome.gradients, expected.gradients) < tolerance
        names |= set(outcome.gradients)
    assert names == set(expected.gradients)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_gradients_and_two_steps(case: Case, world: World) -> None:
    dtype, steps, optimizer = torch.float64, 2, replace(ADAMW, clip_norm=0.5)
    expected = train_alone(case.shape, case.batch, optimizer, steps, dtype)
    outcomes = world.run(train, case, dtype, steps, optimizer, size=case.world)
    check(outcomes, expected, 1e-12)
    for outcome in outcomes:
        exact = {name: value.float() for name, value in expected.parameters.items()}
        assert worst_error(outcome.parameters, exact) < 1e-6


LLAMA = [
    Case(pp=2, shard=2, chunks=2, unit=3, batch=10, recompute="full"),
    Case(pp=2, shard=2, chunks=2, unit=2, batch=8, recompute="selective", tied=True),
    Case(pp=2, shard=2, chunks=2, unit=2, batch=8, recompute="mlp", recomputed=(1, 1, 0, 1)),
    Case(pp=2, replicate=2, zero=True, tied=True, unit=4, batch=12, placement="pp_inner"),
]


@pytest.mark.parametrize("case", LLAMA, ids=str)
def test_fp32_gradients_of_llama(case: Case, world: World) -> None:
    case = replace(case, family="llama")
    found = world.run(train, case, torch.float32, 1, SGD, size=case.world)
    check(found, train_alone(case.shape, case.batch, SGD, 1), 1e-5)


BF16 = [
    Case(2, shard=2, precision="bf16", recompute="full"),
    Case(2, shard=2, replicate=2, zero=True, precision="bf16", batch=16, tied=True),
    Case(1, replicate=3, zero=True, precision="bf16", batch=12),
    # Gradients in parts.
    Case(1, shard=4, chunks=3, unit=2, precision="bf16", batch=16, parts=3, recompute="mlp"),
    Case(2, shard=2, chunks=3, unit=4, layers=6, precision="bf16", parts=4, split_backward=False),
    Case(4, chunks=1, unit=4, precision="bf16", parts=2, family="llama", merged=2),
    Case(4, shard=2, precision="bf16", layers=8, parts=3, offload=1, recompute="full"),
    Case(2, replicate=2, zero=True, precision="bf16", batch=16, parts=3, merged=2, tied=True),
]


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_computes_with_fp32_masters(case: Case, world: World) -> None:
    expected = train_alone(case.shape, case.batch, SGD, 2)
    for outcome in world.run(train, case, torch.float32, 2, SGD, size=case.world):
        assert outcome.losses == pytest.approx(expected.losses, rel=5e-3)
        assert {p.dtype for p in outcome.gradients.values()} == {torch.float32}
        assert outcome.norms == pytest.approx(expected.norms, rel=2e-2)
        assert worst_error(outcome.gradients, expected.gradients) < 0.1


def train_compiled(case: Case, *arguments: Any) -> tuple[Outcome, int]:
    """As ``train``, with graphs captured and split but not translated to C++, which takes long;
    and the number of graphs."""
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    in_python = partialmethod(nn.Module.compile, backend="aot_eager")
    with mock.patch.object(nn.Module, "compile", in_python):
        return train(case, *arguments), graphs["unique_graphs"] - before


@pytest.mark.parametrize(
    "case",
    [
        Case(1, shard=2, chunks=3, batch=4, layers=9, compile=True),
        Case(1, shard=2, chunks=3, batch=4, recompute="full", compile=True),
    ],
    ids=str,
)
def test_compiled_blocks_have_the_same_gradients(case: Case, world: World) -> None:
    found = world.run(train_compiled, case, torch.float64, 2, ADAMW, size=case.world)
    expected = train_alone(case.shape, case.batch, ADAMW, 2, torch.float64)
    check([outcome for outcome, _ in found], expected, 1e-10)
    # Of a kind of block, not of each: more kinds than torch's limit would fall back to eager.
    assert all(0 < graphs <= 8 for _, graphs in found)


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        (Case(pp=2, batch=12, layers=8), 2),
        (Case(pp=2, replicate=3, batch=36, layers=8), 2),
        (Case(pp=3, replicate=2, batch=24, layers=8), 6),
        (Case(pp=4, replicate=2, batch=24, layers=8), 4),
    ],
    ids=str,
)
@on_ranks(lambda case: case.world)
def test_few_process_groups_whatever_the_world(case: Case, groups: int) -> None:
    plan = case.plan()
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        Channels(neighbours(plan.schedule), plan.layout, torch.device("cpu"), None, ExitStack())
    assert made.call_count == groups


# The operators by which torch copies values from one place to another.
COPIES = {
    f"aten::{name}"
    for name in ("cat", "clone", "copy_", "index_copy_", "split_with_sizes_copy", "stack")
} | {"aten::_to_copy", "aten::_foreach_copy_"}
WINDOW, COLLECTIVE = "work of a lane", "collective"
AROUND = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)
ORDERS = ("as planned", "reversed")
WATCHED = [
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


def operators_around(case: Case) -> tuple[list[str], int, int]:
    """Names of the copies around this rank's collectives in one step, how many operators there
    were to look at, and how many flat buffers the step gathers."""
    scatter = marked(vars(flat)["reduce_scatter_single"])
    with (
        mock.patch.object(lanes, "make_lane", WatchedLane),
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


@pytest.mark.parametrize("case", WATCHED, ids=str)
def test_nothing_but_casts_is_copied_around_a_collective(case: Case, world: World) -> None:
    """In mixed precision a rank casts its own part alone, once for each gather."""
    for copies, looked_at, gathered in world.run(operators_around, case, size=case.world):
        assert looked_at > 10  # collectives and views
        if case.precision == "bf16":
            assert copies == ["aten::copy_"] * gathered != []
        else:  # rows of other replicas are copied behind a gather, where gloo writes one's own
            assert set(copies) <= ({"aten::copy_"} if case.zero else set())


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
    program = plan.schedule.programs[plan.layout.coordinates(dist.get_rank())["pp"]]
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


@pytest.mark.parametrize("case", [*WATCHED, Case(pp=2, replicate=2, chunks=2, batch=8)], ids=str)
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


class Stage(nn.Module):
    """Pieces of one stage, called one after another."""

    def __init__(self, case: Case, pieces: range) -> None:
        super().__init__()
        self.pieces = nn.ModuleDict({str(i): build_piece(case.shape, i, SEED) for i in pieces})

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces.values():
            x = piece(x)
        return x


def run_by_torch(case: Case, programs: Path) -> dict[str, Tensor]:
    """Gradients of this rank's stages after one step of torch's runtime."""
    plan, rank = case.plan(), dist.get_rank()
    count = plan.schedule.num_stages
    modules = {s: Stage(case, plan.pieces_of(s)) for s in plan.schedule.stages_of(rank)}
    stages = [PipelineStage(m, s, count, torch.device("cpu")) for s, m in modules.items()]
    count_m = plan.num_microbatches
    runtime = Runtime(stages, count_m, loss_fn=loss_function)  # type: ignore[no-untyped-call]
    load_programs(runtime, programs)
    inputs, targets = case.data(0)
    arguments = (inputs,) if rank == 0 else ()
    last = plan.schedule.stage_rank[-1] == rank
    runtime.step(*arguments, target=targets if last else None)
    return {
        name.removeprefix("pieces."): parameter.grad
        for module in modules.values()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, chunks=2, unit=2, batch=6),
        Case(pp=2, chunks=3, unit=4, batch=8, layers=6, cap=9),
        Case(pp=4, chunks=2, unit=4, batch=8, layers=8),
    ],
    ids=["2x2", "2x3", "4x2"],
)
def test_torch_runs_our_program_to_the_same_gradients(
    case: Case, world: World, tmp_path: Path
) -> None:
    schedule = case.plan().schedule
    compute = [tuple(a for a in program if a.op.is_compute) for program in schedule.programs]
    assert any(a.op is Op.BACKWARD_WEIGHT for a in compute[0])
    path = tmp_path / "programs.csv"
    path.write_text(replace(schedule, programs=tuple(compute)).to_csv())
    ours = world.run(train, case, torch.float32, 1, SGD, size=case.pp)
    theirs = world.run(run_by_torch, case, path, size=case.pp)
    for found, expected in zip(ours, theirs, strict=True):
        assert set(found.gradients) == set(expected)
        assert worst_error(found.gradients, expected) < 1e-5
