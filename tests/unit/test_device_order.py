"""The order of device work of every rank, simulated with messages that meet: everything ends, also
where not all communication kernels fit on a device, and where one host waits for its whole
device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest

from tests.unit.device_orders import (
    ANY_FIRST,
    check,
    first_uses,
    logs_of,
    with_early_receives,
)
from zeropp.emulate.log import Issued
from zeropp.emulate.rendezvous import hanging_waits, mismatches, stuck
from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.program import Schedule, StageCost


@cache
def zeropp_schedule(
    ranks: int,
    chunks: int,
    *,
    unit: int | None = None,
    split_backward: bool = True,
    uneven: bool = False,
    **passes: Any,
) -> Schedule:
    """A step of ZeroPP with two microbatches per rank; ``passes`` are for ``lower``."""
    costs = [
        StageCost(forward=1 + 0.3 * (stage % 3), backward_weight=0.8, unshard=0.5, reduce_grad=0.7)
        for stage in range(ranks * chunks)
    ]
    order = build(
        "zeropp",
        num_ranks=ranks,
        chunks=chunks,
        num_microbatches=2 * ranks,
        unit=unit,
        split_backward=split_backward,
        costs=costs if uneven else None,
    )
    return lower(order, gather=True, **passes)


@pytest.mark.parametrize(
    ("ranks", "chunks"), [(2, 1), (2, 4), (3, 2), (4, 1), (4, 3), (5, 2), (6, 4), (8, 2)]
)
def test_a_step_of_zeropp_ends(ranks: int, chunks: int) -> None:
    logs = logs_of(zeropp_schedule(ranks, chunks))
    check(logs, waits_of=ranks)
    assert stuck(first_uses(logs)) == {}  # all ranks load kernels where they first use them


# Of two shards of one stage one may start its gather first, the other a reduction.
SMALL_UNITS = [(3, 4, 1), (4, 5, 3), (6, 4, 4)]


@pytest.mark.parametrize(("ranks", "chunks", "unit"), SMALL_UNITS)
def test_units_smaller_than_the_pipeline_end(ranks: int, chunks: int, unit: int) -> None:
    logs = logs_of(zeropp_schedule(ranks, chunks, unit=unit), shard=2)
    check(logs, waits_of=0)
    assert [stuck(logs, resident=ANY_FIRST, seed=seed) for seed in range(4)] == [{}] * 4


@pytest.mark.parametrize(
    ("sizes", "shard", "more"),
    [
        ((2, 2), 2, {}),
        ((4, 3), 2, {}),
        ((5, 1), 2, {}),
        ((4, 3), 1, {"prefetch": 0}),
        ((4, 3), 1, {"prefetch": 3}),
        ((4, 3), 1, {"reduce_every": "step"}),
        ((4, 3), 1, {"split_backward": False}),
        ((4, 3), 1, {"uneven": True}),
    ],
    ids=str,
)
def test_a_step_of_two_shards_or_with_other_settings_ends(
    sizes: tuple[int, int], shard: int, more: dict[str, Any]
) -> None:
    check(logs_of(zeropp_schedule(*sizes, **more), shard=shard), waits_of=sizes[0])


LOWERED = [
    ("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 3), ("looped_bfs", 3),
    ("interleaved_zb", 3), ("zbv", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "chunks"), LOWERED)
@pytest.mark.parametrize("ranks", [2, 5])
def test_other_orders_that_our_passes_lower_end(name: str, chunks: int, ranks: int) -> None:
    order = build(name, num_ranks=ranks, chunks=chunks, num_microbatches=2 * ranks)
    check(logs_of(lower(order, gather=True)), waits_of=ranks)


# What must be found. Receives that are posted earlier, as ours were once, hang a host that waits.


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 1), (4, 2)])
def test_early_receives_hang_a_wait_for_the_device(ranks: int, chunks: int) -> None:
    schedule = zeropp_schedule(ranks, chunks)
    logs = logs_of(replace(schedule, programs=with_early_receives(schedule.programs, 1)))
    assert stuck(logs) == {}
    assert any(hanging_waits(logs, rank) for rank in range(ranks))


def test_small_units_hang_where_three_kernels_fit_and_any_starts_first() -> None:
    logs = logs_of(zeropp_schedule(3, 4, unit=1), shard=2)
    assert any(stuck(logs, resident=3, seed=seed) for seed in range(8))


def test_messages_in_another_order_do_not_match() -> None:
    schedule = zeropp_schedule(2, 2)
    program = list(schedule.programs[1])
    first, second = [i for i, action in enumerate(program) if action.op == "RECV_F"][:2]
    program[first], program[second] = program[second], program[first]
    logs = logs_of(replace(schedule, programs=(schedule.programs[0], tuple(program))))
    assert "microbatch 0" in mismatches(logs)[0]


def test_streams_that_share_a_hardware_queue_hang() -> None:
    logs = logs_of(zeropp_schedule(4, 2), shard=2)
    assert stuck(logs, queue_of=lambda stream: "the only queue")
    streams = sorted({one.stream for one in logs[1] if one.stream})
    shared = [
        pair
        for pair in combinations(streams, 2)
        if stuck(logs, queue_of=lambda stream, pair=pair: pair[0] if stream in pair else stream)  # type: ignore[misc]
    ]
    assert shared  # and so every stream needs a queue of its own


def test_blocking_launches_hang() -> None:
    """``CUDA_LAUNCH_BLOCKING=1`` and profilers that serialise kernels: by design."""
    logs = logs_of(zeropp_schedule(2, 2))
    blocking = {
        rank: [entry for one in log for entry in (one, Issued("sync", what="blocking launch"))]
        for rank, log in logs.items()
    }
    assert stuck(blocking)
