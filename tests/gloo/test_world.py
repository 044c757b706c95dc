"""The world of workers itself: results, failures and hangs."""

from __future__ import annotations

import time

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


def test_results_by_rank_and_recovery_after_a_failure(world: World) -> None:
    assert world.run(sum_of_ranks, size=4) == [6] * 4
    with pytest.raises(WorkerError, match=r"(?s)rank 1: .*no such luck"):
        world.run(fail_on, 1, size=2)
    assert world.run(sum_of_ranks, size=2) == [1] * 2


@pytest.mark.timeout(300)  # of the 600 that a test may take; forks included
def test_a_hang_is_cut_off(world: World) -> None:
    with pytest.raises(WorkerError, match="no answer in time"):
        world.run(time.sleep, 60, size=1, timeout_s=1)
