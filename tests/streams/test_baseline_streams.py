"""The baselines on virtual streams: torch's own pipelines over FSDP2, as the suite runs them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from baselines.torch_pp.trainer import build
from tests.gloo.contender_case import CPU, SEED, batch, request
from tests.gloo.world import World
from zeropp.emulate import watch
from zeropp.plan import Plan
from zeropp.training import OptimizerConfig


def watched(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """What is found in two steps of a trainer, and what its host waits for in one."""
    trainer = build(plan, OptimizerConfig(), CPU, SEED)
    rows = plan.num_microbatches * plan.microbatch_size
    mine = slice(rows * (first := plan.layout.dp_index(dist.get_rank())), rows * (first + 1))
    inputs, targets = (part[mine] for part in batch(plan.shape, plan.global_batch, 0))
    report = watch(lambda: trainer.step(inputs, targets), times=2)
    return str(report), report.host_waits[dist.get_rank()]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zb", "zbv"])
def test_torchs_pipelines_over_fsdp2_are_clean(schedule: str, world: World) -> None:
    asked = {"name": "torch_pp", "pp": 2, "shard": 2, "schedule": schedule, "chunks": 2}
    found = world.run(watched, request(4, asked).plan(), size=4)
    assert found == [("no race, no hang", ())] * 4
