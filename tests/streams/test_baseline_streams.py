"""The baselines on virtual streams: torch's own pipelines over FSDP2, as the suite runs them, and
their orders of device work."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from baselines.torch_pp.trainer import TorchPipelineTrainer
from tests.gloo.cases import CPU, SEED, local_batch, request
from tests.gloo.world import World
from tests.streams.torch_orders import torch_schedule
from tests.unit.device_orders import check, logs_of, one_group
from zeropp.emulate import watch
from zeropp.schedule.plan import Plan
from zeropp.types.training import OptimizerConfig


def watched(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """What is found in two steps of a trainer, and what its host waits for in one."""
    trainer = TorchPipelineTrainer(plan, OptimizerConfig(), CPU, SEED)
    inputs, targets = local_batch(plan, 0)
    report = watch(lambda: trainer.step(inputs, targets), times=2)
    return str(report), report.host_waits[dist.get_rank()]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zb", "zbv"])
def test_torchs_pipelines_over_fsdp2_are_clean(schedule: str, world: World) -> None:
    asked = {"name": "torch_pp", "pp": 2, "shard": 2, "schedule": schedule, "chunks": 2}
    found = world.run(watched, request(4, asked).plan(), size=4)
    assert found == [("no race, no hang", ())] * 4


PEERS = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_pipelines_end(name: str, ranks: int) -> None:
    check(
        logs_of(torch_schedule(f"Schedule{name}", ranks, 2, 2 * ranks), one_group), waits_of=ranks
    )
