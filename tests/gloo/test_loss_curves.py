"""Ten steps of real text in real processes, through the suite: the losses of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.model import build_model, cross_entropy
from benchmarks.launch.local import launch
from benchmarks.launch.options import LocalOptions
from benchmarks.launch.points import plan_point
from benchmarks.launch.running import SweepProgress
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import open_batches
from tests.gloo.cases import TEXT, request
from zeropp.engine.update.update_rules import build_optimizer

STEPS = 10
MEASURE = {"warmup_steps": 2, "steps": STEPS - 2, "timeline": True}
# Layers and sequences are as few as give every stage a piece and every pipeline two scheduling
# units, because each costs every rank time in every step.
CONFIGURATIONS: dict[str, tuple[int, dict[str, Any], int]] = {
    "zeropp 2x2": (4, {"name": "zeropp", "pp": 2, "shard": 2, "chunks": 2, "unit": 2}, 4),
    "deepspeed 2x2x2": (8, {"name": "deepspeed_3d", "tp": 2, "pp": 2, "replicate_zero": 1}, 2),
}
GATED = "zeropp 2x2"  # test_gate.py has the axes of all contenders; it takes long


def spec_of(ranks: int, contender: dict[str, Any], layers: int, *, gate: bool = True) -> RunSpec:
    """A run on real text; microbatches of one sequence."""
    model = {"layers": layers, "hidden": 64, "ffn": 256, "vocab": 256, "seq": 32}
    return request(ranks, contender, model=model, data=TEXT, measure=MEASURE | {"gate": gate})


@cache
def losses_of_one_process(layers: int) -> list[float]:
    """The loss curve of one process, the whole global batch at once."""
    spec = spec_of(1, {"name": "zeropp", "pp": 1}, layers)
    model = build_model(spec.model, spec.seed)
    optimizer = build_optimizer(model.parameters(), spec.optimizer)
    batches, losses = open_batches(spec), []
    for step in range(STEPS):
        inputs, targets = (torch.from_numpy(part) for part in batches.batch(step))
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5  # it learns
    return losses


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_loss_curve_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    gated, case = name == GATED, CONFIGURATIONS[name]
    expected = losses_of_one_process(case[-1])
    point = plan_point(spec_of(*case, gate=gated))
    assert point.plan is not None, point.reason
    with SweepProgress(1) as progress:
        (record,) = launch([point], LocalOptions(share_gpu=not gated), tmp_path, progress)
    assert record.status == "ok", record.reason
    assert record.variant == ("" if gated else "shared GPU")  # gloo takes no notice of it
    assert record.losses == pytest.approx(expected, rel=1e-4)
    assert (record.gate is not None and record.gate.passed) == gated
    if point.spec.contender.name == "zeropp":
        steps, chunks = STEPS, point.plan.layout.chunks
        units = point.plan.num_microbatches // point.plan.schedule.unit
        assert units >= 2
        assert len(record.ranks) == point.spec.num_gpus
        for rank in record.ranks:
            # Once per chunk, unit and phase would be 2 * chunks * units. The last chunk turns round
            # from forward to backward, and chunk 0 from one unit to the next, without a gather.
            assert rank.counters["unshard"] == steps * (2 * (chunks - 1) * units + 1)
