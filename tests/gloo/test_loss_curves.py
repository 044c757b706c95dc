"""Ten steps of real text in real processes, through the suite: the losses of one process."""

from __future__ import annotations

from dataclasses import dataclass
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
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from benchmarks.worker.data import open_batches
from tests.unit.toy_spec import mapping
from zeropp.engine.update_rules import build_optimizer

STEPS = 10
TEXT = {"kind": "text", "path": "benchmarks/worker/kjv_genesis_psalms.txt"}
MEASURE = {"warmup_steps": 2, "steps": STEPS - 2, "timeline": True}
GATED = "zeropp 2x2"  # test_gate.py has the axes of all contenders; it takes long


@dataclass(frozen=True)
class Configuration:
    """A contender on some ranks. Layers and sequences are as few as give every stage a piece and
    every pipeline two scheduling units, because each costs every rank time in every step."""

    ranks: int
    name: str
    degrees: dict[str, Any]
    layers: int = 4

    def spec(self, *, gate: bool = True) -> RunSpec:
        """The run of this configuration; microbatches of one sequence."""
        values = mapping()
        values["model"] |= {"layers": self.layers, "seq": 32}
        values["contender"] = {"name": self.name, **self.degrees}
        values |= {"num_gpus": self.ranks, "global_batch": 8}
        return spec_from_mapping(values | {"data": TEXT, "measure": MEASURE | {"gate": gate}})


CONFIGURATIONS = {
    "zeropp 2x2": Configuration(4, "zeropp", {"pp": 2, "shard": 2, "chunks": 2, "unit": 2}),
    "deepspeed 2x2x2": Configuration(
        8, "deepspeed_3d", {"tp": 2, "pp": 2, "replicate_zero": 1}, layers=2
    ),
}


@cache
def losses_of_one_process(layers: int) -> list[float]:
    """The loss curve of one process, the whole global batch at once."""
    spec = Configuration(1, "zeropp", {}, layers).spec()
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
    expected = losses_of_one_process(case.layers)
    point = plan_point(case.spec(gate=gated))
    assert point.plan is not None, point.reason
    with SweepProgress(1) as progress:
        (record,) = launch([point], LocalOptions(), tmp_path, progress)
    assert record.status == "ok", record.reason
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
