"""FSDP2 alone on real processes: the numbers of one process, gathers and reductions as planned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from baselines.blocks import prepare_block
from baselines.model import build_piece
from tests.gloo.contender_case import check, request
from tests.gloo.world import World
from zeropp.schedule.program import Op
from zeropp.types.training import OptimizerConfig

BUILDER = "baselines.fsdp.trainer:FsdpTrainer"


@pytest.mark.parametrize(
    ("contender", "model"),
    [
        ({"shard": 4, "recompute": "selective"}, {}),
        ({"shard": 2, "replicate": 2, "reduce_every": "step"}, {"family": "llama", "kv_heads": 2}),
        ({"shard": 2, "replicate": 2, "recompute": "full"}, {"tied_embeddings": True}),
    ],
)
def test_fsdp_is_one_process(
    world: World, contender: dict[str, Any], model: dict[str, Any]
) -> None:
    plan = request(4, {"name": "fsdp", **contender}, model=model).plan()
    steps = 2
    outcomes = check(world, BUILDER, plan, steps=steps)
    if model.get("tied_embeddings"):
        return
    (program,) = plan.schedule.programs
    planned = {op: sum(action.op is op for action in program) for op in Op}
    for outcome in outcomes:
        assert outcome.counters["unshard"] == steps * planned[Op.UNSHARD]
        assert outcome.counters["reduce_grad"] == steps * planned[Op.REDUCE_GRAD]
        recorded = [span.action for span in outcome.spans]
        compute = [str(action) for action in program if action.op.is_compute]
        assert recorded == [text for text in compute if not text.startswith("0B")]


def test_fsdp_recomputes_some_blocks(world: World) -> None:
    plan = request(4, {"name": "fsdp", "shard": 4, "recompute": "full"}).plan()
    check(world, BUILDER, replace(plan, recomputed=(0, 1, 1, 0, 0, 0)))


def test_fsdp_clips_and_adapts(world: World) -> None:
    plan = request(4, {"name": "fsdp", "shard": 4}).plan()
    check(world, BUILDER, plan, optimizer=OptimizerConfig(clip_norm=0.1))


def test_fsdp_bf16_is_close(world: World) -> None:
    plan = request(2, {"name": "fsdp", "shard": 2}, precision="bf16").plan()
    check(world, BUILDER, plan, tolerance=2e-2)


def test_a_compiled_block_leaves_its_last_product_out() -> None:
    """Where it is computed again, as the trait ``stops_recomputing`` says."""
    plan = request(4, {"name": "fsdp", "recompute": "full", "compile": True}, model={}).plan()
    block = build_piece(plan.shape, 1, 0, torch.device("cpu"))
    in_python = partial(torch.compile, backend="aot_eager_decomp_partition")
    with mock.patch("torch.compile", in_python):
        prepare_block(block, plan, recomputed=True)
    x = torch.zeros(2, plan.shape.seq, plan.shape.hidden, requires_grad=True)
    block(x).sum().backward()  # compiles
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        block(x).sum().backward()
    products = sum(event.name in ("aten::mm", "aten::addmm") for event in profiled.events())
    linears = sum(isinstance(module, nn.Linear) for module in block.modules())
    assert products == 3 * linears + linears - 1
