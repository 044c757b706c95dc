"""The world of workers itself: results, failures and hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.gloo.world import WorkerError, World


def answer(what: str) -> int | Callable[[], None]:
    """This rank's number, unless it fails in one way or another."""
    if what == "raises" and dist.get_rank() == 1:
        raise ValueError("no such luck")
    if what == "dies":
        os._exit(1)
    if what == "hangs":
        time.sleep(60)
    dist.barrier()
    return (lambda: None) if what == "cannot be sent" else dist.get_rank()


@pytest.mark.timeout(300)  # of the 600 that a test may take; forks included
def test_what_a_rank_does_not_answer_is_an_error_and_the_next_task_has_a_new_world(
    world: World,
) -> None:
    for what, size, words in (
        ("raises", 2, r"(?s)rank 1: .*no such luck"),
        ("dies", 1, "rank 0: died"),
        ("hangs", 1, "no answer in time"),
        ("cannot be sent", 1, r"(?s)rank 0: .*pickle.*lambda"),
    ):
        with pytest.raises(WorkerError, match=words):
            world.run(answer, what, size=size, timeout_s=1 if what == "hangs" else 200)
    assert world.run(answer, "", size=2) == [0, 1]
