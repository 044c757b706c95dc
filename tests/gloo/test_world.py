"""The world of workers itself: results, failures and hangs."""

from __future__ import annotations

import inspect
import os
import struct
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.gloo.world import WorkerError, World


def sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("no such luck")
    dist.barrier()


def answer_what_no_process_can_send() -> Callable[[], None]:
    return lambda: None


def die_in_an_answer() -> None:
    """Leave after the first bytes of a reply, as a rank does that is killed then."""
    frame = inspect.currentframe()
    while frame is not None and "pipe" not in frame.f_locals:
        frame = frame.f_back
    assert frame is not None
    os.write(frame.f_locals["pipe"].fileno(), struct.pack("!i", 100) + b"begun")
    os._exit(1)


def test_an_answer_that_cannot_be_sent_or_ends_early_is_a_failure_of_its_rank(world: World) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 0: .*pickle.*lambda"):
        world.run(answer_what_no_process_can_send, size=1)
    with pytest.raises(WorkerError, match="rank 0: died"):
        world.run(die_in_an_answer, size=1)
    assert world.run(sum_of_ranks, size=1) == [0]


def test_results_by_rank_and_recovery_after_a_failure(world: World) -> None:
    assert world.run(sum_of_ranks, size=4) == [6] * 4
    with pytest.raises(WorkerError, match=r"(?s)rank 1: .*no such luck"):
        world.run(fail_on, 1, size=2)
    assert world.run(sum_of_ranks, size=2) == [1] * 2


@pytest.mark.timeout(300)  # of the 600 that a test may take; forks included
def test_a_hang_is_cut_off(world: World) -> None:
    with pytest.raises(WorkerError, match="no answer in time"):
        world.run(time.sleep, 60, size=1, timeout_s=1)
