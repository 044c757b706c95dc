"""DeepSpeed 3D on real processes: the numbers of one process, its program as planned."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from baselines.deepspeed_3d.build import build
from baselines.deepspeed_3d.trainer import DeepSpeedTrainer
from tests.gloo.contender_case import IN_DEEPSPEEDS_INSTRUCTIONS, check, request
from tests.gloo.world import World
from zeropp.schedule.plan import Plan
from zeropp.types.training import OptimizerConfig

BUILDER = "baselines.deepspeed_3d.build:build"
LLAMA = {"family": "llama", "kv_heads": 2}
TIED = {"tied_embeddings": True}


@pytest.mark.parametrize(
    ("contender", "model"),
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
def test_deepspeed_is_one_process(
    world: World, contender: dict[str, Any], model: dict[str, Any]
) -> None:
    plan = request(4, {"name": "deepspeed_3d", **contender}, model=model).plan()
    outcomes = check(world, BUILDER, plan)
    for rank, outcome in enumerate(outcomes):
        program = plan.schedule.programs[plan.layout.coordinates(rank)["pp"]]
        expected = [str(a) for a in program if a.op not in IN_DEEPSPEEDS_INSTRUCTIONS]
        assert [span.action for span in outcome.spans] == expected


@pytest.mark.parametrize(("pp", "replicate_zero"), [(2, 1), (1, 2)])
def test_deepspeed_clips_and_adapts(world: World, pp: int, replicate_zero: int) -> None:
    contender = {"name": "deepspeed_3d", "pp": pp, "tp": 2, "replicate_zero": replicate_zero}
    plan = request(4 * pp, contender).plan()
    check(world, BUILDER, plan, optimizer=OptimizerConfig(clip_norm=0.1))


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
TO_OWNERS = {"grad_accum_dtype": "bf16", "use_multi_rank_bucket_allreduce": False}


@pytest.mark.parametrize(
    ("contender", "builder"),
    [
        ({"pp": 2, "tp": 2, "replicate_zero": 1}, "build_with_bf16"),
        ({"pp": 2, "replicate_zero": 1, **TO_OWNERS}, "build_with_own"),
        ({"pp": 1, "tp": 1, "replicate_zero": 1, "grad_accum_dtype": "bf16"}, "build_with_own"),
        ({"pp": 1, "tp": 2, "replicate_zero": 2}, "build_with_own"),
    ],
    ids=str,
)
def test_deepspeed_bf16_is_close(world: World, contender: dict[str, Any], builder: str) -> None:
    plan = request(4, {"name": "deepspeed_3d", **contender}, precision="bf16", model=TIED).plan()
    check(world, f"{__name__}:{builder}", plan, tolerance=2e-2)


def test_compiled_blocks_have_the_same_gradients(world: World) -> None:
    contender = {"name": "deepspeed_3d", "compile": True, "pp": 2, "recompute": "full"}
    plan = request(4, contender).plan()
    check(world, f"{__name__}:build_in_python", plan)
