"""Wrong calls of ``parallelize``: one error, the same on every rank, or without a process group."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from baselines.model import build_piece, sliced_cross_entropy
from baselines.zeropp.contender import ZEROPP, size
from baselines.zeropp.trainer import ZeroppTrainer
from benchmarks.specification.run_spec import RunSpec
from tests.gloo.cases import LLAMA, SEED, local_batch, request
from tests.gloo.layers import WIDTH, Calling, linear
from tests.gloo.models import built, data, error_of, refuses, seeded
from tests.gloo.world import World, on_ranks
from zeropp.engine.settings import Settings, read
from zeropp.engine.walk import walk
from zeropp.price.pieces import piece_times
from zeropp.price.price import work_of
from zeropp.schedule.plan import Plan
from zeropp.schedule.step_plan import drafts
from zeropp.train.stages import plan_layers
from zeropp.types.knobs import StepKnobs
from zeropp.types.layout import InfeasibleError
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig, Trainer


def wrong_calls(rank: int) -> list[tuple[str, dict[str, Any]]]:
    """What ``parallelize`` says to arguments on this rank; what they do not set is right."""
    layers = seeded([linear] * 4)
    lent: Any = layers[1]
    other = seeded([linear] * 4)
    other[3].weight = other[0].weight
    unequal = seeded([linear] * 4)
    next(unequal[2].parameters()).data[0, 0] += float(rank)
    tuples = seeded([linear, lambda: nn.LSTM(WIDTH, WIDTH), linear, linear])
    optimizer = zeropp.OptimizerConfig("sgd", lr=0.1 + rank)
    return [
        (
            "layers[2]: shares 'weight' with layers[1]",
            {"layers": [layers[0], layers[1], layers[1], layers[3]]},
        ),
        ("layers[3]: shares 'weight' with layers[0]", {"layers": other}),
        ("weights: 2 numbers for 4 layers", {"weights": [1.0, 1.0]}),
        ("every weight must be more than 0", {"weights": [1.0, 0.0, 1.0, 1.0]}),
        ("layers[3] has no parameter 'no_such'", {"tied": ((0, "weight"), (3, "no_such"))}),
        (
            "must name parameters of two layers, which are numbered from 0 to 3",
            {"tied": ((1, "weight"), (1, "bias"))},
        ),
        (
            "layers[3] has no parameter 'wieght'",
            {
                "layers": [*layers[:3], lambda: linear().double()],
                "tied": ((0, "weight"), (3, "wieght")),
            },
        ),
        (
            "both must have the same shape and type, and both be trained",
            {"tied": ((0, "weight"), (3, "bias"))},
        ),
        (
            "trained=False); both must have the same shape and type",
            {
                "layers": [*layers[:3], lambda: linear().double().requires_grad_(False)],
                "tied": ((0, "weight"), (3, "weight")),
            },
        ),
        (
            "'weight' is torch.bfloat16, but precision='fp32' computes in fp32",
            {
                "layers": [layer.bfloat16() for layer in seeded([linear] * 4)],
                "sample": data()[0][:1].bfloat16(),
            },
        ),
        ("layers[2]: 'weight' is not the same on ranks 0 and 1", {"layers": unequal, "shard": 2}),
        ("optimizer: ranks differ: rank 0 has", {"optimizer": optimizer, "pp": 2}),
        ("unit: ranks differ: rank 0 has 1 where rank 1 has 2; every", {"pp": 2, "unit": 1 + rank}),
        # Before what one rank then finds wrong with its own.
        ("pp: ranks differ: rank 0 has 2 where rank 1 has 3; every", {"pp": 2 + rank}),
        (
            "unexpected keyword argument 'global_bacth' (did you mean 'global_batch'?)",
            {"global_bacth": 4},
        ),
        ("InfeasibleError: device='cuda:7': ", {"device": "cuda:7"}),
        ("InfeasibleError: device='gpu': Expected one of", {"device": "gpu"}),
        (
            "layers[2]: shares 'weight' with layers[1], but layers are trai",
            {"layers": [linear_of_64, lambda: lent, lambda: lent]},
        ),
        (
            "layers[2]: shares '0.weight' with layers[1], but layer",
            {"layers": [linear_of_64, lambda: nn.Sequential(lent), lambda: nn.Sequential(lent)]},
        ),
        (
            "layers[2]: shares 'weight' with layers[1], but layers are trained",
            {"layers": [*layers[:2], lambda: lent]},
        ),
        (
            "layers[2]: cannot be made, but its sizes are found so: ",
            {"layers": [*layers[:2], torch.tanh]},
        ),
        (
            "a function without arguments that makes one: put a function of tensors i",
            {"layers": [*layers[:2], lambda x: x * 2]},
        ),
        ("layers[1]: returns tuple", {"layers": tuples, "pp": 2}),
        ("chunks=1: 2 x 1 stages, but there are 0 layers", {"layers": []}),
        ("layers: must be a list of modules", {"layers": layers[0]}),
        ("global_batch=0: must be at least 1", {"global_batch": 0}),
        ("global_batch=2.5: must be a whole number", {"global_batch": 2.5}),
        ("sample: must be a tensor of inputs", {"sample": data()[0][:0]}),
        ("must be a OptimizerConfig or a function of (Mapping)", {"optimizer": torch.optim.AdamW}),
        (
            "optimizer=a AdamW: must be a OptimizerConfig or a function of (Mapping)",
            {"optimizer": torch.optim.AdamW(layers[0].parameters())},
        ),
        (
            "optimizer: gives NoneType, but a torch.optim.Optimizer is needed, or a list",
            {"optimizer": lambda groups: None},
        ),
        ("dropout_seed=0.5: must be a whole number", {"dropout_seed": 0.5}),
        (
            "dropout_seed=None: layers[2] draws random numbers (give a seed)",
            {"layers": in_the_middle(nn.Dropout(0.1)), "dropout_seed": None},
        ),
        ("lr_schedule=0.1: must be a function of (int)", {"lr_schedule": 0.1}),
        ("timeout=5: must be a timedelta", {"timeout": 5}),
        ("layers[0]: cannot be called", {"sample": torch.zeros(1, WIDTH + 1, dtype=torch.float64)}),
        ("must be the number of ranks, 2", {"pp": 3}),
        (
            "activation_cap=3: a unit of 4 microbatches in 2 chunks needs at least 5",
            {"pp": 2, "chunks": 2, "unit": 4, "activation_cap": 3},
        ),
        (
            "layers[1]: 'weight' is on the meta device and has no values",
            {"layers": [layers[0], linear().double().to("meta"), *layers[2:]]},
        ),
        (
            "layers[3]: reads 'weight' of layers[0], which only that",
            {"layers": [*layers[:3], Borrowing(layers[0])]},
        ),
        (
            "layers[3]: reads 'weight' of layers[1], which",
            {"layers": [*layers[:3], Calling(lambda x: x @ lent.weight)]},
        ),
        (
            "loss_fn=None: must be a function of (output of the last layer, targets)",
            {"loss_fn": None},
        ),
        (
            "layers[0]: cannot be made, but its sizes are found so: 'int' object is not callable",
            {"layers": [1, 2]},
        ),
        (
            "group_of: ranks differ: rank 0 has",
            {"group_of": (lambda name, one: "all") if rank else by_size},
        ),
        (
            "optimizer: ranks differ: rank 0 has",
            {"optimizer": lambda g: torch.optim.SGD(g["all"], lr=0.1 + rank)},
        ),
        (
            "layers[2]: GRUCell cannot be recomputed with recompute='selective'",
            {"layers": in_the_middle(nn.GRUCell(WIDTH, WIDTH)), "recompute": "selective"},
        ),
    ]


class Borrowing(nn.Module):
    """Reads the weight of a layer that it keeps where torch does not see it."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.lenders = [lender]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.lenders[0].weight  # type: ignore[operator]


def linear_of_64() -> nn.Module:
    """A plain layer in fp64, as a function that is called where it is needed makes it."""
    return linear().double()


def by_size(name: tuple[int, str], parameter: nn.Parameter) -> str:
    """Two groups of parameters."""
    return "wide" if parameter.dim() > 1 else "narrow"


def in_the_middle(layer: nn.Module) -> list[nn.Module]:
    """Four layers with this one among them."""
    return seeded([linear, linear, lambda: layer, linear])


@on_ranks(2)
def test_a_call_at_a_wrong_moment_is_an_error_and_no_more() -> None:
    inputs, targets = data()
    with built(pp=2) as model:
        autocast = "RuntimeError: train_step, eval_step: torch.autocast is enabled"
        with torch.autocast("cpu", torch.bfloat16):
            assert error_of(lambda: model.train_step(inputs, targets)).startswith(autocast)
            assert error_of(lambda: model.eval_step(inputs, targets)).startswith(autocast)
        with torch.inference_mode():
            refuses(
                "RuntimeError: train_step: gradients are disabled",
                lambda: model.train_step(inputs, targets),
            )
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        refuses(
            "ValueError: inputs: needs a gradient, which no rank would",
            lambda: model.train_step(inputs * scale, targets),
        )
        refuses(
            "TypeError: inputs: must be a dense tensor",
            lambda: model.train_step(inputs.to_sparse(), targets),
        )
        refuses("RuntimeError: optimizer.step: train_step", lambda: model.optimizer.step())
        assert float(model.train_step(inputs, targets).loss) > 0


@on_ranks(1)
def test_a_loss_that_reads_a_layer_is_refused() -> None:
    layers = seeded([linear] * 4)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        weight: Any = layers[1].weight
        return F.mse_loss(output, target) + 0.1 * weight.square().sum()  # type: ignore[no-any-return]

    with built(layers, loss_fn=loss) as model:
        refuses(
            "InfeasibleError: loss_fn: reads 'weight' of layers[1], which only",
            lambda: model.train_step(*data()),
        )


@on_ranks(2)
def test_a_learning_rate_that_one_rank_has_is_refused_in_the_step() -> None:
    with built(pp=2) as model:
        group = model.optimizer.param_groups[0]
        rate = group["lr"]
        group["lr"] = rate * dist.get_rank()
        refuses(
            "ValueError: train_step: the optimizer of ranks [1] has other",
            lambda: model.train_step(*data()),
        )
        group["lr"] = rate
        model.train_step(*data())


@on_ranks(1)
def test_arguments_need_their_names() -> None:
    layers, sample = seeded([linear] * 2), data()[0][:1]
    parallelize: Any = zeropp.parallelize
    said = error_of(lambda: parallelize(layers, F.mse_loss, sample, 4))
    assert said == "TypeError: parallelize() takes 2 positional arguments but 4 were given"
    said = error_of(lambda: parallelize(layers, F.mse_loss, sample=sample))
    assert "missing 1 required keyword-only argument: 'global_batch'" in said


def refused(number: int) -> str:
    """What ``parallelize`` says to one of the wrong calls, on this rank."""
    _, arguments = wrong_calls(dist.get_rank())[number]
    if not {"pp", "shard"} & set(arguments):
        arguments["pp"] = 2
    return error_of(lambda: built(**{"layers": seeded([linear] * 4), **arguments}))


WORDS = [words for words, _ in wrong_calls(0)]


@pytest.mark.parametrize(("number", "words"), [*enumerate(WORDS)], ids=WORDS)
def test_a_wrong_call_is_one_error_on_every_rank(world: World, number: int, words: str) -> None:
    said = world.run(refused, number, size=2)
    assert all(words in message for message in said), said
    assert all("\n" not in message for message in said)
    assert len(set(said)) == 1


CONFIGURATIONS = [
    {"kind": "SGD"},
    {"lr": -1.0},
    {"clip_norm": -1.0},
    {"clip_norm": "1"},
    {"beta2": 1.0},
    {"eps": float("nan")},
]


@pytest.mark.parametrize("wrong", CONFIGURATIONS, ids=str)
def test_an_optimizer_configuration_is_checked(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}=.*: must be ") as error:
        zeropp.OptimizerConfig(**wrong)
    assert "\n" not in str(error.value)


def never() -> nn.Module:
    raise AssertionError("a layer was built")


def raised(knobs: dict[str, Any]) -> Exception:
    with pytest.raises((InfeasibleError, TypeError)) as error:
        Settings(**{"sample": torch.zeros(1, 2), "global_batch": 4, **knobs})
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("field", "value", "way_out"),
    [
        ("prefetch", -3, "at least 0"),
        ("reduce_every", "bogus", "must be one of 'unit', 'step'"),
        ("chunks", 0, "at least 1"),
        ("chunks", True, "must be a whole number"),
        ("pp", 1.5, "must be a whole number"),
        ("replicate_zero", 2, "must be one of 0, 1"),
        ("compile", "yes", "must be True or False"),
        ("tied", (0, 4), "must be tuple[tuple[int, str], tuple[int, str]]"),
        ("global_batch", 2.5, "must be a whole number"),
    ],
)
def test_no_value_is_ignored(field: str, value: object, way_out: str) -> None:
    error = raised({field: value})
    assert isinstance(error, InfeasibleError)
    assert str(error).startswith(f"{field}={value!r}: ")
    assert way_out in str(error)


@pytest.mark.parametrize("field", ["tp", "sequence_parallel", "schedule", "stage_style"])
def test_an_argument_that_there_is_not_is_a_type_error(field: str) -> None:
    error = raised({field: 2})
    assert isinstance(error, TypeError)
    assert f"unexpected keyword argument {field!r}" in str(error)


def test_no_process_group_is_said() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first"):
        zeropp.parallelize(
            [never] * 4, lambda y, _: y.sum(), sample=torch.zeros(1, 2), global_batch=4
        )


MOST_LINES = 9_600
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
    plan = plan_layers(Settings(**keywords), sizes, spec.num_gpus).plan
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
        plan_layers(settings, sizes, 4)
    with pytest.raises(zeropp.InfeasibleError, match="= 4: must be the number of ranks, 2"):
        plan_layers(settings, sizes, 2)


TIED = ((0, "weight"), (3, "weight"))


def plan_for(tied: Any) -> Plan:
    """The plan of a step of four linear layers on two ranks."""
    sample = torch.zeros(1, 4)
    settings = Settings(sample=sample, global_batch=4, pp=2, tied=tied)
    sizes = walk([nn.Linear(4, 4) for _ in range(4)], sample, {})
    return plan_layers(settings, sizes, 2).plan


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
