"""One door: the suite trains what people make with the same knobs, and degrees need no tuner."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeropp
from baselines.model import build_piece, sliced_cross_entropy
from baselines.zeropp.contender import ZEROPP, size
from baselines.zeropp.trainer import ZeroppTrainer
from benchmarks.specification.run_spec import RunSpec
from tests.gloo.cases import LLAMA, SEED, local_batch, request
from tests.gloo.world import World
from zeropp.engine.settings import Settings, read
from zeropp.engine.walk import walk
from zeropp.price.pieces import piece_times
from zeropp.price.price import work_of
from zeropp.schedule.plan import Plan
from zeropp.schedule.step_plan import drafts
from zeropp.train.stages import make_plan
from zeropp.types.knobs import StepKnobs
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig, Trainer

MOST_LINES = 9_050
SPECS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "pipeline of shards": ({"pp": 2, "shard": 2, "chunks": 2, "unit": 2}, {}, "fp32"),
    "dropout": ({"pp": 2, "shard": 2, "recompute": "full"}, {"dropout": 0.1}, "fp32"),
    "tied, ZeRO-1": (
        {"pp": 2, "replicate": 2, "replicate_zero": 1, "placement": "pp_inner"},
        LLAMA | {"tied_embeddings": True},
        "fp32",
    ),
    "selective, bf16": (
        {"pp": 2, "shard": 2, "recompute": "selective", "reduce_dtype": "bf16"},
        LLAMA,
        "bf16",
    ),
    "full backwards": (
        {"pp": 3, "chunks": 2, "unit": 4, "activation_cap": 6, "split_backward": False}
        | {"prefetch": 2},
        {"layers": 7},
        "fp32",
    ),
}


def spec_of(case: str) -> RunSpec:
    """A small model of the suite, and the knobs of a case; degrees that it does not name are 1."""
    knobs, model, precision = SPECS[case]
    degrees = {"pp": 1, "shard": 1, "replicate": 1} | knobs
    ranks = degrees["pp"] * degrees["shard"] * degrees["replicate"]
    asked: dict[str, Any] = {"name": "zeropp", **degrees}
    return request(ranks, asked, global_batch=12, precision=precision, model=model)


def plan_of(spec: RunSpec) -> Plan:
    """The suite's plan, in the order for equal durations."""
    sized = size(spec.task, spec.contender, spec.candidate.microbatch_size)  # type: ignore[arg-type]
    return next(drafts(sized)).complete()


def layers_of(shape: ModelShape) -> list[Any]:
    """The suite's model as a user would write it."""
    return [
        lambda i=i: build_piece(shape, i, SEED, torch.get_default_device())
        for i in range(shape.num_pieces)
    ]


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """The keywords of ``parallelize`` with the knobs of a spec. Chunks have another default in the
    suite; layers weigh what the suite says, because it has prices and no numbers of parameters."""
    plan, last = plan_of(spec), spec.model.num_pieces - 1
    knobs = {each.name: getattr(spec.contender, each.name) for each in fields(StepKnobs)}
    knobs = {name: value for name, value in knobs.items() if value != "auto"}
    knobs |= {"chunks": plan.layout.chunks, "unit": plan.schedule.unit}  # CPUs hide no collectives
    times = piece_times(work_of(plan, spec.cluster), 0.0, 0.0, 0.0)
    blocks = [times.block.total] * spec.model.layers
    return knobs | {
        "sample": torch.zeros(plan.microbatch_size, spec.model.seq, dtype=torch.long),
        "global_batch": spec.global_batch,
        "precision": spec.precision,
        "weights": [times.embedding.total, *blocks, times.head.total],
        "tied": ((0, "tokens.weight"), (last, "output.weight"))
        if spec.model.tied_embeddings
        else None,
        "dropout_seed": SEED if spec.model.dropout else None,
    }


@pytest.mark.parametrize("case", SPECS)
def test_the_same_knobs_make_the_same_plan(case: str) -> None:
    spec = spec_of(case)
    keywords = settings_of(spec)
    sizes = walk(layers_of(spec.model), keywords["sample"], {})
    plan = make_plan(Settings(**keywords), frozenset(), sizes, spec.num_gpus).plan
    suites = plan_of(spec)
    assert replace(plan, shape=suites.shape, tied_pieces=()) == suites
    chosen = spec.plan()  # among several orders of the same step
    assert replace(chosen, schedule=suites.schedule) == suites


def digests(trainer: Trainer, plan: Plan) -> list[float]:
    """Losses and gradient norms of three steps on this rank, and a digest of its parameters."""
    numbers: list[float] = []
    for step in range(3):
        result = trainer.step(*local_batch(plan, step))
        numbers += [float(result.loss), float(result.grad_norm)]
    parameters = {name: value.numpy().tobytes() for name, value in trainer.full_parameters()}
    assert parameters
    return [*numbers, crc32(repr(sorted(parameters.items())).encode())]


def train_both(case: str) -> tuple[list[float], list[float]]:
    """What the suite trains on this rank, and what a user does with the same knobs."""
    spec, optimizer = spec_of(case), OptimizerConfig("adamw", lr=1e-2, clip_norm=0.5)
    plan = plan_of(spec)
    theirs = digests(ZEROPP.build(plan, optimizer, torch.device("cpu"), SEED), plan)
    model = zeropp.parallelize(
        layers_of(spec.model), sliced_cross_entropy, optimizer=optimizer, **settings_of(spec)
    )
    return theirs, digests(ZeroppTrainer(model), plan)


@pytest.mark.parametrize("case", SPECS)
def test_the_same_knobs_train_to_the_same_bits(world: World, case: str) -> None:
    found = world.run(train_both, case, size=spec_of(case).num_gpus)
    for suites, ours in found:
        assert suites == ours
        assert suites[:2] == found[0][0][:2]  # losses and norms, the same on every rank


WITH_PLAN: dict[str, tuple[dict[str, Any], str]] = {
    "another degree": ({"pp": 4}, "pp=4: the plan decides it (leave one of the two out)"),
    "weights": ({"weights": [1.0] * 6}, "weights=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]: the plan decides"),
    "a cluster": ({"cluster": "a800"}, "cluster='a800': the plan decides it"),
    "another batch": ({"global_batch": 24}, "plan: is for global_batch=12 in microbatches of 1"),
    "a default": ({"shard": 1}, "shard=1: the plan decides it (leave one of the two out)"),
    "auto": ({"unit": "auto"}, "unit='auto': the plan decides it (leave one of the two out)"),
    "the same degree": ({"pp": 2, "precision": "fp32"}, ""),
}


@pytest.mark.parametrize("case", WITH_PLAN)
def test_a_plan_stands_alone(case: str) -> None:
    more, message = WITH_PLAN[case]
    plan = plan_of(spec_of("pipeline of shards"))
    sample = torch.zeros(1, 16, dtype=torch.long)
    keywords: dict[str, Any] = {"sample": sample, "global_batch": 12, **more}
    if not message:
        assert read({"plan": plan, **keywords})[0].layout == plan.layout
        return
    with pytest.raises(zeropp.InfeasibleError) as error:
        read({"plan": plan, **keywords})
    assert str(error.value).startswith(message)


def test_a_plan_of_another_model_is_refused() -> None:
    plan = plan_of(spec_of("pipeline of shards"))
    sample = torch.zeros(1, 16)
    settings = Settings(plan=plan, sample=sample, global_batch=12)
    sizes = walk([nn.Linear(16, 16) for _ in range(5)], sample, {})
    with pytest.raises(zeropp.InfeasibleError, match="plan: is for 6 layers, but there are 5"):
        make_plan(settings, frozenset(), sizes, 4)
    with pytest.raises(zeropp.InfeasibleError, match="= 4: must be the number of ranks, 2"):
        make_plan(settings, frozenset(), sizes, 2)


TIED = ((0, "weight"), (3, "weight"))


def plan_for(tied: Any) -> Plan:
    """The plan of a step of four linear layers on two ranks."""
    sample = torch.zeros(1, 4)
    settings = Settings(sample=sample, global_batch=4, pp=2, tied=tied)
    sizes = walk([nn.Linear(4, 4) for _ in range(4)], sample, {})
    return make_plan(settings, frozenset(), sizes, 2).plan


def refused_beside(planned: Any, tied: Any) -> str:
    """What ``parallelize`` says on this rank to such ``tied`` beside a plan with others."""
    torch.manual_seed(SEED)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    sample, plan = torch.zeros(1, 4), plan_for(planned)
    with pytest.raises(zeropp.InfeasibleError) as error:
        zeropp.parallelize(layers, F.mse_loss, sample=sample, global_batch=4, plan=plan, tied=tied)
    return str(error.value)


@pytest.mark.parametrize(("planned", "tied"), [(TIED, None), (None, TIED)], ids=["plan", "call"])
def test_a_plan_that_ties_other_layers_is_refused_on_every_rank(
    world: World, planned: Any, tied: Any
) -> None:
    shared = (0, 3) if planned else ()
    for message in world.run(refused_beside, planned, tied, size=2):
        assert message.startswith(f"plan: has a parameter shared by the layers {shared}, but tied=")


FIXED_DEGREES = """
import sys, torch, zeropp
from torch import distributed, nn

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = zeropp.parallelize(
    [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss,
    sample=torch.zeros(1, 4), global_batch=2, chunks=2,
)
model.train_step(torch.zeros(2, 4), torch.zeros(2, 4))
for name, module in sys.modules.items():
    if name.partition(".")[0] == "zeropp":
        print(name, len(open(module.__file__).readlines()))
"""


def test_fixed_degrees_load_neither_tuner_nor_prices() -> None:
    program = [sys.executable, "-c", FIXED_DEGREES]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    lines = {name: int(count) for name, count in map(str.split, printed.splitlines())}
    assert "zeropp.engine.interpreter" in lines
    unneeded = ("zeropp.choose", "zeropp.price", "zeropp.emulate", "zeropp.engine.checkpoint")
    assert [name for name in lines if name.startswith(unneeded)] == []
    assert sum(lines.values()) <= MOST_LINES
