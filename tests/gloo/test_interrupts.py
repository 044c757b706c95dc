"""Ranks that leave a step in the middle, because they were interrupted or because a peer was: none
waits for another one. One that did would do so for gloo's 30 minutes, and the world would be cut
off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.gloo.failing_layers import FailingLayer
from tests.gloo.small_layers import built, data, error_of, linear, seeded
from tests.gloo.world import World
from zeropp.engine.errors import Meeting
from zeropp.engine.interpreter import Evaluator
from zeropp.parallel_model import ParallelModel

RANK = 1  # the one that is interrupted
DEGREES: list[dict[str, int]] = [
    {"pp": 4},
    {"shard": 4},
    {"replicate": 4, "replicate_zero": 1},
    {"pp": 2, "shard": 2, "chunks": 2},
]


def interrupt(*_: Any) -> None:
    """Interrupt one rank."""
    if dist.get_rank() == RANK:
        raise KeyboardInterrupt


def interrupted(where: str, degrees: dict[str, int]) -> tuple[str, bool]:
    """What a step says in which one rank is interrupted, and whether it was interrupted here. All
    ranks have left the step before the first one closes its model, which ends connections, too."""
    with built(seeded([lambda: FailingLayer(linear(), where, interrupt)] * 4), **degrees) as model:
        if where == "update":
            model.optimizer.register_step_pre_hook(interrupt)
        try:
            with interrupting(model, where):
                said, here = error_of(lambda: run(model, where)), False
        except KeyboardInterrupt:
            said, here = error_of(model.full_state_dict), True
        dist.barrier()
        return said, here


@contextmanager
def interrupting(model: ParallelModel, where: str) -> Iterator[None]:
    """Inside this context one rank is interrupted in the "check" before a step, "between" the
    backwards and the update, or while ranks tell each other their "rows" before an evaluation;
    nowhere if ``where`` says anything else."""
    engine, stack = model.engine, ExitStack()
    if where == "check":
        stack.enter_context(mock.patch.object(engine, "check_unchanged", interrupt))
    if where == "between":
        stack.enter_context(mock.patch.object(engine.updater, "clip", interrupt))
    if where == "rows":  # a private method, as nothing of a user's runs there
        stack.enter_context(mock.patch.object(Evaluator, "_agree", interrupt))
    with stack:
        yield


def run(model: ParallelModel, where: str) -> None:
    """A step, or an evaluation."""
    inputs, targets = data()
    call = model.eval_step if where in ("evaluation", "rows") else model.train_step
    call(inputs[model.rows], targets[model.rows])


@pytest.mark.parametrize(
    ("where", "degrees"),
    [
        *product(["forward", "backward", "update", "evaluation"], DEGREES),
        ("check", DEGREES[-1]),
        ("between", DEGREES[-1]),
        ("rows", DEGREES[-1]),
    ],
    ids=str,
)
def test_an_interrupted_rank_does_not_hold_its_peers(
    world: World, where: str, degrees: dict[str, int]
) -> None:
    size = prod(degrees[axis] for axis in ("pp", "shard", "replicate") if axis in degrees)
    found = world.run(interrupted, where, degrees, size=size, timeout_s=180)
    assert len(found) == size
    for rank, (said, here) in enumerate(found):
        assert here == (rank == RANK)
        gone = "RuntimeError: an earlier error ended the connections of this model's ranks"
        if where == "update":
            gone = "RuntimeError: an optimizer's error left some ranks updated and others not"
        peers = "PeerError: the connections of another rank ended"
        assert said.startswith(gone if here else peers), said


def errors_in_the_meeting() -> list[str]:
    """What a rank says whose meeting itself fails: by an error of its own, or by one of a peer."""
    found = []
    of_a_peer = RuntimeError("third_party/gloo/pair.cc: connection closed")
    for error in (torch.OutOfMemoryError("tried 2 GiB"), of_a_peer):
        meeting = Meeting(torch.device("cpu"), give_up=lambda: None)
        with mock.patch.object(dist, "all_reduce", side_effect=error):
            found.append(error_of(lambda m=meeting: m.sum(lambda: torch.zeros(1), 1)))  # type: ignore[misc]
    return found


def test_an_error_of_this_rank_in_the_meeting_is_not_a_peers(world: World) -> None:
    ((own, peers),) = world.run(errors_in_the_meeting, size=1)
    assert own == "OutOfMemoryError: tried 2 GiB"
    assert peers == "PeerError: the connections of another rank ended, or it is late"
