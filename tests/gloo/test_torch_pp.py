"""torch.distributed.pipelining on real processes: the numbers of one process, as planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.gloo.contender_case import check, request
from tests.gloo.world import World
from zeropp.schedule.program import Op
from zeropp.types.training import OptimizerConfig

BUILDER = "baselines.torch_pp.trainer:TorchPipelineTrainer"
FEW = 4  # microbatches, because DTensors of tensor parallelism take long for each


@pytest.mark.parametrize(
    ("contender", "model"),
    [
        ({"pp": 2, "shard": 2, "schedule": "1f1b", "recompute": "full"}, {}),
        ({"pp": 2, "shard": 2, "schedule": "interleaved_1f1b", "chunks": 3}, {"layers": 6}),
        ({"pp": 2, "replicate": 2, "schedule": "zbv", "chunks": 2}, {"tied_embeddings": True}),
        ({"pp": 2, "shard": 2, "schedule": "dualpipev", "chunks": 2}, {}),
        # Two units of two microbatches: each stage is gathered, released and reduced in both.
        ({"pp": 2, "shard": 2, "schedule": "zeropp", "chunks": 3}, {"layers": 6}),
        (
            {"pp": 2, "tp": 2, "schedule": "1f1b", "recompute": "selective"},
            {"tied_embeddings": True},
        ),
        (
            {"pp": 2, "tp": 2, "schedule": "looped_bfs", "chunks": 2, "sequence_parallel": True},
            {"family": "llama", "kv_heads": 2},
        ),
    ],
    ids=str,
)
def test_torch_pp_is_one_process(
    world: World, contender: dict[str, Any], model: dict[str, Any]
) -> None:
    batch = FEW if "tp" in contender else 8
    plan = request(4, {"name": "torch_pp", **contender}, global_batch=batch, model=model).plan()
    steps = 2
    outcomes = check(world, BUILDER, plan, steps=steps)
    for rank, outcome in enumerate(outcomes):
        program = plan.schedule.programs[plan.layout.coordinates(rank)["pp"]]
        planned = {op: sum(action.op is op for action in program) for op in Op}
        assert outcome.counters.get("unshard", 0) == steps * planned[Op.UNSHARD]
        recorded = [s.action for s in outcome.spans if s.lane == "compute"]
        assert recorded == [str(a) for a in program if a.op.is_compute]


def test_torch_pp_recomputes_some_blocks_of_a_stage(world: World) -> None:
    contender = {"pp": 2, "shard": 2, "schedule": "1f1b", "recompute": "full"}
    plan = request(4, {"name": "torch_pp", **contender}, model={"layers": 6}).plan()
    check(world, BUILDER, replace(plan, recomputed=(2, 1)))


def test_torch_pp_three_axes_clip_and_adapt(world: World) -> None:
    contender = {"pp": 2, "tp": 2, "shard": 2, "schedule": "interleaved_1f1b", "chunks": 2}
    # Four microbatches per rank: in a steady phase, forwards and backwards take turns.
    plan = request(8, {"name": "torch_pp", **contender}, global_batch=8).plan()
    check(world, BUILDER, plan, optimizer=OptimizerConfig(clip_norm=0.1))


def test_torch_pp_bf16_is_close(world: World) -> None:
    contender = {"pp": 2, "shard": 2, "schedule": "interleaved_zb", "chunks": 2}
    plan = request(4, {"name": "torch_pp", **contender}, precision="bf16").plan()
    check(world, BUILDER, plan, tolerance=2e-2)
