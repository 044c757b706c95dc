"""Small models in fp64: made alike on every rank, trained there and in one process, and what sets
both apart."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import zeropp
from tests.gloo.layers import (
    ROWS,
    WIDTH,
    Adapted,
    Attention,
    Both,
    Branching,
    Checkpointed,
    Complex,
    Conjugates,
    Counting,
    Detached,
    Fork,
    Given,
    GivesComplex,
    GivesParameter,
    Hooked,
    InnerGradient,
    InPlace,
    Join,
    Kind,
    Locked,
    Masked,
    Placed,
    PostHooked,
    Recurrent,
    Remembering,
    Reused,
    SharedMemory,
    Sometimes,
    Stateful,
    TakesComplex,
    TakesTwo,
    Transformed,
    TwoTypes,
    Unused,
    Wrapping,
    expanded,
    frozen,
    group_norm,
    half_frozen,
    linear,
    spectral,
    weight_normed,
    wide,
)  # fmt: skip
from zeropp.engine.layers.chunk import seed_piece
from zeropp.engine.layers.values import chosen, keywords_of, tensors_of
from zeropp.schedule.cuts import cut_layers
from zeropp.schedule.program import loop_placement
from zeropp.schedule.zeropp_order import smallest_cap
from zeropp.train.parallel_model import ParallelModel

MICROBATCH, STEPS = 2, 2
RATE = 0.1  # of plain SGD, whose steps are as wrong as a gradient is
LEAST_MOVE = 1e-4  # of each parameter with a gradient, at least a hundred times the tolerance


def largest(differences: Iterable[float]) -> float:
    """The largest one; NaN if one is NaN, which Python's ``max`` may drop. Raises on none."""
    return float(torch.tensor([*differences], dtype=torch.float64).max())


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of tensors from those of the same names; raises on none."""
    pairs = [(value, expected[name]) for name, value in found.items() if value.numel()]
    return largest(float((ours.detach().double() - theirs).abs().max()) for ours, theirs in pairs)


def error_of(call: Callable[[], object]) -> str:
    """What a call raises, as ``Kind: message``; empty where it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refuses(words: str, call: Callable[[], object]) -> None:
    """Assert that a call raises an error, which begins so, as ``Kind: message``."""
    said = error_of(call)
    assert said.startswith(words), said


def ranks_of(degrees: Mapping[str, Any]) -> int:
    """The ranks of a topology; four where its degrees are left open."""
    asked = [degrees.get(axis, 1) for axis in ("pp", "shard", "replicate")]
    return 4 if "auto" in asked else math.prod(asked)


def topology(seed: int, layers: int = 6, rows: int = 8) -> dict[str, Any]:
    """Random keywords of ``parallelize`` for at most eight ranks, and a random microbatch."""
    draw = random.Random(seed)
    pp, shard, replicate = draw.choice(
        [(p, s, r) for p in (1, 2, 3) for s in (1, 2, 4) for r in (1, 2) if 1 < p * s * r <= 8]
    )
    microbatch = draw.choice([1, 2] if shard * replicate < 8 else [1])
    count = rows // (microbatch * shard * replicate)
    chunks, unit = draw.randint(1, layers // pp), draw.randint(1, count)
    least = smallest_cap(chunks, count, unit)
    return {
        "pp": pp,
        "shard": shard,
        "replicate": replicate,
        "chunks": chunks,
        "unit": unit,
        "microbatch_size": microbatch,
        "activation_cap": draw.randint(least, max(least, unit * chunks)),
        "prefetch": draw.randint(0, 2),
        "replicate_zero": draw.randint(0, 1) if replicate > 1 else 0,
        "placement": draw.choice(["dp_inner", "pp_inner"]),
        "recompute": draw.choice(["none", "selective", "mlp", "full"]),
        "reduce_every": draw.choice(["unit", "step"]),
        "split_backward": draw.random() < 0.7,
        "tied": draw.random() < 0.5,
        "gradient_parts": draw.choice([1, 1, 2, 3]),
    }


def beside_cuts(kinds: Sequence[Kind], degrees: Mapping[str, Any]) -> set[tuple[Kind, Kind]]:
    """The layers right before and right behind each cut between stages, where all layers weigh the
    same; none without pipeline parallelism."""
    if degrees.get("pp", 1) == 1:
        return set()
    stage_rank = loop_placement(degrees["pp"], degrees.get("chunks", 1))
    cuts = cut_layers([1.0] * len(kinds), stage_rank)[1:-1]
    return {(kinds[cut - 1], kinds[cut]) for cut in cuts}


def loss_function(output: Tensor, target: Tensor) -> Tensor:
    """Mean square error in the type of the target, as torch 2.11 does not take two types."""
    return F.mse_loss(output.to(target.dtype), target)


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step: a global batch of vectors, in fp64."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def seeded(kinds: Sequence[Kind], scale: float = 1.0) -> list[nn.Module]:
    """Layers of these kinds in fp64, equal on every rank, with weights larger than torch makes
    them where gradients would vanish over many layers."""
    torch.manual_seed(3)
    layers = [kind().double() for kind in kinds]
    with torch.no_grad():
        for parameter in nn.ModuleList(layers).parameters():
            if scale != 1.0 and parameter.dim() > 1 and parameter.is_contiguous():
                parameter.mul_(scale)
    return layers


def adamw(groups: Mapping[str, list[nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW for all parameters."""
    return torch.optim.AdamW(groups["all"], lr=1e-2)


def built(layers: Any = None, **more: Any) -> ParallelModel:
    """The layers (four linear ones, if none are given) in parallel, with plain SGD and one row per
    microbatch."""
    arguments: dict[str, Any] = {
        "sample": data()[0][:1],
        "global_batch": ROWS,
        "optimizer": zeropp.OptimizerConfig("sgd", lr=RATE),
    }
    arguments |= more
    layers = seeded([linear] * 4) if layers is None else layers
    return zeropp.parallelize(layers, arguments.pop("loss_fn", loss_function), **arguments)


def step(model: ParallelModel, number: int = 0) -> float:
    """Train one step; the loss."""
    inputs, targets = (part[model.rows] for part in data(number))
    return float(model.train_step(inputs, targets).loss)


def steps(model: ParallelModel, *numbers: int) -> list[float]:
    """Train several steps; their losses."""
    return [step(model, number) for number in numbers]


def trained_alone(
    layers: Sequence[nn.Module],
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    rows: int = 1,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_function,
) -> tuple[nn.ModuleList, list[float]]:
    """The layers after a step with each batch in one process, ``rows`` by rows, with the gradients
    of the last step in them; and the losses. A number beside a layer's output is a loss, too."""
    model, losses = nn.ModuleList(layers), []
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    for inputs, targets in batches:
        stepper.zero_grad()
        losses.append(0.0)
        parts = (torch.split(part, rows) for part in (inputs, targets))
        for x, y in zip(*parts, strict=True):
            values: tuple[Any, ...] = (x,)
            beside: list[Tensor] = []
            for layer in model:
                given = tensors_of(layer(*values))
                values = tuple(one for one in given if one.dim())
                beside += [one for one in given if not one.dim()]
            loss = (loss_fn(values[0], y) + sum(beside)) * rows / len(inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[-1] += float(loss.detach())
        stepper.step()
    return model, losses


# Unusual layers.


@dataclass(frozen=True)
class UserModel:
    """Layers; the parameters that never have a gradient, by ``{layer}.{name}``; how far parameters
    may be from those of one process; and a factor of weights."""

    kinds: tuple[Kind, ...]
    without_gradient: frozenset[str]
    tolerance: float = 1e-10
    scale: float = 1.0


def names(layer: int, *modules: str) -> set[str]:
    """The weight and the bias of linear layers inside a layer, or of the layer itself."""
    return {f"{layer}.{module}{kind}" for module in modules for kind in ("weight", "bias")}


# Each unusual layer stands where some topology cuts right before or behind it; the ones that hand
# several tensors on are cut apart, too.
MODELS = {
    "unusual": UserModel(
        (
            linear, Adapted, Reused, lambda: InnerGradient(False), lambda: InnerGradient(True),
            Hooked, Transformed, lambda: Checkpointed(True), lambda: Checkpointed(False), Attention,
            Recurrent, GivesParameter, TakesTwo, GivesComplex, Conjugates, TakesComplex, spectral,
            linear,
        ),
        frozenset({*names(1, "a."), "1.b.bias", *names(3, "a.")}),
        scale=2.5,
    ),
    "two types": UserModel(
        (linear, TwoTypes, linear, TwoTypes, TwoTypes, linear, linear, TwoTypes, linear),
        frozenset(),
        tolerance=1e-6,
    ),
    # Where gradients stop, always or for some rows.
    "stopping": UserModel(
        (linear, wide, Detached, wide, Sometimes, linear, wide, Sometimes, linear, linear),
        frozenset(names(0, "") | names(1, "") | names(2, "b.") | names(4, "b.") | names(7, "b.")),
        scale=1.2,
    ),
    "all kinds": UserModel(
        (
            linear, Branching, Remembering, InPlace, weight_normed, Unused, half_frozen, expanded,
            frozen, group_norm, linear, nn.Tanh,
        ),
        frozenset({"5.spare", "5.nothing", "6.bias", *names(8, "")}),
        scale=1.5,
    ),
    # The first stage of several has nothing that is trained: nothing sends a gradient to it.
    "frozen first": UserModel(
        (
            frozen, frozen, nn.Tanh, frozen, group_norm, weight_normed, InPlace, Unused, Branching,
            expanded, half_frozen, Remembering,
        ),
        frozenset({*names(0, ""), *names(1, ""), *names(3, ""), "7.spare", "7.nothing", "10.bias"}),
        scale=1.5,
    ),
}  # fmt: skip


def kinds_of(name: str, degrees: Mapping[str, Any]) -> tuple[Kind, ...]:
    """The layers of a model that a topology can train as one process does."""
    left_out: set[Kind] = set()
    if degrees.get("shard", 1) * degrees.get("replicate", 1) > 1:
        left_out.add(spectral)  # on every rank it would see that rank's rows alone
    if "recompute" in degrees:
        # Recomputed layers would see their rows twice; torch's transforms do not work inside of
        # torch's recomputation.
        left_out |= {spectral, Transformed}
    return tuple(kind for kind in MODELS[name].kinds if kind not in left_out)


@cache
def alone(name: str, kinds: tuple[Kind, ...]) -> dict[str, Tensor]:
    """Parameters after some steps in one process. All that should have gradients have moved so far
    that a wrong gradient would be seen, and gradients stop for some rows but not for all."""
    layers = seeded(kinds, MODELS[name].scale)
    before = {}
    for key, one in nn.ModuleList(layers).named_parameters():
        one.data = one.data.contiguous()  # an expanded row would be updated many times
        before[key] = one.detach().clone()
    branches = {layer: set[bool]() for layer in layers if isinstance(layer, Sometimes)}
    for layer, taken in branches.items():
        layer.register_forward_hook(lambda _, x, got, taken=taken: taken.add(got.requires_grad))
    sgd = partial(torch.optim.SGD, lr=RATE)
    model, _ = trained_alone(layers, map(data, range(STEPS)), sgd, MICROBATCH)
    assert all(taken == {True, False} for taken in branches.values())
    after = {key: value.detach() for key, value in model.named_parameters()}
    moves = {key: (value - before[key]).abs().flatten() for key, value in after.items()}
    still = {key for key, move in moves.items() if not move.any()}
    left = [number for number, kind in enumerate(MODELS[name].kinds) if kind in kinds]
    parts = [key.partition(".") for key in MODELS[name].without_gradient]
    assert still == {f"{left.index(int(number))}.{rest}" for number, _, rest in parts}
    assert {key for key, move in moves.items() if not (move > LEAST_MOVE).any()} == still
    return after


def between(*kinds: Kind) -> list[Kind]:
    """Layers with a linear one on either side."""
    return [linear, *kinds, linear]


REFUSED: dict[str, tuple[list[Kind], str]] = {
    "post hook": (between(PostHooked, linear), "1.a.bias: has a hook of register_post_accumulate"),
    "shared memory": (between(SharedMemory, linear), "layers[1]: 'b.weight' is in the same memory"),
    "complex": (between(Complex, linear), "1.scale: parameters of type torch.complex64 cannot be"),
    "dict": (
        between(Given, linear),
        "layers[1]: returns dict, but a layer must return a tensor or a tuple of tensors",
    ),
    "lock": (between(Locked, linear), "layers[1]: cannot be copied, but its sizes are found so"),
    "max_norm": (
        [lambda: nn.Embedding(7, WIDTH, max_norm=1.0), linear, linear, linear],
        "layers[0]: its forward changes 'weight', which no rank would keep",
    ),
    "scripted": (
        between(lambda: torch.jit.script(linear()), linear),
        "layers[1]: has a RecursiveScriptModule, whose param",
    ),
    "in DDP": (
        between(lambda: DistributedDataParallel(linear()), linear),
        "layers[1]: has a DistributedDataParallel, which adds",
    ),
    "extra state": (between(Stateful, linear), "layers[1]: has a Stateful, whose extra state no"),
}


# Layers with several tensors between them, keyword inputs, dropout and two kinds of losses.

KINDS: dict[str, list[Kind]] = {
    "tuples": [Fork, Both, Both, lambda: Both(unused=True), Both, Join, linear],
    "keywords": [linear, Masked, Placed, lambda: Wrapping(Masked()), linear, Masked, linear],
    "dropout": [linear, lambda: Masked(0.4), linear, lambda: Masked(0.4), Placed, Masked, linear],
}


def sum_loss(output: Tensor, target: Tensor, row_weight: Tensor) -> Tensor:
    """Weighted by a keyword input."""
    return ((output - target).square().mean(-1) * row_weight).sum()


LOSSES: dict[str, Callable[..., Tensor]] = {"mean": loss_function, "sum": sum_loss}


@dataclass(frozen=True)
class Batch:
    """A global batch, with keyword inputs where layers or loss name them."""

    inputs: Tensor
    targets: Tensor
    keywords: dict[str, Tensor] = field(default_factory=dict)

    def part(self, rows: slice) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Some of its rows."""
        keywords = {name: value[rows] for name, value in self.keywords.items()}
        return self.inputs[rows], self.targets[rows], keywords


def batch_of(kind: str, reduction: str, step: int, rows: int = ROWS) -> Batch:
    """That of a step, in fp64."""
    generator = torch.Generator().manual_seed(step)
    both = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    keywords: dict[str, Tensor] = {}
    if kind != "tuples":
        keywords["mask"] = torch.rand(rows, WIDTH, generator=generator) < 0.3
        keywords["positions"] = torch.randperm(ROWS, generator=generator)[:rows]
    if reduction == "sum":
        keywords["row_weight"] = torch.rand(rows, generator=generator).double()
    return Batch(both[0], both[1], keywords)


@dataclass(frozen=True)
class Course:
    """A training in one process: the batches of its steps, with their losses; those evaluated
    before each step, with their losses and what the last layer gives; and the parameters after the
    last step."""

    batches: Sequence[Batch]
    losses: list[float]
    evaluated: Sequence[Batch]
    evaluations: list[float]
    outputs: list[Tensor]
    parameters: dict[str, Tensor]


def course_alone(
    layers: Sequence[nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    loss_fn: Callable[..., Tensor],
    batches: Sequence[Batch],
    evaluated: Sequence[Batch],
    *,
    rows: int = MICROBATCH,
    reduction: str = "mean",
    seed: int = 0,
) -> Course:
    """What one process gets, ``rows`` by rows."""
    model = nn.ModuleList(layers)
    stepper = optimizer(model.parameters())

    def outputs(batch: Batch, rows: slice, place: tuple[int, int] | None = None) -> Tensor:
        value, _, keywords = batch.part(rows)
        for index, layer in enumerate(model):
            if place is not None:  # the step's and the microbatch's number
                seed_piece(seed, *place, index)
            value = layer(*tensors_of(value), **chosen(keywords, keywords_of(layer)))
        return value

    def loss(output: Tensor, batch: Batch, rows: slice) -> Tensor:
        _, targets, keywords = batch.part(rows)
        return loss_fn(output, targets, **chosen(keywords, keywords_of(loss_fn)))

    losses, evaluations, given = [], [], []
    for step, batch in enumerate(batches):
        model.eval()
        with torch.no_grad():
            given.append(outputs(evaluated[step], slice(None)))
            evaluations.append(float(loss(given[-1], evaluated[step], slice(None))))
        model.train()
        stepper.zero_grad()
        losses.append(0.0)
        count = len(batch.inputs) // rows
        for number in range(count):
            microbatch = slice(number * rows, (number + 1) * rows)
            part = loss(outputs(batch, microbatch, (step, number)), batch, microbatch)
            part = part / count if reduction == "mean" else part
            part.backward()  # type: ignore[no-untyped-call]
            losses[-1] += float(part.detach())
        stepper.step()
    named = model.named_parameters(remove_duplicate=False)
    parameters = {name: value.detach() for name, value in named}
    return Course(batches, losses, evaluated, evaluations, given, parameters)


@cache
def course_of(kind: str, reduction: str, steps: int) -> Course:
    """What every topology is compared with, so that it is computed once and sent to the ranks."""
    batches = [batch_of(kind, reduction, step) for step in range(steps)]
    evaluated = [batch_of(kind, reduction, 100 + step, rows=7) for step in range(steps)]
    optimizer, loss_fn = partial(torch.optim.AdamW, lr=1e-2), LOSSES[reduction]
    layers = seeded(KINDS[kind])
    return course_alone(layers, optimizer, loss_fn, batches, evaluated, reduction=reduction)


def with_keywords(kind: str, reduction: str, degrees: Mapping[str, Any]) -> ParallelModel:
    """Layers of a kind on this rank."""
    inputs, _, keywords = batch_of(kind, reduction, 0).part(slice(MICROBATCH))
    return built(
        seeded(KINDS[kind]), loss_fn=LOSSES[reduction], sample=inputs, sample_keywords=keywords,
        loss_reduction=reduction, optimizer=adamw, **degrees,
    )  # fmt: skip


# Layers, some frozen, and others that count in buffers.


def stateful() -> list[nn.Module]:
    """One is frozen, others have buffers."""
    return seeded([linear, Counting, frozen, Counting, linear])


def trained_part(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without counters, which each data-parallel rank has of its own rows."""
    assert "1.seen" in state
    return {name: value for name, value in state.items() if "seen" not in name}


def check_state(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0.0, atol=tolerance, check_dtype=False, msg=name
        )


def grouped(degrees: dict[str, Any], kind: Callable[..., Any] = torch.optim.AdamW) -> ParallelModel:
    """A model whose first layer is an optimizer group of its own, with another learning rate."""
    return built(
        stateful(),
        group_of=lambda name, _: "first" if name[0] == 0 else "others",
        optimizer=lambda groups: kind(
            [{"params": p, "lr": 0.1 if name == "first" else 0.01} for name, p in groups.items()]
        ),
        **degrees,
    )
