"""DeepSpeed 3D, FSDP2 alone and torch's pipelines over FSDP2 on real processes: the numbers of one
process, and their programs as planned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from baselines.blocks import prepare_block
from baselines.deepspeed_3d.build import build
from baselines.deepspeed_3d.trainer import DeepSpeedTrainer
from baselines.model import build_piece
from tests.gloo.cases import IN_DEEPSPEEDS_INSTRUCTIONS, LLAMA, STEPS, TIED, check, request
from tests.gloo.world import World
from zeropp.engine.layers.chunk import run_recomputed
from zeropp.engine.layers.deferred import (
    WeightGradStore,
    backward_of_chunk,
    defer_weight_grads,
    save_early,
)
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Op
from zeropp.types.literals import Recompute
from zeropp.types.training import OptimizerConfig

CLIPPED = OptimizerConfig(clip_norm=0.1)
FEW = 4  # microbatches, because DTensors of tensor parallelism take long for each
Options = dict[str, Any]


def plan_of(name: str, options: Options, ranks: int = 4, **more: Any) -> Plan:
    return request(ranks, {"name": name, **options}, **more).plan()


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"pp": 2, "tp": 2}, TIED),
        ({"pp": 2, "replicate_zero": 1}, LLAMA),
        (
            {"pp": 2, "tp": 1, "placement": "pp_inner", "recompute": "full", "recompute_blocks": 1},
            {},
        ),
        ({"pp": 1, "tp": 2, "replicate_zero": 1}, LLAMA | TIED),
        ({"pp": 1, "tp": 2, "replicate_zero": 2, "recompute": "full"}, TIED),
        ({"pp": 1, "tp": 1, "replicate_zero": 0}, {}),
    ],
    ids=str,
)
def test_deepspeed_is_one_process(world: World, options: Options, model: Options) -> None:
    plan = plan_of("deepspeed_3d", options, model=model)
    for rank, outcome in enumerate(check(world, plan)):
        program = plan.schedule.programs[plan.layout.coordinates(rank)["pp"]]
        expected = [str(a) for a in program if a.op not in IN_DEEPSPEEDS_INSTRUCTIONS]
        assert [span.action for span in outcome.spans] == expected


def build_with(optimizer: str, plan: Plan, *arguments: Any) -> DeepSpeedTrainer:
    """Build a trainer, in which DeepSpeed must have chosen its optimizer of that name."""
    trainer = build(plan, *arguments)
    assert type(trainer._optimizer).__name__ == optimizer
    return trainer


def build_in_python(*arguments: Any) -> DeepSpeedTrainer:
    """Build a trainer whose compiled blocks need no C++ compiler."""
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        return build(*arguments)


build_with_own = partial(build_with, "DeepSpeedZeroOptimizer")
build_with_bf16 = partial(build_with, "BF16_Optimizer")
IN_BF16 = {"grad_accum_dtype": "bf16", "reduce_dtype": "bf16"}
TO_OWNERS = IN_BF16 | {"use_multi_rank_bucket_allreduce": False}
SMALL = {"reduce_bucket_size": 20_000}  # several buckets


@pytest.mark.parametrize(
    ("options", "builder"),
    [
        ({"pp": 2, "tp": 2, "replicate_zero": 1}, "build_with_bf16"),
        ({"pp": 2, "replicate_zero": 1, **TO_OWNERS}, "build_with_own"),
        ({"pp": 1, "tp": 1, "replicate_zero": 1, **IN_BF16, **SMALL}, "build_with_own"),
        ({"pp": 1, "tp": 2, "replicate_zero": 2, **SMALL}, "build_with_own"),
        ({"pp": 1, "tp": 2, "replicate_zero": 2, "reduce_dtype": "bf16"}, "build_with_own"),
    ],
    ids=str,
)
def test_deepspeed_bf16_is_close(world: World, options: Options, builder: str) -> None:
    plan = plan_of("deepspeed_3d", options, precision="bf16", model=TIED)
    check(world, plan, tolerance=2e-2, builder=f"{__name__}:{builder}")


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"param_persistence_threshold": 10**6}, TIED),  # all is gathered once per step
        # Every tensor is gathered alone for every pass, and reduced alone.
        (
            {"allgather_sequential": True, "live_parameters": 1, "reduce_bucket_size": 3000}
            | {"param_persistence_threshold": 0, "recompute": "full", "recompute_blocks": 2},
            LLAMA | TIED,
        ),
        # Two ranks of four have a second copy of the parameters between them.
        ({"zero_hpz_partition_size": 2, "param_persistence_threshold": 0}, TIED),
    ],
    ids=str,
)
def test_deepspeeds_zero3_is_one_process(world: World, options: Options, model: Options) -> None:
    plan = plan_of("deepspeed_zero3", options, ranks=4, model=model)
    for outcome in check(world, plan):
        expected = [
            str(action)
            for action in plan.schedule.programs[0]
            if action.op not in IN_DEEPSPEEDS_INSTRUCTIONS
        ]
        assert [span.action for span in outcome.spans] == expected


@pytest.mark.parametrize(
    "types", [{}, {"grad_accum_dtype": "bf16", "reduce_dtype": "bf16"}], ids=str
)
def test_deepspeeds_zero3_in_bf16_is_close(world: World, types: Options) -> None:
    options = {"reduce_bucket_size": 3000, **types}
    plan = plan_of("deepspeed_zero3", options, ranks=4, precision="bf16", model=TIED)
    check(world, plan, tolerance=2e-2)


def test_compiled_blocks_have_the_same_gradients(world: World) -> None:
    plan = plan_of("deepspeed_3d", {"compile": True, "pp": 2, "recompute": "full"})
    check(world, plan, builder=f"{__name__}:build_in_python")


KEPT = {"reshard_after_forward": False}


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"shard": 4, "recompute": "selective"}, {}),
        ({"shard": 4, "reshard_after_backward": False}, {}),
        ({"shard": 2, "replicate": 2, "reduce_every": "step", **KEPT}, LLAMA),
        ({"shard": 2, "replicate": 2, **KEPT, "reshard_after_backward": False}, {}),
        ({"shard": 2, "replicate": 2, "recompute": "full"}, TIED),
    ],
    ids=str,
)
def test_fsdp_is_one_process(world: World, options: Options, model: Options) -> None:
    plan = plan_of("fsdp", options, model=model)
    (program,) = plan.schedule.programs
    for outcome in check(world, plan):
        for op in (Op.UNSHARD, Op.REDUCE_GRAD) if model != TIED else ():
            planned = sum(action.op is op for action in program)
            assert outcome.counters[op.name.lower()] == STEPS * planned
        compute = [str(action) for action in program if action.op.is_compute]
        expected = [text for text in compute if not text.startswith("0B")]
        assert model == TIED or [span.action for span in outcome.spans] == expected


def test_a_compiled_block_leaves_its_last_product_out() -> None:
    """Where it is computed again, as the trait ``stops_recomputing`` says."""
    plan = plan_of("fsdp", {"recompute": "full", "compile": True})
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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model", [TIED, LLAMA], ids=["gpt", "llama"])
def test_a_delaying_block_leaves_its_last_product_out(model: Options, compiled: bool) -> None:
    plan = plan_of("zeropp", {"recompute": "full"}, model=model)
    block = build_piece(plan.shape, 1, 0, torch.device("cpu"))
    defer_weight_grads([block], WeightGradStore())
    save_early([block])
    if compiled:
        block.compile(backend="aot_eager_decomp_partition")
    x = torch.randn(2, plan.shape.seq, plan.shape.hidden, requires_grad=True)

    def run(recompute: Recompute) -> tuple[int, list[Tensor]]:
        with profile(activities=[ProfilerActivity.CPU]) as profiled, backward_of_chunk():
            y = run_recomputed(block, x, recompute=recompute, random=False)
            gradients = torch.autograd.grad(y.square().sum(), [x, *block.parameters()])
        products = sum(event.name in ("aten::mm", "aten::addmm") for event in profiled.events())
        return products, list(gradients)

    run("full")  # compiles
    (once, expected), (again, found) = run("none"), run("full")
    linears = sum(isinstance(module, nn.Linear) for module in block.modules())
    assert again - once == linears - 1
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"pp": 2, "shard": 2, "schedule": "1f1b", "recompute": "full"}, {}),
        ({"pp": 2, "shard": 2, "schedule": "interleaved_1f1b", "chunks": 3}, {"layers": 6}),
        ({"pp": 2, "replicate": 2, "schedule": "zbv", "chunks": 2}, TIED),
        ({"pp": 2, "shard": 2, "schedule": "dualpipev", "chunks": 2}, {}),
        # Two units of two microbatches: each stage is gathered, released and reduced in both.
        ({"pp": 2, "shard": 2, "schedule": "zeropp", "chunks": 3}, {"layers": 6}),
        ({"pp": 2, "tp": 2, "schedule": "1f1b", "recompute": "selective"}, TIED),
        ({"pp": 2, "tp": 2, "schedule": "1f1b", "sequence_parallel": True}, {}),
        (
            {"pp": 2, "tp": 2, "schedule": "looped_bfs", "chunks": 2, "sequence_parallel": True},
            LLAMA,
        ),
    ],
    ids=str,
)
def test_torch_pp_is_one_process(world: World, options: Options, model: Options) -> None:
    plan = plan_of("torch_pp", options, global_batch=FEW if "tp" in options else 8, model=model)
    for rank, outcome in enumerate(check(world, plan)):
        program = plan.schedule.programs[plan.layout.coordinates(rank)["pp"]]
        gathers = sum(action.op is Op.UNSHARD for action in program)
        assert outcome.counters.get("unshard", 0) == STEPS * gathers
        assert [s.action for s in outcome.spans if s.lane == "compute"] == [
            str(a) for a in program if a.op.is_compute
        ]


@pytest.mark.parametrize(
    ("name", "options", "layers", "recomputed"),
    [
        ("fsdp", {"shard": 4}, 4, (0, 1, 1, 0, 0, 0)),
        ("torch_pp", {"pp": 2, "shard": 2, "schedule": "1f1b"}, 6, (2, 1)),
    ],
    ids=["fsdp", "torch_pp"],
)
def test_some_blocks_are_recomputed(
    world: World, name: str, options: Options, layers: int, recomputed: tuple[int, ...]
) -> None:
    plan = plan_of(name, options | {"recompute": "full"}, model={"layers": layers})
    check(world, replace(plan, recomputed=recomputed))


ALL_AXES = {"pp": 2, "tp": 2, "shard": 2, "schedule": "interleaved_1f1b", "chunks": 2}


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("deepspeed_3d", 8, {"pp": 2, "tp": 2, "replicate_zero": 1}),
        ("deepspeed_3d", 4, {"pp": 1, "tp": 2, "replicate_zero": 2}),
        ("fsdp", 4, {"shard": 4}),
        # Four microbatches per rank: in a steady phase, forwards and backwards take turns.
        ("torch_pp", 8, ALL_AXES),
    ],
    ids=str,
)
def test_contenders_clip_and_adapt(world: World, name: str, ranks: int, options: Options) -> None:
    check(world, plan_of(name, options, ranks), optimizer=CLIPPED)


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("fsdp", 2, {"shard": 2}),
        ("fsdp", 2, {"shard": 2, "reduce_every": "step", "reduce_dtype": "bf16"}),
        ("torch_pp", 4, {"pp": 2, "shard": 2, "schedule": "interleaved_zb", "chunks": 2}),
    ],
    ids=str,
)
def test_bf16_is_close(world: World, name: str, ranks: int, options: Options) -> None:
    check(world, plan_of(name, options, ranks, precision="bf16"), tolerance=2e-2)
