"""The engine and the baselines on virtual streams: no race, the numbers without emulation,
every fault that is put into the engine is found; and torch's own pipelines over FSDP2 with their
orders of device work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from functools import cache
from itertools import groupby
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

from baselines.torch_pp.private_names import PlannedStage
from baselines.torch_pp.trainer import TorchPipelineTrainer
from tests.gloo.cases import CPU, SEED, local_batch, request
from tests.gloo.world import World, on_ranks
from tests.streams.cases import CASES, CONTROLS, FAULTS, Case, Found, built, run_case, watch_case
from tests.unit.device_orders import check, logs_of, one_group
from zeropp.emulate import watch
from zeropp.emulate.log import COMPUTE, Issued
from zeropp.emulate.rendezvous import hanging_waits, mismatches, stuck
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Schedule, loop_placement, parse_action
from zeropp.types.training import OptimizerConfig


def faults_of(found: list[Found]) -> set[str]:
    return {fault for one in found for fault in one.faults}


def in_a_step(log: list[Issued], shard: int) -> list[str]:
    """What a rank communicates in the first step: sends, receives, gathers and reductions; several
    gathers in a row, of the flat buffers of a chunk, are one, and one shard has none."""
    places = {one.what: index for index, one in enumerate(log) if one.kind == "place"}
    step = log[places.get("the first step", 0) : places.get("its end", len(log))]
    wanted = [*KINDS] if shard > 1 else ["send", "receive"]
    kinds = [_kind(one) for one in step if one.kind == "communication"]
    return [kind for kind, _ in groupby(kind for kind in kinds if kind in wanted)]


def host_waits(log: list[Issued]) -> int:
    """How often the host waits for the device in a step."""
    places = {one.what: index for index, one in enumerate(log) if one.kind == "place"}
    step = log[places["the second step"] : places["the end of the second step"]]
    return sum(one.kind == "sync" for one in step)


def split_at_first_step(log: list[Issued]) -> tuple[list[Issued], list[Issued]]:
    """What is communicated before the first step, and in the first two."""
    places = {one.what: index for index, one in enumerate(log) if one.kind == "place"}
    begin, end = places["the first step"], places["the end of the second step"]
    return log[:begin], log[begin:end]


def connections(log: list[Issued]) -> set[Hashable]:
    """The groups of collectives, and the pairs in groups of messages, that NCCL connects."""
    return {part.key[0] for one in log for part in one.parts if one.kind == "communication"}  # type: ignore[index]


def streams_of_communicators(log: list[Issued]) -> dict[Hashable, set[str | None]]:
    """The streams on which each group communicates."""
    found: dict[Hashable, set[str | None]] = defaultdict(set)
    for one in log:
        for part in one.parts if one.kind == "communication" else ():
            found[part.key[0][0]].add(one.stream)  # type: ignore[index]
    return found


def unordered(log: list[Issued]) -> list[str]:
    """The communication that nothing orders after what its communicator ran before, as NCCL asks
    for, whatever the streams."""
    before: dict[str | None, set[int]] = defaultdict(set)  # by stream (None: the host), what ended
    events: dict[int, set[int]] = {}
    last: dict[Hashable, int] = {}  # of a communicator
    found = []
    for place, one in enumerate(log):
        if one.kind == "sync":
            ended = events[one.event] if one.event else before[one.stream]
            before[None] |= ended if one.stream else set().union(*before.values())
        elif one.kind in ("record", "wait", "communication"):
            before[one.stream] |= before[None]
        if one.kind == "record":
            events[one.event] = set(before[one.stream])
        elif one.kind == "wait":
            before[one.stream] |= events[one.event]
        elif one.kind == "communication":
            for group in {part.key[0][0] for part in one.parts}:  # type: ignore[index]
                if last.get(group, place) not in {place, *before[one.stream]}:
                    found.append(f"{one.what} on {one.stream} after {log[last[group]].what}")
                last[group] = place
            before[one.stream].add(place)
    return found


def device_waits(log: list[Issued]) -> int:
    """How often the host waits for its whole device, in everything that is done."""
    return sum(one.kind == "sync" and one.stream is None for one in log)


def _kind(one: Issued) -> str:
    for kind, texts in KINDS.items():
        if any(text in one.what for text in texts):
            return kind
    return ""


KINDS = {
    "send": ("isend", "SEND"),
    "receive": ("irecv", "RECV"),
    "gather": ("_allgather_base_", "gathers"),
    "reduction": ("_reduce_scatter_base_", "reductions"),
}


Numbers = Callable[[str], list[list[float]]]


@pytest.fixture(scope="module")
def plain(world: World, tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Every rank's numbers of a case without emulation."""

    @cache
    def numbers(name: str) -> list[list[float]]:
        case, folder = CASES[name], str(tmp_path_factory.mktemp("plain"))
        found: list[Found] = world.run(run_case, case, False, folder, size=case.ranks)
        return [one.numbers for one in found]

    return numbers


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_nothing_races_and_everything_ends(
    case: Case, world: World, plain: Numbers, tmp_path: Path
) -> None:
    found = world.run(run_case, case, True, str(tmp_path), size=case.ranks)
    assert faults_of(found) == set()
    assert [one.numbers for one in found] == plain(case.name)
    logs = {rank: one.log for rank, one in enumerate(found)}
    assert mismatches(logs) == []
    assert stuck(logs) == {}
    assert stuck(logs, resident=3) == {}
    assert stuck(logs, resident=5, seed=1) == {}
    assert {rank: hanging_waits(logs, rank) for rank in logs} == {rank: [] for rank in logs}
    assert [device_waits(one.log) for one in found] == [0] * case.ranks
    for log in logs.values():
        assert unordered(log) == []
        before, steps = split_at_first_step(log)
        assert connections(steps) <= connections(before)  # else hosts wait for each other in a step
        streams = [*streams_of_communicators(steps).values()]
        assert {len(own) for own in streams} <= {1}
        beside = Counter(stream for own in streams for stream in own if stream != COMPUTE)
        assert set(beside.values()) <= {1}  # else one would wait for another's
    pp, chunks = case.options["pp"], case.options.get("chunks", 1)
    # Muon is not fused; in a pipeline the host reads checksums of inputs and targets at once on a
    # CPU, but on CUDA a step later.
    waits = case.whole + 2 * (pp > 1)
    assert [host_waits(one.log) for one in found] == [waits] * case.ranks
    if pp > 1:  # so that what tests/unit simulates is what the engine issues
        first = case.ranks // pp  # ranks of a pipeline stage stand beside each other
        schedule = Schedule(
            name=case.name,
            num_microbatches=case.batch,
            unit=case.batch,
            stage_rank=loop_placement(pp, chunks),
            programs=tuple(
                tuple(parse_action(action) for action in found[rank * first].program)
                for rank in range(pp)
            ),
        )
        expected = logs_of(schedule)
        for rank in range(pp):
            simulated = in_a_step(expected[rank], first)
            issued = in_a_step(found[rank * first].log, first)
            assert issued[-len(simulated) :] == simulated  # after it has learnt the shapes


def watched(case: Case, fault: str | None) -> tuple[bool, str, list[float], set[int]]:
    """Whether the public check is clean and what it says, losses, and the ranks' host waits in a
    step, in which the test reads the loss."""
    report, losses = watch_case(case, fault)
    waits = {len(whats) - 1 for whats in report.host_waits.values()}
    return report.is_clean, str(report), losses, waits


@pytest.mark.parametrize(
    ("name", "waits"), [("bf16", 0), ("reduced once per step", 2), ("whole parameters", 1)]
)
def test_watching_a_model_that_exists_changes_nothing(
    name: str, waits: int, world: World, plain: Numbers
) -> None:
    case = CASES[name]
    found = world.run(watched, case, None, size=case.ranks)
    for (_, text, losses, seen), numbers in zip(found, plain(name), strict=True):
        assert text == "no race, no hang"
        assert losses[:2] == numbers[:4:2]  # beside each the gradients' norm
        assert len(losses) == 4  # a step before, two that are watched, and one afterwards
        assert seen == {waits}


@on_ranks(2)
def test_recording_spans_waits_for_compute_alone() -> None:
    """As on CUDA around each action, and for no other stream: a receive may have to wait for what
    this host has yet to send."""
    model, batches = built(CASES["reduced once per step"])
    batch = batches[0][model.rows]
    interpreter = model.engine.interpreter
    model.train_step(batch[:, :-1], batch[:, 1:])
    actions = sum(interpreter.counters().values())
    interpreter.record_spans(True)
    with mock.patch.object(interpreter, "_device", torch.device("cuda")):
        report = watch(lambda: model.train_step(batch[:, :-1], batch[:, 1:]))
    model.close()
    assert str(report) == "no race, no hang"
    waits = [what for what in report.host_waits[0] if "Stream" in what or "synchronize" in what]
    assert waits == ["Stream.synchronize of compute"] * 2 * actions


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, world: World) -> None:
    case = CASES[FAULTS[name][1]]
    clean, text, *_ = world.run(watched, case, name, size=case.ranks)[0]
    assert not clean, text


@pytest.mark.faults
@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_no_fault_is_not_found(name: str, world: World) -> None:
    case = CASES[CONTROLS[name][1]]
    clean, text, *_ = world.run(watched, case, name, size=case.ranks)[0]
    assert clean, text


def watched_trainer(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """What is found in two steps of a trainer, and what its host waits for in one."""
    trainer = TorchPipelineTrainer(plan, OptimizerConfig(), CPU, SEED)
    inputs, targets = local_batch(plan, 0)
    report = watch(lambda: trainer.step(inputs, targets), times=2)
    return str(report), report.host_waits[dist.get_rank()]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zb", "zbv"])
def test_torchs_pipelines_over_fsdp2_are_clean(schedule: str, world: World) -> None:
    asked = {"name": "torch_pp", "pp": 2, "shard": 2, "schedule": schedule, "chunks": 2}
    found = world.run(watched_trainer, request(4, asked).plan(), size=4)
    assert found == [("no race, no hang", ())] * 4


def torch_schedule(name: str, ranks: int) -> Schedule:
    """Torch's order with torch's own transfers and gathers."""
    count = 2 * ranks
    on_a_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    held = (0, count - 1) if on_a_v else range(0, count, ranks)
    stages = [PlannedStage(index, count, ranks) for index in held]
    source = getattr(torch_schedules, name)(stages, 2 * ranks, loss_fn=lambda *_: None)
    programs = tuple(
        tuple(
            parse_action(str(part))
            for cell in source.pipeline_order_with_comms[rank]
            for part in cell.sub_actions or (cell,)
        )
        for rank in range(ranks)
    )
    stage_rank = tuple(source.stage_index_to_group_rank[s] for s in range(count))
    return Schedule(
        name=name,
        num_microbatches=2 * ranks,
        unit=2 * ranks,
        stage_rank=stage_rank,
        programs=programs,
    )


PEERS = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_pipelines_end(name: str, ranks: int) -> None:
    check(logs_of(torch_schedule(f"Schedule{name}", ranks), one_group), waits_of=ranks)
