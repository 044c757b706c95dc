"""Logs on one clock: what waits for what, what shares a link, and what the host is too slow for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from zeropp.emulate.clock import Replay, StuckError, kernel_s, replay
from zeropp.emulate.log import COMPUTE, STEP, Kernel, Log, Message
from zeropp.emulate.rendezvous import hanging_waits, mismatches, stuck, unmatched
from zeropp.price.cluster import Cluster, cluster_of
from zeropp.price.kernels import (
    fused_attention_backward_s,
    fused_attention_s,
    matmul_s,
    stream_s,
)
from zeropp.price.network import (
    all_reduce_s,
    all_reduce_waits_s,
    gather_s,
    group,
    message_s,
    waits_s,
)
from zeropp.price.price import stragglers
from zeropp.types.operators import Attention, Product

CLUSTER = cluster_of("a800")
DEVICE = replace(CLUSTER.device, overlap_slowdown=0.0)
PLAIN = replace(CLUSTER, device=DEVICE, gpus_per_node=8)
SLOWED = replace(PLAIN, device=replace(DEVICE, overlap_slowdown=0.25))
SECOND, GIB = Kernel("a second"), 2**30


def step_of(logs: Sequence[Log], cluster: Cluster = PLAIN, launch_s: float = 0.0) -> Replay:
    for log in logs:
        log.place(STEP)
    return replay(
        dict(enumerate(log.issued for log in logs)), cluster, len(logs),
        kernel_prices=lambda kernel: 1.0 if kernel == SECOND else 0.5, launch_s=launch_s,
    )  # fmt: skip


def logs(count: int) -> list[Log]:
    made = [Log() for _ in range(count)]
    for log in made:
        log.place(STEP)
    return made


@pytest.fixture
def log() -> Log:
    return logs(1)[0]


def test_kernels_of_a_stream_follow_each_other_and_streams_do_not(log: Log) -> None:
    for stream in (COMPUTE, "side", COMPUTE):
        log.kernel(stream, SECOND)
    result = step_of([log])
    assert result.step_s == pytest.approx(2.0)
    assert result.busy_s == {0: pytest.approx(2.0)}


def test_a_stream_waits_for_an_event_and_its_cause_is_named(log: Log) -> None:
    log.collective("nccl", ("shard", (0, 1)), 2, "c10d::_allgather_base_", GIB)
    log.follow(COMPUTE, "nccl")
    log.kernel(COMPUTE, SECOND)
    expected = gather_s(PLAIN, group(PLAIN, 2, 1, 1), GIB)
    result = step_of([log])
    assert result.waits_s[0]["gather"] == pytest.approx(expected)
    assert result.step_s == pytest.approx(1.0 + expected)


def test_only_the_last_step_counts(log: Log) -> None:
    for _ in range(5):
        log.kernel(COMPUTE, SECOND)
    log.place(STEP)
    log.kernel(COMPUTE, SECOND)
    assert step_of([log]).step_s == pytest.approx(1.0)


def test_a_message_leaves_when_both_are_there() -> None:
    sender, receiver = logs(2)
    sender.kernel(COMPUTE, SECOND)
    sender.follow("messages", COMPUTE)
    sender.messages("messages", [Message("group", 0, 1, "", GIB)], "isend 1")
    receiver.messages("messages", [Message("group", 0, 1, "", GIB)], "irecv 0")
    receiver.follow(COMPUTE, "messages")
    receiver.kernel(COMPUTE, SECOND)
    result = step_of([sender, receiver])
    assert result.waits_s[1]["transfer"] > 1.0
    assert result.step_s == pytest.approx(1.0 + result.waits_s[1]["transfer"])


def test_messages_of_both_directions_of_a_pair_share_no_link() -> None:
    def step_s(*sources: int) -> float:
        both = logs(2)
        for log in both:
            for source in sources:
                message = Message("group", source, 1 - source, "", GIB)
                log.messages(f"from {source}", [message], "isend")
        return step_of(both).step_s

    assert step_s(0, 1) == pytest.approx(step_s(0))


BESIDE = [
    ("nccl", "c10d::_allgather_base_", 2),
    (COMPUTE, "c10d::_allgather_base_", 1),  # tensor parallelism, for which compute waits
    ("nccl", "_c10d_functional::all_gather_into_tensor", 1),
]


@pytest.mark.parametrize(("stream", "what", "share"), BESIDE)
def test_a_message_shares_its_network_with_gathers_beside_compute(
    stream: str, what: str, share: int
) -> None:
    both = logs(2)
    both[0].collective(stream, ("shard", (0, 1)), 2, what)
    for log in both:
        log.messages("messages", [Message("group", 0, 1, "", GIB)], "isend")
    expected = message_s(PLAIN, 1, 2, crosses=False, size=share * GIB)
    assert step_of(both).step_s == pytest.approx(expected)


def test_collectives_of_the_same_ranks_share_their_link_and_others_do_not() -> None:
    def step_s(*groups: tuple[str, tuple[int, ...]]) -> float:
        (log,) = logs(1)
        for name, ranks in groups:
            log.collective(f"nccl {name}", (name, ranks), len(ranks), "c10d::_allgather_base_", GIB)
        return step_of([log]).step_s

    alone = step_s(("gathers", (0, 1)))
    assert step_s(("gathers", (0, 1)), ("reductions", (0, 1))) == pytest.approx(2 * alone)
    assert step_s(("gathers", (0, 1)), ("replicas", (0, 2))) == pytest.approx(alone)


def test_a_slow_host_leaves_the_device_waiting(log: Log) -> None:
    for _ in range(3):
        log.kernel(COMPUTE, Kernel("half a second"))
    result = step_of([log], launch_s=2.0)
    assert result.step_s == pytest.approx(6.5)  # three launches, and the last kernel
    assert result.waits_s[0]["host"] == pytest.approx(5.0)
    assert result.busy_s[0] == pytest.approx(1.5)
    (log,) = logs(1)
    log.collective("nccl", ("shard", (0, 1)), 2, "c10d::_allgather_base_")
    log.kernel(COMPUTE, SECOND)
    assert step_of([log], launch_s=2.0).step_s == pytest.approx(5.0)  # two launches, and the kernel


def test_a_host_that_waits_starts_the_next_kernel_late(log: Log) -> None:
    log.kernel("side", SECOND)
    log.sync("side", "Stream.synchronize")
    log.kernel(COMPUTE, SECOND)
    assert step_of([log]).step_s == pytest.approx(2.0)


def test_compute_beside_collectives_is_slower(log: Log) -> None:
    log.collective("nccl", ("shard", (0, 1)), 2, "c10d::_allgather_base_", 1000 * GIB)
    log.kernel(COMPUTE, SECOND)
    assert step_of([log], SLOWED).busy_s[0] == pytest.approx(1.25, rel=1e-4)


def test_messages_and_collectives_of_earlier_steps_slow_no_compute(log: Log) -> None:
    half = round(500 * GIB / gather_s(PLAIN, group(PLAIN, 2, 1, 1), 1000 * GIB))
    log.collective("nccl", ("shard", (0, 1)), 2, "c10d::_allgather_base_", half)
    log.kernel(COMPUTE, SECOND)
    log.place(STEP)
    log.messages("messages", [Message("group", 0, 1, "", 1000 * GIB)], "isend")
    log.kernel(COMPUTE, SECOND)
    assert step_of([log], SLOWED).busy_s[0] == pytest.approx(1.0)


def test_compute_that_is_slowed_hides_more_of_a_collective(log: Log) -> None:
    """A collective of 1.1 s beside a kernel of 1 s, which becomes as long, and one behind it."""
    size = round(1100 * GIB / gather_s(PLAIN, group(PLAIN, 2, 1, 1), 1000 * GIB))
    log.collective("nccl", ("shard", (0, 1)), 2, "c10d::_allgather_base_", size)
    log.kernel(COMPUTE, SECOND)
    log.follow(COMPUTE, "nccl")
    log.kernel(COMPUTE, SECOND)
    assert step_of([log], SLOWED).busy_s[0] == pytest.approx(2 + 0.25 * 1.1, rel=2e-3)


RINGS = {
    "c10d::_reduce_scatter_base_": (gather_s, waits_s),
    "c10d::allreduce_": (all_reduce_s, all_reduce_waits_s),
}


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_over_nodes_slows_no_compute_while_it_only_waits(name: str) -> None:
    log, (lasts_s, only_waits_s) = Log(), RINGS[name]
    log.place(STEP)
    far = replace(CLUSTER.inter, hop_us=CLUSTER.inter.hop_us + 1e4)
    group_, cluster = ("shard", tuple(range(16))), replace(CLUSTER, inter=far)
    log.collective("nccl", group_, 16, name, GIB)
    log.kernel(COMPUTE, SECOND)
    log.place(STEP)
    ranks = group(cluster, 16, 1, 16)
    moves = lasts_s(cluster, ranks, GIB) - only_waits_s(cluster, ranks)
    assert only_waits_s(cluster, ranks) > 1e-5
    assert 0 < moves < 1
    result = replay(
        {0: log.issued}, cluster, 16, kernel_prices=lambda kernel: 1.0, launch_s=0.0
    )  # fmt: skip
    slow = stragglers(cluster, 16)
    slowed = slow * (1 + cluster.device.overlap_slowdown * moves / slow)
    assert result.busy_s[0] == pytest.approx(slowed, rel=1e-6)


def test_messages_in_opposite_orders_wait_for_ever() -> None:
    first, second = logs(2)
    for log, order in ((first, (0, 1)), (second, (1, 0))):
        for source in order:
            log.messages("messages", [Message("group", source, 1 - source, "", 8)], "isend")
    line = "wait for ever for message 1 from rank . to rank . and message 1 from rank"
    with pytest.raises(StuckError, match=line):
        step_of([first, second])


def test_of_some_ranks_alone_what_one_lacks_is_found_except_in_its_last_step() -> None:
    """Rank 2 is not here, so it is taken to do what it should."""

    def found(kinds: tuple[str, str], sizes: tuple[int, int], *, early: bool) -> list[str]:
        both = [Log(), Log()]
        for rank, log in enumerate(both):
            log.collective("nccl", ("all", (0, 1, 2)), 3, kinds[rank])
            log.messages("messages", [Message("all", 0, 1, "a shape", sizes[rank])], "isend")
            for step in range(2):
                if rank == 0 and step == (0 if early else 1):
                    log.collective("nccl", ("pair", (0, 1)), 2, "broadcast")
                    log.messages("messages", [Message("all", 0, 2, "", 8)], "isend 2")
                log.place(STEP)
        return unmatched(dict(enumerate(log.issued for log in both)))

    assert found(("a", "a"), (8, 8), early=False) == []
    lacks = "collective 1 of group pair (ranks 0, 1): rank 0 has broadcast, rank 1 has none"
    assert found(("a", "a"), (8, 8), early=True) == [lacks]
    (kinds,) = found(("a", "b"), (8, 8), early=False)
    assert kinds == "collective 1 of group all (ranks 0, 1, 2): rank 0 has a, rank 1 has b"
    (sizes,) = found(("a", "a"), (8, 16), early=False)
    assert sizes.startswith("message 1 from rank 0 to rank 1: ")


def test_a_kernel_has_the_price_of_the_simulator() -> None:
    product = Product(m=512, k=1024, n=2048)
    attention = Attention(heads=8, queries=512, keys=512, width=128, causal=True)
    product_s = matmul_s(DEVICE, "bf16", m=512, k=1024, n=2048)
    assert kernel_s(DEVICE, Kernel("mm", 0, product, 2)) == product_s
    more = kernel_s(DEVICE, Kernel("addmm_", GIB, product, 2)) - product_s
    assert more == pytest.approx(stream_s(DEVICE, GIB, kernels=0))
    attention_s = fused_attention_s(DEVICE, "bf16", attention)
    assert kernel_s(DEVICE, Kernel("attention", 0, attention, 2)) == attention_s
    backward_s = fused_attention_backward_s(DEVICE, "bf16", attention)
    assert kernel_s(DEVICE, Kernel("attention", 0, attention, 2, is_backward=True)) == backward_s
    assert kernel_s(DEVICE, Kernel("add", GIB)) == stream_s(DEVICE, GIB)
    wide_s = matmul_s(DEVICE, "fp32", m=512, k=1024, n=2048)
    assert kernel_s(DEVICE, Kernel("mm", 0, product, 4)) == wide_s


@pytest.mark.parametrize("late", [0, 1])
def test_hosts_meet_when_the_last_one_has_come(late: int) -> None:
    both = logs(2)
    both[late].kernel("side", SECOND)
    both[late].sync("side", "Stream.synchronize")
    for _ in range(3):  # so that the replay comes to the early one's meeting last
        both[1 - late].sync("idle", "Stream.synchronize")
    for log in both:
        log.meet("the barrier", 2)
    both[1 - late].kernel(COMPUTE, SECOND)
    result = step_of(both)
    assert result.waits_s[1 - late]["host"] == pytest.approx(1.0)
    assert result.step_s == pytest.approx(2.0)


@pytest.mark.parametrize("waits_for", ["event", "device"])
def test_a_host_waits_for_an_event_or_for_all_streams(log: Log, waits_for: str) -> None:
    log.kernel("side", SECOND)
    event = log.record("side")
    log.kernel("side", SECOND)
    if waits_for == "event":
        log.sync("side", "Event.synchronize", event)
    else:
        log.sync(None, "synchronize")
    log.kernel(COMPUTE, SECOND)
    begins = {"event": 1.0, "device": 2.0}[waits_for]
    assert step_of([log]).waits_s[0]["host"] == pytest.approx(begins)


def test_a_timeline_begins_with_its_step_and_names_what_a_collective_is(log: Log) -> None:
    """Compute of the step begins while a reduction of the step before is under way."""
    log.collective("nccl", ("shard", (0, 1)), 2, "c10d::_reduce_scatter_base_", 1000 * GIB)
    log.place(STEP)
    for _ in range(20):
        log.kernel(COMPUTE, SECOND)
    (span,) = step_of([log]).timeline.spans
    assert (span.lane, span.start_s) == ("compute", 0.0)
    (log,) = logs(1)
    log.collective("nccl", ("shard", (0, 1)), 2, "c10d::_reduce_scatter_base_", GIB)
    log.follow(COMPUTE, "nccl")
    assert {*step_of([log]).waits_s[0]} == {"reduce"}


def test_only_compute_is_slowed_and_only_what_a_host_issues_takes_a_launch(log: Log) -> None:
    log.collective("nccl", ("shard", (0, 1)), 2, "c10d::_allgather_base_", 1000 * GIB)
    log.kernel(COMPUTE, SECOND)
    log.follow("side", "nccl")
    for _ in range(20):
        log.kernel("side", SECOND)
    gather = gather_s(PLAIN, group(PLAIN, 2, 1, 1), 1000 * GIB)
    assert step_of([log], SLOWED).step_s == pytest.approx(20 + gather)
    (log,) = logs(1)
    for _ in range(3):
        log.follow(COMPUTE, "side")
    log.kernel(COMPUTE, SECOND)
    assert step_of([log], launch_s=2.0).step_s == pytest.approx(3.0)


def test_kernels_that_outlast_their_launches_follow_each_other(log: Log) -> None:
    log.meet("the barrier", 1)
    log.collective("nccl", ("shard", (0,)), 1, "c10d::allreduce_")
    log.kernel(COMPUTE, Kernel("half a second"))
    log.kernel(COMPUTE, Kernel("half a second"))
    assert step_of([log], launch_s=0.1).step_s == pytest.approx(0.1 + 0.1 + 2 * 0.5)


def test_messages_and_groups_across_nodes_take_longer() -> None:
    """Ranks 0 and 8 are on two nodes with one NIC each, as are those of a group 8 apart."""
    cluster = replace(PLAIN, nics_per_node=1)

    def step_s(first: int, other: int) -> float:
        both = logs(2)
        for log in both:
            log.messages("messages", [Message("group", first, other, "", GIB)], "isend")
            log.place(STEP)
        made = {rank: log.issued for rank, log in zip((first, other), both, strict=True)}
        return replay(made, cluster, 16, kernel_prices=lambda _: 1.0, launch_s=0.0).step_s

    for other in (4, 8):
        expected = message_s(cluster, other, 16, crosses=other == 8, size=GIB)
        assert step_s(0, other) == pytest.approx(expected)
    (log,) = logs(1)
    log.collective("nccl", ("replicas", (0, 8)), 2, "c10d::allreduce_", GIB)
    log.place(STEP)
    found = replay({0: log.issued}, cluster, 16, kernel_prices=lambda _: 1.0, launch_s=0.0)
    assert found.step_s == pytest.approx(all_reduce_s(cluster, group(cluster, 2, 8, 16), GIB))


def test_what_one_rank_never_issues_does_not_match_and_hosts_wait_for_events() -> None:
    both = logs(2)
    both[0].collective("nccl", "all", 2, "allreduce")
    (found,) = mismatches(dict(enumerate(log.issued for log in both)))
    assert "rank 0 has allreduce" in found
    (log,) = logs(1)
    log.collective("nccl", "all", 2, "allreduce")  # whose peer never comes
    log.sync("nccl", "Event.synchronize", log.record("nccl"))
    assert "the host is at Event.synchronize" in stuck({0: log.issued})[0]
    late = logs(2)
    late[0].messages("messages", [Message("group", 1, 0, "", 8)], "irecv 1")
    late[1].wait(COMPUTE, late[1].record(COMPUTE))
    assert hanging_waits({0: late[0].issued, 1: late[1].issued}, 0) == [2]  # at the end alone
