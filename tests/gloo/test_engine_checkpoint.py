"""Save in one topology, resume in others: the loss curve of a run that was never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gloo.engine_cases import ADAMW, Case, build_engine, local_microbatches
from tests.gloo.world import World

CASES = [
    Case(pp=4, shard=2, batch=16, unit=4, chunks=1, tied=True, dropout=0.1),
    Case(pp=2, shard=2, replicate=2, zero=True, batch=16, chunks=2, tied=True, dropout=0.1),
    Case(pp=1, batch=16, chunks=1, tied=True, dropout=0.1),
]
STEPS = 3  # in each topology


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 6)


def train_on(case: Case, start: Path | None, save_to: Path | None, steps: int) -> list[float]:
    """Losses of ``steps`` steps from a checkpoint on, or from the beginning."""
    engine = build_engine(case, torch.float32, ADAMW, lr_schedule=warm_up)
    if start is not None:
        engine.load(start)
    first = engine.steps_done
    results = [engine.step(*local_microbatches(case, first + s)) for s in range(steps)]
    if save_to is not None:
        engine.save(save_to)
    return [result.loss for result in results]


def test_loss_curve_goes_on_in_other_topologies(world: World, tmp_path: Path) -> None:
    alone = replace(CASES[-1], pp=1)
    expected = world.run(train_on, alone, None, None, STEPS * len(CASES), size=1)[0]
    losses: list[float] = []
    checkpoint = None
    for number, case in enumerate(CASES):
        target = tmp_path / str(number)
        curves = world.run(train_on, case, checkpoint, target, STEPS, size=case.world)
        assert all(curve == pytest.approx(curves[0]) for curve in curves)
        losses += curves[0]
        checkpoint = target
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
