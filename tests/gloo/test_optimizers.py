"""Every optimizer as in one process, in several topologies and through checkpoints. A parameter
that a step does not use has a gradient of zeros there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import functional as F

import zeropp
from tests.gloo.world import World
from zeropp.layout import InfeasibleError
from zeropp.parallel_model import ParallelModel

WIDTH, ROWS, STEPS = 6, 8, 2
LEGS = 3  # of as many steps, each in another topology; most optimizers train for two
TOPOLOGIES: list[dict[str, Any]] = [
    {"pp": 2, "shard": 2, "chunks": 2},
    {"shard": 2, "replicate": 2, "replicate_zero": 1},
    {"pp": 2, "replicate": 2},
    {"shard": 4},
    {"pp": 4},
]
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # First, so that it meets the first three topologies: stages with chunks and shards, then
    # replicas that keep a part of the optimizer's state each.
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.5),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.02),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True, maximize=True),
}


class Choosing(nn.Module):
    """Uses one parameter from a late step on, one now and then, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.never, self.late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(WIDTH))
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, late: Tensor, rare: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if bool(rare.any()):
            y = y + self.expert(x).tanh()
        return y * self.late if bool(late.any()) else y


def made() -> list[nn.Module]:
    """Layers, equal on every rank."""
    torch.manual_seed(4)
    ends = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    return [layer.double() for layer in [ends[0], *(Choosing() for _ in range(2)), ends[1]]]


def data(step: int) -> dict[str, Tensor]:
    """A global batch, in which one row asks for the late parameter from step 3 on, and one for the
    rare ones in steps 1 and 4. Among two or four data-parallel ranks the two rows are on
    different ranks, so that the uses of each rank matter."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    row = torch.arange(ROWS)
    late, rare = (row == 2) & (step >= 3), (row == 7) & (step in (1, 4))
    return {"inputs": inputs, "targets": targets, "late": late, "rare": rare}


@cache
def alone(kind: str) -> list[dict[str, Tensor]]:
    """Training in one process: the parameters after every leg."""
    model = nn.ModuleList(copy.deepcopy(made()))
    optimizer = KINDS[kind](model.parameters())
    found = []
    for step in range(STEPS * LEGS):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        batch = data(step)
        for row in range(ROWS):
            x, y, late, rare = (batch[name][row : row + 1] for name in batch)
            for layer in model:
                x = layer(x, late, rare) if isinstance(layer, Choosing) else layer(x)
            (F.mse_loss(x, y) / ROWS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % STEPS == 0:
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def parallel(kind: str, degrees: dict[str, Any]) -> ParallelModel:
    batch = data(0)
    return zeropp.parallelize(
        made(),
        F.mse_loss,
        sample=batch["inputs"][:1],
        sample_keywords={name: batch[name][:1] for name in ("late", "rare")},
        global_batch=ROWS,
        optimizer=lambda groups: KINDS[kind](groups["all"]),
        **degrees,
    )


def kinds_of(number: int) -> list[str]:
    """The kinds of optimizers that train in a leg."""
    return [*KINDS] if number < 2 else ["momentum", "adamw"]


def go_on(place: Path, number: int) -> None:
    """For kinds of optimizers: load the last leg's checkpoint in another topology, train, save.
    Every kind begins one topology after the kind before it, and goes on to the next topology with
    every leg, so that the first two legs train in every topology."""
    for index, kind in enumerate(kinds_of(number)):
        with parallel(kind, TOPOLOGIES[(index + number) % len(TOPOLOGIES)]) as model:
            start = place / f"{kind} {number - 1}"
            if number and (index + number) % 2:
                model.load(start)
            elif number:
                load({"model": model}, checkpoint_id=str(start))
            for step in range(STEPS * number, STEPS * (number + 1)):
                inputs, targets, late, rare = (part[model.rows] for part in data(step).values())
                model.train_step(inputs, targets, late=late, rare=rare)
            model.save(place / f"{kind} {number}")


def test_every_optimizer_is_that_of_one_process_through_checkpoints(
    world: World, tmp_path: Path
) -> None:
    for number in range(LEGS):
        world.run(go_on, tmp_path, number, size=4)
        for kind in kinds_of(number):
            found: dict[str, Any] = dict(nn.ModuleList(made()).state_dict())
            load({"model": found}, checkpoint_id=str(tmp_path / f"{kind} {number}"), no_dist=True)
            for name, value in alone(kind)[number].items():
                torch.testing.assert_close(
                    found[name], value, rtol=0.0, atol=1e-10, msg=f"{kind} {number} {name}"
                )


class Middling(torch.optim.Optimizer):
    """Subtracts the mean of a tensor's gradient: what others have matters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(group["lr"] * (one.grad - one.grad.mean()))


class Orthogonal(torch.optim.SGD):
    """Gives every matrix an orthogonal update, and all else a plain one, as Muon's do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2:
                    left, _, right = torch.linalg.svd(parameter.grad, full_matrices=False)
                    parameter.grad.copy_(left @ right)
        super().step(closure)


class Decaying(torch.optim.SGD):
    """Decays matrices alone."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9 if parameter.ndim >= 2 else 1.0)


class Blockwise(torch.optim.SGD):
    """Keeps one scale of every 16 elements, as optimizers with a state of 8 bits do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = torch.ones(-(-parameter.numel() // 16))
                self.state[parameter] |= {"moment": parameter.clone(), "scale": scale}


WRONG: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor does not work element by element": torch.optim.Adafactor,
    "LBFGS cannot take a step": torch.optim.LBFGS,
    "Middling does not work element by element": Middling,
    "Adam cannot take a step": lambda p: torch.optim.Adam(p, capturable=True),
    "Orthogonal updates a matrix in another way": lambda p: Orthogonal(p, lr=0.5),
    "Decaying updates a matrix in another way": lambda p: Decaying(p, lr=0.5),
    "keeps 'scale' of a parameter, which is neither one number nor one per": Blockwise,
    "cannot be made from groups of flat tensors (as in lambda groups: torch.optim.AdamW(groups['all"
    "'])): Muon only supports 2D": lambda p: torch.optim.Muon(p),
}
FIRST_TRIES: list[Any] = [
    partial(torch.optim.AdamW, lr=0.1),
    lambda parameters: torch.optim.AdamW(parameters),
    lambda groups: torch.optim.AdamW(groups.values()),
]


def refused() -> list[str]:
    """What ``parallelize`` says to optimizers that cannot update flat shards."""
    said = []
    makers = [lambda groups, kind=kind: kind(groups["all"]) for kind in WRONG.values()]
    for make in (*makers, *FIRST_TRIES):
        with pytest.raises(InfeasibleError) as caught:
            zeropp.parallelize(
                made()[:1], F.mse_loss, sample=data(0)["inputs"][:1], global_batch=ROWS,
                optimizer=make, shard=2,
            )  # fmt: skip
        said.append(str(caught.value))
    return said


def test_an_optimizer_that_looks_at_whole_parameters_is_refused(world: World) -> None:
    first, second = world.run(refused, size=2)
    assert first == second
    assert len(first) == len(WRONG) + len(FIRST_TRIES)
    words_of = [*WRONG, *["cannot be made from groups of flat tensors (as in"] * len(FIRST_TRIES)]
    for said, words in zip(first, words_of, strict=True):
        assert said.startswith(f"optimizer: {words}"), said
        assert "\n" not in said
