"""What runs on virtual streams: a loop of FSDP2 and pipelining and streams of a few lines; the
engine: nothing races, numbers are those without emulation, and every injected fault is found; and
torch's own pipelines over FSDP2 with their orders of device work."""

from __future__ import annotations

import io
import re
import runpy
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from contextlib import ExitStack, nullcontext, redirect_stderr
from datetime import timedelta
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.utils import get_total_norm

from baselines.torch_pp.trainer import TorchPipelineTrainer
from tests.gloo.cases import CPU, SEED, local_batch, request
from tests.gloo.world import World, on_ranks
from tests.streams.cases import CASES, CONTROLS, FAULTS, Case, Found, built, run_case, watch_case
from tests.streams.torch_orders import torch_schedule
from tests.unit.device_orders import check, logs_of, one_group
from zeropp import emulate
from zeropp.emulate import emulation, watch
from zeropp.emulate.device import VirtualDevice
from zeropp.emulate.emulation import as_on_cuda
from zeropp.emulate.kernels import describe
from zeropp.emulate.log import COMPUTE, Issued, Kernel
from zeropp.emulate.private_names import FakeTensorMode
from zeropp.emulate.rendezvous import hanging_waits, mismatches, stuck
from zeropp.emulate.world import fake_world
from zeropp.engine.layers import deferred
from zeropp.engine.layers.offload import HostMemory, Offload
from zeropp.engine.ranks.collectives import all_gather_single, reduce_scatter_single
from zeropp.engine.ranks.errors import ErrorBarrier
from zeropp.engine.ranks.lanes import make_lane
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Schedule, loop_placement, parse_action
from zeropp.types.operators import Attention, Product
from zeropp.types.training import OptimizerConfig

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "verify_pipeline.py"


def example(*arguments: str) -> tuple[bool, str]:
    report = runpy.run_path(str(EXAMPLE))["main"](list(arguments))
    return report.is_clean, str(report)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("no race, no hang",)),
        (("--forget", "wait"), ("race: write by irecv", "verify_pipeline.py")),
        # A gather for the next microbatch, begun in a backward that FSDP2 takes for the last: torch
        # 2.13 lets compute wait for it, but not the stream to which its memory goes back.
        (("--forget", "last"), ("reuse: write by c10d::_allgather_base_",)),
    ],
)
def test_what_is_found_in_a_loop_of_fsdp2_and_pipelining(
    world: World, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    for clean, text in world.run(example, *arguments, size=4):
        assert clean == (not arguments)
        assert all(word in text for word in words)


def hang() -> str:
    """Rank 0 alone enters a collective, which gives up after a second, and rank 1 waits for it."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    receive = torch.zeros(1)

    def work() -> None:
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 0:
            dist.irecv(receive, 1)
            dist.all_reduce(torch.ones(3), group=group)

    said = io.StringIO()
    with mock.patch.object(emulation, "_QUIET_S", 0.4), redirect_stderr(said):
        try:
            emulate.watch(work)
        except RuntimeError:
            dist.all_gather_object([None, None], ([], [], ()))  # as rank 1 does
            dist.send(torch.zeros(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)
    return said.getvalue()


def test_a_rank_that_hangs_says_what_it_has_entered_and_not_left(world: World) -> None:
    of_0, of_1 = world.run(hang, size=2)
    place = r"\(streams/test_verify.py:\d+\)"
    entered = rf"irecv 1: message 1 from rank 1 to rank 0 {place}; "
    entered += rf"c10d::allreduce_: collective 1 of group .*\(ranks 0, 1\) {place}\n"
    assert re.search(f"rank 0: nothing has moved for 0.4 s; entered and not left: {entered}", of_0)
    assert re.search(f"rank 0: .*Error; entered and not left: {entered}", of_0)
    assert "rank 1: nothing has moved for 0.4 s; entered and not left: nothing\n" in of_1


def faults_of(work: Callable[[torch.cuda.Stream], object]) -> list[str]:
    with emulate.emulated() as device:
        work(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    return [fault.kind for fault in device.faults]


def added_beside(stream: torch.cuda.Stream, begin: int = 0, end: int = 4) -> torch.Tensor:
    """Ones; a stream that has waited for compute adds to some."""
    x = torch.ones(8)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x[begin:end].add_(1)
    return x


def waited(stream: torch.cuda.Stream) -> None:
    x = added_beside(stream)
    torch.cuda.current_stream().wait_stream(stream)
    x.mul_(2)


def unwaited(stream: torch.cuda.Stream) -> None:
    x = torch.ones(4)
    with torch.cuda.stream(stream):
        x.add_(1)


def freed_early(stream: torch.cuda.Stream, *, recorded: bool = False) -> None:
    x = added_beside(stream)
    if recorded:
        x.record_stream(stream)
    del x
    torch.ones(8)


def synchronized(stream: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    x = torch.ones(4)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        x.add_(1)
        event.record()
    event.synchronize()
    x.mul_(2)


@pytest.mark.parametrize(
    ("work", "kinds"),
    [
        (waited, []),
        (unwaited, ["race"]),
        pytest.param(lambda stream: added_beside(stream)[4:].mul_(2), [], id="neighbours"),
        pytest.param(  # the first column of a matrix goes to the first element of its last row
            lambda stream: added_beside(stream, 4, 5).view(2, 4)[:, 0].mul_(2),
            ["race"],
            id="column",
        ),
        pytest.param(lambda stream: added_beside(stream).tolist(), ["race"], id="read early"),
        (freed_early, ["reuse"]),
        pytest.param(partial(freed_early, recorded=True), [], id="freed late"),
        (synchronized, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_a_fault(work: Callable[[Any], object], kinds: list[str]) -> None:
    assert faults_of(work) == kinds


def test_a_view_of_freed_memory_that_is_sent_is_found() -> None:
    with fake_world(rank=0, size=2), emulate.emulated() as device:  # gloo would read there
        buffer = torch.ones(8)
        view = buffer[:4]
        buffer.untyped_storage().resize_(0)
        dist.send(view, 1)
    (fault,) = device.faults
    assert str(fault).startswith("outside: read by isend 1")


def test_a_message_that_nobody_waits_for_keeps_its_memory_until_it_has_ended() -> None:
    """As in ``ProcessGroupNCCL::pointToPoint``."""
    with fake_world(rank=0, size=2), emulate.emulated() as device:
        dist.isend(torch.ones(4), 1)
        torch.ones(4)
    assert device.faults == []


def test_a_lane_ends_with_its_stream() -> None:
    with emulate.emulated() as device:
        lane = make_lane(torch.device("cpu"), "lane")
        lane.run(lambda: None)
        lane.close()
    (stream,) = {one.stream for one in device.log.issued if one.kind == "record"} - {"compute"}
    assert device.log.issued[-1][:2] == ("sync", stream)


def test_a_cpus_lane_waits_for_tickets_and_ends_with_its_work() -> None:
    first, second = (make_lane(torch.device("cpu"), name) for name in ("first", "second"))
    begun, done = threading.Event(), list[bool]()
    ticket = first.run(lambda: done.append(begun.wait(0.2)))  # the second one must not come before
    second.run(begun.set, [ticket])
    second.run(lambda: time.sleep(0.1))
    second.run(lambda: done.append(begun.is_set()))
    second.close()
    assert done == [False, True]
    first.close()


def test_a_stream_from_before_is_refused() -> None:
    before = torch.cpu.Stream()
    refused = pytest.raises(TypeError, match="was made before emulation began")
    with emulate.emulated(), refused, torch.cpu.stream(before):
        pass


def test_the_barrier_beside_nccl_is_on_the_cpu() -> None:
    made: list[str | None] = []
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(dist, "new_group", lambda **keywords: made.append(keywords["backend"])),
    ):
        ErrorBarrier(None, 2, ExitStack())
    assert made == ["gloo", "gloo"]


def test_torch_is_as_before_afterwards() -> None:
    before = torch.cuda.Stream, torch.cpu.stream, dist.isend, torch.UntypedStorage.resize_
    faults_of(waited)
    assert before == (torch.cuda.Stream, torch.cpu.stream, dist.isend, torch.UntypedStorage.resize_)


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2)
def test_asynchronous_collectives_and_batches(wait: bool) -> None:
    """A sum that runs beside compute, and messages of both directions in one batch."""

    def step() -> None:
        x, y = torch.ones(4), torch.zeros(4)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        if wait:
            work.wait()
        x.add_(1)
        work.wait()
        other = 1 - dist.get_rank()
        both = [dist.P2POp(dist.irecv, y, other), dist.P2POp(dist.isend, x, other)]
        for one in dist.batch_isend_irecv(both):
            one.wait()
        y.add_(1)

    report = emulate.watch(step)
    faults = [text.split(":")[1].strip() for text in report.faults]
    assert faults == ([] if wait else ["race", "race"])
    assert not report.hangs


@on_ranks(2)
def test_functions_that_were_imported_by_name_are_seen() -> None:
    """A reduction of the engine, which has its function by name, is not waited for."""

    def step() -> None:
        x, y = torch.ones(4), torch.empty(2)
        reduce_scatter_single(y, x, async_op=True)
        y.add_(1)

    assert [text.split(":")[1].strip() for text in emulate.watch(step).faults] == ["race"] * 2


@on_ranks(2)
def test_what_a_host_waits_for() -> None:
    """Masks, whose count it has to know, and a barrier, as on NCCL; not a choice of rows."""

    def step() -> None:
        x = torch.ones(4)
        x[x > 0].add_(1)
        torch.masked_select(x, x > 0)
        x[torch.tensor([0, 1])].add_(1)
        dist.barrier()

    given = "a number that aten::{} gives the host".format
    expected = (given("index"), given("masked_select"), "barrier")
    assert emulate.watch(step).host_waits[0] == expected


@on_ranks(2)
def test_sends_that_wait_for_each_other_hang() -> None:
    """Both ranks send first, in one group: on NCCL neither message leaves."""

    def step() -> None:
        x, y, other = torch.ones(4), torch.zeros(4), 1 - dist.get_rank()
        works = [dist.isend(x, other), dist.irecv(y, other)]
        for work in works:
            assert work is not None
            work.wait()

    report = emulate.watch(step)
    assert not report.is_clean
    assert "hang: rank 0: the host has issued all; waiting: isend 1" in str(report)


def gathered(types: list[torch.dtype], rank: int) -> list[Issued]:
    """What a rank issues that gathers parts of 8 bytes of these types, and then exchanges as many
    numbers as it has: parts of all-to-alls differ between ranks."""
    with fake_world(rank, size=2), emulate.emulated() as device:
        for dtype in types:
            part = torch.zeros(8 // dtype.itemsize, dtype=dtype)
            all_gather_single(part.new_empty(2 * len(part)), part)
        given, taken = ([3, 1 + rank], [3 - rank, 1 + rank])
        dist.all_to_all_single(torch.empty(sum(taken)), torch.ones(sum(given)), taken, given)
    return device.log.issued


def test_gathers_of_one_group_in_other_orders_do_not_match() -> None:
    """NCCL would write the one's bytes into the other's buffer, as their numbers are equal."""
    types = [torch.float32, torch.bfloat16]
    first = gathered(types, 0)
    assert mismatches({0: first, 1: gathered(types, 1)}) == []
    found = mismatches({0: first, 1: gathered(types[::-1], 1)})
    assert len(found) == 2
    gather = "has c10d::_allgather_base_ of {} elements".format
    expected = f"rank 0 {gather('float32, 4')}, rank 1 {gather('bfloat16, 8')}"
    assert found[0].endswith(expected)


def test_both_directions_of_a_pair_in_a_group_share_a_stream_and_nothing_else_does() -> None:
    """As on NCCL where no device is named."""
    with fake_world(rank=1, size=3), emulate.emulated(VirtualDevice()) as device:
        groups = [dist.group.WORLD, dist.new_group([0, 1, 2])]
        for group in groups:
            for peer in (0, 2):
                dist.isend(torch.ones(1), peer, group=group)
                dist.irecv(torch.ones(1), peer, group=group)
    issued = [one for one in device.log.issued if one.kind == "communication"]
    streams = [one.stream for one in issued]
    assert streams[::2] == streams[1::2]
    assert len({*streams}) == 4


def test_an_older_name_of_a_collective_waits_only_where_the_program_does() -> None:
    with fake_world(rank=0, size=2), emulate.emulated() as device:
        work = dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(4), async_op=True)
        before = [(one.kind, one.stream) for one in device.log.issued]
        work.wait()
        after = [(one.kind, one.stream) for one in device.log.issued]
    assert ("wait", "compute") not in before
    assert after[len(before) :] == [("wait", "compute")]


@pytest.mark.parametrize("fake", [False, True])
def test_what_waits_for_a_functional_collective_follows_it(fake: bool) -> None:
    functional = torch.ops._c10d_functional
    values = FakeTensorMode() if fake else nullcontext()
    with fake_world(rank=0, size=2), values, emulate.emulated() as device:
        world: Any = dist.group.WORLD
        group = world.group_name
        made = functional.all_reduce(torch.zeros(4), "sum", group)
        functional.wait_tensor(made).add_(1.0)
        assert not device.faults
        early = functional.all_reduce(torch.zeros(4), "sum", group)
        early.add_(1.0)
        assert [fault.kind for fault in device.faults] == ["race"]
        functional.wait_tensor(early)
        streams = {one.stream for one in device.log.issued if one.kind == "communication"}
    assert len(streams - {COMPUTE}) == len(streams) == 1


def kernels_of(work: Callable[[], object]) -> list[Kernel]:
    """What a GPU would run for some operators."""
    device = VirtualDevice(describe=describe)
    with emulate.emulated(device), as_on_cuda(device):
        work()
    return [one.kernel for one in device.log.issued if one.kernel is not None]


def test_kernels_of_one_operator() -> None:
    x, y, total = torch.ones(4), torch.ones(4), torch.zeros(4, 8)
    left, right = torch.ones(4, 2).bfloat16(), torch.ones(2, 8).bfloat16()
    norms = kernels_of(lambda: get_total_norm([x, y, x, y, x]))
    names = ["aten::_foreach_norm", "aten::stack", "aten::linalg_vector_norm"]
    assert [kernel.name for kernel in norms] == names
    # 4 x 8 sums are read, and written with 2 bytes more than those of a product in 16 bits.
    wide = Kernel("aten::addmm_", 4 * 32 + 2 * 32, Product(m=4, k=2, n=8, batch=1), 2)
    assert kernels_of(lambda: deferred.add_wide_product(total, left, right)) == [wide]
    assert kernels_of(lambda: x.add_(y)) == [Kernel("aten::add_", 16 + 2 * 16)]
    assert kernels_of(lambda: x.copy_(y)) == [Kernel("aten::copy_", 16 + 16)]


def test_an_rms_norm_is_one_kernel_each_way() -> None:
    x, weight = torch.ones(6, 8, requires_grad=True), torch.ones(8, requires_grad=True)

    def both() -> None:
        functional.rms_norm(x, (8,), weight, 1e-6).sum().backward()  # type: ignore[no-untyped-call]

    found = [kernel for kernel in kernels_of(both) if "rms_norm" in kernel.name]
    assert found == [
        Kernel("aten::_fused_rms_norm", 4 * (48 + 8 + 48)),
        # The gradient of a sum is one number; it and x are read a second time for the scales'.
        Kernel("aten::_fused_rms_norm_backward", 4 * (1 + 48 + 8 + 48 + 8) + 4 * (1 + 48)),
    ]


def test_attention_is_causal_where_it_is_and_backward_is_its_own_kernel() -> None:
    q, k, v = (torch.ones(1, 2, 6, 8, requires_grad=True) for _ in range(3))

    def both(is_causal: bool) -> None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        out.sum().backward()  # type: ignore[no-untyped-call]

    for causal in (True, False):
        found = [kernel for kernel in kernels_of(partial(both, causal)) if kernel.product]
        attention = Attention(heads=2, queries=6, keys=6, width=8, causal=causal)
        assert [kernel.product for kernel in found] == [attention] * 2
        assert [kernel.is_backward for kernel in found] == [False, True]


def test_memory_without_values_and_integers_that_the_host_knows_take_no_kernel() -> None:
    with FakeTensorMode():
        number, factor = torch.tensor(3), torch.tensor(3.0)
        assert kernels_of(lambda: (torch.empty(4), number + 1)) == []
        assert [kernel.name for kernel in kernels_of(lambda: factor * 2)] == ["aten::mul"]


def faults_in(found: list[Found]) -> set[str]:
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
    assert faults_in(found) == set()
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


def offloaded_beside_compute(fault: str) -> list[str]:
    """Two microbatches of one block: one is stored while the other is loaded."""
    with emulate.emulated() as device, ExitStack() as undo:
        host = HostMemory(torch.device("cpu"), undo)
        block = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh())
        offload = Offload(host, [block], lambda _: False)
        inputs = [torch.ones(64, requires_grad=True) for _ in range(2)]
        outputs = []
        for microbatch, x in enumerate(inputs):
            with offload.saving(block, microbatch, ()):
                outputs.append(block(x.tanh()).sum())
        live = offload._live[0]
        offload.store(0)
        if fault == "store":  # whose end compute does not wait for
            live.stored = mock.Mock()
        offload.free(0)
        torch.ones(64)  # where the first ones were
        offload.load(0)
        if fault == "slab":  # is given back while it is read
            for slab in live.slabs:
                host.free[len(slab)].append(slab)
        offload.store(1)
        if fault == "load":
            live.loaded = None
        offload.use(0)
        outputs[0].backward()
        offload.free(1)
        offload.load(1)
        offload.use(1)
        outputs[1].backward()
        expected = inputs[0].detach().tanh().tanh().tanh()
        assert torch.equal(outputs[1], expected.sum())
    return [fault.kind for fault in device.faults]


@pytest.mark.parametrize(
    ("fault", "kind"), [("", ""), ("store", "reuse"), ("load", "race"), ("slab", "race")]
)
def test_copies_to_the_host_are_in_order(fault: str, kind: str) -> None:
    found = offloaded_beside_compute(fault)
    assert kind in found if kind else not found


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


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("torch_pp", schedule) for schedule in ("interleaved_1f1b", "interleaved_zb", "zbv")),
        *(("megatron_core_local", schedule) for schedule in ("1f1b", "interleaved_1f1b")),
    ],
)
def test_pipelines_of_others_are_clean(name: str, schedule: str, world: World) -> None:
    asked = {"name": name, "pp": 2, "schedule": schedule, "chunks": 1 + (schedule != "1f1b")}
    asked["shard" if name == "torch_pp" else "replicate"] = 2
    found = world.run(watched_trainer, request(4, asked).plan(), size=4)
    assert found == [("no race, no hang", ())] * 4


PEERS = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_pipelines_end(name: str, ranks: int) -> None:
    check(
        logs_of(torch_schedule(f"Schedule{name}", ranks, 2, 2 * ranks), one_group), waits_of=ranks
    )
