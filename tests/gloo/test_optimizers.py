"""Every optimizer as in one process, in several topologies and through checkpoints, and clipping by
the norm of the whole model's gradient. A parameter that a step does not use has a gradient of
zeros there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import zeropp
from baselines.model import build_model
from benchmarks.specification.run_spec import spec_from_mapping
from benchmarks.worker.data import open_batches
from benchmarks.worker.one_process import ROUNDED, OneProcess
from tests.gloo.layers import WIDTH, One, linear
from tests.gloo.models import (
    RATE,
    apart,
    built,
    data,
    error_of,
    loss_function,
    ranks_of,
    refuses,
    seeded,
    step,
    steps,
    trained_alone,
)
from tests.gloo.world import World, on_ranks
from tests.unit.toy_spec import mapping
from zeropp.engine.ranks.errors import gathered
from zeropp.engine.settings import Settings
from zeropp.engine.update.update_rules import GroupUse, clip_factor, norm_power, uses_of
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.training import OptimizerConfig

LAYERS, ROWS, STEPS = 4, 8, 2
LEGS = 3  # of as many steps, each in another topology; most optimizers train for two
TOPOLOGIES: list[dict[str, Any]] = [
    {"pp": 2, "shard": 2, "chunks": 2},
    {"shard": 2, "replicate": 2, "replicate_zero": 1},
    {"pp": 2, "replicate": 2},
    {"shard": 4},
    {"pp": 4},
]
Groups = Mapping[str, list[nn.Parameter]]


def group_of(name: tuple[int, str], parameter: nn.Parameter) -> str:
    """``matrices`` are those of the layers between the first and the last."""
    return "matrices" if parameter.dim() == 2 and 0 < name[0] < LAYERS - 1 else "others"


def muon_and_adamw(groups: Groups) -> list[torch.optim.Optimizer]:
    """As people train with torch's Muon, which takes matrices alone."""
    muon = torch.optim.Muon(groups["matrices"], lr=0.05, weight_decay=0.5)
    return [muon, torch.optim.AdamW(groups["others"], lr=0.02, fused=True)]


class OwnMuon(torch.optim.SGD):
    """Momentum, and an update of every matrix whose singular values are about 1."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2:
                    x = parameter.grad / (parameter.grad.norm() + 1e-7)
                    for _ in range(5):  # Newton and Schulz
                        x = 1.5 * x - 0.5 * (x @ x.mT) @ x
                    parameter.grad.copy_(x * max(1, len(x) / x.shape[1]) ** 0.5)
        super().step(closure)


class Blockwise(torch.optim.Optimizer):
    """Momentum in 8 bits, with one scale for every 16 elements of a tensor, as bitsandbytes has."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                blocks = F.pad(parameter.grad.flatten(), (0, -parameter.numel() % 16)).view(-1, 16)
                if state:
                    kept = F.pad(state["momentum"].flatten(), (0, -parameter.numel() % 16))
                    blocks = blocks + 0.9 * kept.view(-1, 16) * state["scale"] / 127
                scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
                flat = (blocks / scale * 127).round().to(torch.int8).flatten()
                state["momentum"] = flat[: parameter.numel()].view(parameter.shape).contiguous()
                state["scale"] = scale
                update = blocks.flatten()[: parameter.numel()]
                parameter.sub_(group["lr"] * update.view(parameter.shape))


def of_all(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[Groups], Any]:
    """One optimizer of all parameters."""
    return lambda groups: make([*groups["matrices"], *groups["others"]])


def two_fused(groups: Groups) -> list[torch.optim.Optimizer]:
    """Two that can leave an update out without the host."""
    rates = {"matrices": 0.05, "others": 0.02}
    return [torch.optim.AdamW(groups[name], lr=lr, fused=True) for name, lr in rates.items()]


WHOLE: dict[str, Callable[[Groups], Any]] = {
    "muon and adamw": muon_and_adamw,
    "own muon": of_all(lambda p: OwnMuon(p, lr=0.1, momentum=0.9)),
    "adafactor": of_all(lambda p: torch.optim.Adafactor(p, lr=0.1)),
    "8 bits": of_all(lambda p: Blockwise(p, lr=0.1)),
}
ELEMENTWISE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    # First, so that it meets the first three topologies: stages with chunks and shards, then
    # replicas that keep a part of the optimizer's state each.
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.02),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True, maximize=True),
}
KINDS = {name: of_all(make) for name, make in ELEMENTWISE.items()} | WHOLE
KINDS["two fused"] = two_fused


class Choosing(One):
    """Uses one parameter from a late step on, one now and then, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(WIDTH))
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, late: Tensor, rare: Tensor) -> Tensor:
        y = self.linear(x)
        if bool(rare.any()):
            y = y + self.expert(x).tanh()
        return y * self.late if bool(late.any()) else y


def made() -> list[nn.Module]:
    """Layers, equal on every rank."""
    return seeded([linear, Choosing, Choosing, linear])


def chosen_data(step: int) -> dict[str, Tensor]:
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
    model = nn.ModuleList(made())
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "others": []}
    for name, parameter in model.named_parameters():
        index, _, own = name.partition(".")
        groups[group_of((int(index), own), parameter)].append(parameter)
    optimizers, found = KINDS[kind](groups), []
    for number in range(STEPS * LEGS):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        batch = chosen_data(number)
        for row in range(ROWS):
            x, y, late, rare = (batch[name][row : row + 1] for name in batch)
            for layer in model:
                x = layer(x, late, rare) if isinstance(layer, Choosing) else layer(x)
            (F.mse_loss(x, y) / ROWS).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
        if (number + 1) % STEPS == 0:
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def parallel(kind: str, degrees: dict[str, Any]) -> ParallelModel:
    batch = chosen_data(0)
    return built(
        made(),
        sample=batch["inputs"][:1],
        sample_keywords={name: batch[name][:1] for name in ("late", "rare")},
        global_batch=ROWS,
        group_of=group_of,
        optimizer=KINDS[kind],
        **degrees,
    )


def go_on(place: Path, kinds: Sequence[str], number: int) -> None:
    """For kinds of optimizers: load the last leg's checkpoint in another topology, train, save.
    Every kind begins one topology after the kind before it, and goes on to the next topology with
    every leg, so that the first two legs train in every topology."""
    for index, kind in enumerate(kinds):
        with parallel(kind, TOPOLOGIES[(index + number) % len(TOPOLOGIES)]) as model:
            start = place / f"{kind} {number - 1}"
            if number and (index + number) % 2:
                model.load(start)
            elif number:
                load({"model": model}, checkpoint_id=str(start))
            for step in range(STEPS * number, STEPS * (number + 1)):
                inputs, targets, late, rare = (
                    part[model.rows] for part in chosen_data(step).values()
                )
                model.train_step(inputs, targets, late=late, rare=rare)
            model.save(place / f"{kind} {number}")


@pytest.mark.parametrize("kinds", [[*ELEMENTWISE], [*WHOLE]], ids=["elementwise", "whole"])
def test_every_optimizer_is_that_of_one_process_through_checkpoints(
    world: World, tmp_path: Path, kinds: list[str]
) -> None:
    for number in range(LEGS):
        trained = kinds if number < 2 else kinds[:1]
        world.run(go_on, tmp_path, trained, number, size=4)
        for kind in trained:
            found: dict[str, Any] = dict(nn.ModuleList(made()).state_dict())
            load({"model": found}, checkpoint_id=str(tmp_path / f"{kind} {number}"), no_dist=True)
            for name, value in alone(kind)[number].items():
                torch.testing.assert_close(
                    found[name], value, rtol=0.0, atol=1e-10, msg=f"{kind} {number} {name}"
                )


_CANNOT_BE_MADE = "cannot be made from the groups 'all':"
WRONG: dict[str, Any] = {
    f"{_CANNOT_BE_MADE} Muon only supports 2D parameters whereas we found": (
        lambda groups: torch.optim.Muon(groups["all"])
    ),
    f"{_CANNOT_BE_MADE} some parameters appear in more than one": (
        lambda groups: [torch.optim.SGD(groups["all"]), torch.optim.AdamW(groups["all"])]
    ),
    "gives list, but a torch.optim.Optimizer is needed, or a list of them": lambda groups: [],
    "gives int, but a torch.optim.Optimizer is needed, or a list of them": lambda groups: [3],
    f"{_CANNOT_BE_MADE} ": partial(torch.optim.AdamW, lr=0.1),
    f"{_CANNOT_BE_MADE}": lambda parameters: torch.optim.AdamW(parameters),
    "treats parameters of group 'all' by their places": lambda groups: torch.optim.SGD(
        [{"params": [one], "lr": 0.5**place} for place, one in enumerate(groups["all"])]
    ),
    f"{_CANNOT_BE_MADE[:-1]}": lambda groups: torch.optim.AdamW(groups.values()),
}


@pytest.mark.parametrize("words", WRONG)
@on_ranks(2)
def test_an_optimizer_that_no_rank_could_run_is_refused(words: str) -> None:
    said = error_of(lambda: built(seeded([linear, linear]), optimizer=WRONG[words], shard=2))
    assert said.startswith(f"InfeasibleError: optimizer: {words}"), said
    assert "\n" not in said


class Noting(torch.optim.SGD):
    """Notes its steps in a list of each parameter."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        for one in self.param_groups[0]["params"]:
            self.state[one].setdefault("steps", []).append(1)


class Slowing(torch.optim.SGD):
    """Makes smaller steps with every step, which it notes in a list of its own."""

    noted: list[int]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        self.noted.append(1)
        (group,) = self.param_groups
        group["lr"] = 0.1 / len(self.noted)
        super().step()


def slowing(groups: Groups) -> torch.optim.Optimizer:
    optimizer = Slowing(groups["all"], lr=0.1)
    optimizer.noted = []
    return optimizer


@on_ranks(1)
def test_a_state_before_the_first_step_changes_nothing() -> None:
    found = []
    for asks in (False, True):
        with built(optimizer=slowing) as model:
            if asks:
                model.state_dict()
            found.append(steps(model, 0, 1, 2))
    assert found[0] == found[1]


class Around(torch.optim.Optimizer):
    """Lets another optimizer make the updates, and keeps its state to itself."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        self.inner.step()


@on_ranks(2)
def test_state_that_no_checkpoint_could_hold_is_refused_in_the_first_step() -> None:
    model = built(shard=2, optimizer=lambda groups: Noting(groups["all"], lr=0.1))
    refuses("InfeasibleError: optimizer: keeps 'steps' of a parameter, a list", lambda: step(model))
    model = built(optimizer=lambda groups: Around(groups["all"]), shard=2)
    refuses("InfeasibleError: optimizer: Around keeps an optimizer, 'inner'", lambda: step(model))


@on_ranks(2)
def test_replicas_that_drift_apart_are_an_error() -> None:
    """Where each has all parameters; those that are updated by one of them alone cannot."""
    model = built(compare_replicas=2, replicate=2)

    def nudge(optimizer: Any, *_: object) -> None:
        for one in optimizer.param_groups[0]["params"]:
            one.grad.add_(1e-12 * dist.get_rank())

    for _ in range(2):
        step(model)
    model.optimizer.register_step_pre_hook(nudge)
    step(model)  # the third, which is not compared
    refuses(
        "RuntimeError: compare_replicas: after step 4 rank 1 has other parameters than rank 0",
        lambda: step(model),
    )
    words = "InfeasibleError: compare_replicas=2: no two ranks"
    refuses(words, lambda: built(compare_replicas=2, replicate=2, replicate_zero=1))
    refuses(words, lambda: built(compare_replicas=2, shard=2))


CPU = torch.device("cpu")
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "matrices": [(200, 300)],
    "others": [(8, 8), (8,), (2, 3, 5, 7)],
}


def whole_of(make: Any) -> tuple[str, ...]:
    return tuple(name for name, use in uses_of(make, SHAPES, CPU).items() if use.whole)


def test_optimizers_have_whole_parameters_unless_they_are_known_to_be_elementwise() -> None:
    for kind, make in KINDS.items():
        both = ("matrices", "others") if kind in WHOLE else ()
        expected = ("matrices",) if kind == "muon and adamw" else both
        assert whole_of(make) == expected, kind
    mixed = lambda groups: [  # noqa: E731
        torch.optim.Adafactor(groups["matrices"]),
        torch.optim.AdamW(groups["others"]),
    ]
    assert whole_of(mixed) == ("matrices",)
    assert whole_of(of_all(lambda p: Own(p, lr=0.1))) == ("matrices", "others")


def _of_all(make: Any, groups: Any) -> torch.optim.Optimizer:
    return make(groups["all"], lr=0.1)  # type: ignore[no-any-return]


def test_the_numbers_that_optimizers_keep_are_those_of_a_step() -> None:
    for make, expected in (
        (torch.optim.SGD, 0),
        (partial(torch.optim.SGD, momentum=0.9), 1),
        (partial(torch.optim.RMSprop, centered=True, momentum=0.9), 3),
        (torch.optim.Adagrad, 1),
        (torch.optim.Muon, 1),
        (torch.optim.Adadelta, 2),
        (partial(torch.optim.AdamW, amsgrad=True), 3),
    ):
        tensor = torch.nn.Parameter(torch.ones(8, 8))
        tensor.grad = torch.ones(8, 8)
        optimizer = make([tensor], lr=0.1)
        optimizer.step()
        kept = [x for x in optimizer.state[tensor].values() if torch.is_tensor(x) and x.dim()]
        assert len(kept) == expected, make
        made = partial(_of_all, make)
        found = uses_of(made, {"all": [(8, 8)]}, CPU)
        assert found == {"all": GroupUse(make is torch.optim.Muon, expected)}, make

    def hooked(p: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(p, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    assert whole_of(of_all(hooked)) == ("matrices", "others")


class Own(torch.optim.SGD):
    """Anybody's; nothing shows what it does from its thousandth step on."""


def decayed(where: Callable[[nn.Parameter], bool]) -> Callable[[Groups], Any]:
    """AdamW that decays some parameters, as most scripts have it."""

    def make(groups: Groups) -> torch.optim.Optimizer:
        every = [*groups["matrices"], *groups["others"]]
        return torch.optim.AdamW(
            [
                {"params": [p for p in every if where(p)], "weight_decay": 0.1},
                {"params": [p for p in every if not where(p)], "weight_decay": 0.0},
            ],
            fused=True,
        )

    return make


def test_settings_by_shape_need_whole_parameters_where_they_differ() -> None:
    for where, whole in (
        (lambda p: p.dim() >= 2, ("others",)),
        (lambda p: p.dim() == 4, ("others",)),
        (lambda p: p.numel() > 10**4, ()),
        (lambda p: min(p.shape) >= 8, ("others",)),
    ):
        assert whole_of(decayed(where)) == whole


@pytest.mark.parametrize("kind", ["muon and adamw", "two fused"])
@on_ranks(2)
def test_two_optimizers_are_scheduled_and_skipped_as_one(kind: str) -> None:
    with parallel(kind, {"shard": 2}) as model:
        schedule = torch.optim.lr_scheduler.LambdaLR(model.optimizer, lambda step: 1 / (1 + step))
        inputs, targets, late, rare = (part[model.rows] for part in chosen_data(0).values())
        for _ in range(2):
            model.train_step(inputs, targets, late=late, rare=rare)
            schedule.step()
        rates = [group["lr"] for group in model.optimizer.param_groups]
        assert rates == pytest.approx([0.05 / 3, 0.02 / 3])
        before = dict(model.full_parameters())
        model.train_step(inputs * torch.nan, targets, late=late, rare=rare)
        assert all(torch.equal(before[name], one) for name, one in model.full_parameters())
        assert int(model.skipped_steps) == 1
        whole = [flat.whole for flat in model.engine.flats if flat.whole is not None]
        assert sum(len(one.shards) for one in whole) == (2 if kind in WHOLE else 0)  # of four


@on_ranks(2)
def test_a_schedule_beside_another_one_is_refused_and_a_loaded_rate_is_not(tmp_path: Path) -> None:
    """Each step sets the rate anew, and would never see the other one."""
    model = built(shard=2, lr_schedule=lambda step: 1 / (1 + step))
    steps(model, 0)
    model.save(tmp_path / "one")
    steps(model, 1)
    model.load(tmp_path / "one")
    steps(model, 1)
    torch.optim.lr_scheduler.StepLR(model.optimizer, 1, gamma=0.1).step()
    refuses(
        "ValueError: lr_schedule: has set the learning rate to 0.05, and a sch",
        lambda: steps(model, 2),
    )
    model.optimizer.load_state_dict(model.optimizer.state_dict())
    steps(model, 2)
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(RATE / 3)


@on_ranks(2)
def test_groups_may_follow_attributes_of_parameters() -> None:
    layers: Any = seeded([linear] * 4)
    for layer in layers:
        layer.bias.still = True
    with built(
        layers,
        pp=2,
        group_of=lambda _, parameter: "still" if hasattr(parameter, "still") else "others",
        optimizer=lambda groups: torch.optim.SGD(
            [{"params": groups["still"], "lr": 0.0}, {"params": groups["others"]}], lr=0.1
        ),
    ) as model:
        before = {name: one.clone() for name, one in model.full_parameters()}
        steps(model, 0)
        for name, one in model.full_parameters():
            assert torch.equal(one, before[name]) == name.endswith("bias"), name


CPU = torch.device("cpu")
CLIPPED_STEPS, LIMIT = 3, 0.1
TIED = ((0, "weight"), (3, "weight"))
CLIPPED: list[dict[str, Any]] = [
    {"pp": 2, "shard": 2},
    {"shard": 2, "replicate": 2, "replicate_zero": 1},
    {"pp": 2, "replicate": 2, "chunks": 2},
]


def layers_of() -> list[nn.Module]:
    """Four layers; the first and the last share their weight."""
    layers = seeded([linear] * 4)
    layers[3].weight = layers[0].weight
    return layers


def two_groups(groups: Any) -> torch.optim.Optimizer:
    """Momentum, with weight decay for one group."""
    decays = {"wide": 0.1, "narrow": 0.0}
    chosen = [{"params": groups[name], "weight_decay": decay} for name, decay in decays.items()]
    return torch.optim.SGD(chosen, lr=0.5, momentum=0.9)


def width_of(name: Any, parameter: Tensor) -> str:
    """The optimizer group of a parameter."""
    return "wide" if parameter.dim() == 2 else "narrow"


class Listing(torch.optim.SGD):
    """Keeps its parameters, and how many steps it has made, in lists."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.own, self.made = [*parameters], [0]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        self.made[0] += 1


@on_ranks(1)
def test_what_no_checkpoint_has_of_an_optimizer_is_told_in_the_first_step() -> None:
    with built(optimizer=lambda groups: Listing(groups["all"])) as model:
        with pytest.warns(
            UserWarning, match="Listing changes what it keeps in its attribute"
        ) as said:
            step(model)
        assert [str(one.message).split("'")[1] for one in said] == ["made"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model)


@cache
def clipped_alone(
    grouped: bool, norm_type: float = 2.0
) -> tuple[list[float], dict[str, Tensor], float]:
    """The gradient's norms before clipping, the parameters after training, and the largest element
    of the last gradient, in one process."""
    model = nn.Sequential(*layers_of())
    groups: dict[str, list[nn.Parameter]] = {"wide": [], "narrow": []}
    for parameter in model.parameters():
        groups[width_of("", parameter)].append(parameter)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, norms = two_groups(groups) if grouped else plain, []
    for number in range(CLIPPED_STEPS):
        inputs, targets = data(number)
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT, norm_type)))
        optimizer.step()
    parameters = {
        name: one.detach() for name, one in model.named_parameters(remove_duplicate=False)
    }
    largest = max(float(one.grad.abs().max()) for one in model.parameters() if one.grad is not None)
    return norms, parameters, largest


@pytest.mark.parametrize("degrees", CLIPPED, ids=str)
@on_ranks(ranks_of)
def test_any_optimizer_is_clipped_as_in_one_process(degrees: dict[str, Any]) -> None:
    norms, parameters, _ = clipped_alone(True)
    assert min(norms) > 2 * LIMIT
    groups: dict[str, Any] = {"group_of": width_of, "optimizer": two_groups}
    with built(layers_of(), tied=TIED, clip_norm=LIMIT, **groups, **degrees) as model:
        parts = ([part[model.rows] for part in data(number)] for number in range(CLIPPED_STEPS))
        found = [float(model.train_step(x, y).grad_norm) for x, y in parts]
        assert found == pytest.approx(norms, rel=1e-9)
        assert apart(dict(model.full_parameters()), parameters) < 1e-6


@on_ranks(2)
def test_a_checkpoint_calls_no_hooks(tmp_path: Path) -> None:
    """In a model that is saved before its first update, and in one that is loaded, of an optimizer
    that consists of two."""
    norms: list[list[float]] = [[], []]
    for number, found in enumerate(norms):
        with built(
            layers_of(), tied=TIED, shard=2, group_of=width_of,
            optimizer=lambda groups: [torch.optim.Adam(part) for part in groups.values()],
        ) as model:  # fmt: skip

            def clip(*_: object, model: Any = model, found: list[float] = found) -> None:
                found.append(float(model.clip_grad_norm_(LIMIT)))

            model.optimizer.register_step_pre_hook(clip)
            place = tmp_path / "checkpoint"
            model.load(place) if number else model.save(place)
            step(model)
    assert len(norms[0]) == 1
    assert norms[0] == norms[1]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@on_ranks(4)
def test_a_hook_clips_by_the_norm_of_the_whole_gradient(norm_type: float) -> None:
    norms, _, largest = clipped_alone(False, norm_type)
    with built(layers_of(), tied=TIED, pp=2, replicate=2) as model:
        found: list[float] = []

        def clip(*_: object) -> None:
            found.append(float(model.clip_grad_norm_(LIMIT, norm_type)))

        model.optimizer.register_step_pre_hook(clip)
        for number in range(CLIPPED_STEPS):
            step(model, number)
        assert found == pytest.approx(norms, rel=1e-9)
        own = [float(gradient.abs().max()) for _, gradient in model.gradients()]
        assert max(gathered(max(own))) == pytest.approx(largest, rel=1e-9)
        held = sum(gathered(sum(part.numel() for part in model.parameters())))
        assert held == 2 * sum(part.numel() for part in nn.Sequential(*layers_of()).parameters())
        refuses(
            "RuntimeError: clip_grad_norm_: no update is under way",
            lambda: model.clip_grad_norm_(LIMIT),
        )


def test_a_norm_to_clip_to_is_that_of_the_configuration_unless_it_is_given() -> None:
    given: Any = {"sample": torch.zeros(1), "global_batch": 1}
    own: Any = lambda groups: torch.optim.SGD(groups["all"])  # noqa: E731
    for limit, norm in ((0.0, 0.5), (1.0, 1.0)):
        config = zeropp.OptimizerConfig("sgd", clip_norm=0.5)
        assert Settings(optimizer=config, clip_norm=limit, **given).clipped_to == norm
    assert Settings(optimizer=own, **given).clipped_to == 0.0


GRADIENTS = {
    "large": [3.0, 4.0],
    "small": [0.1, 0.0],
    "as_large_as_allowed": [1.0, 0.0],
    "zero": [0.0, 0.0],
    "infinite": [math.inf, 1.0],
    "not_a_number": [math.nan, 1.0],
}


@pytest.mark.parametrize("limit", [1e-8, 1.0, math.inf])
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_scaled_as_torch_does_it_at_any_norm(
    gradient: list[float], limit: float
) -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    mine = parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_([parameter], limit)
    torch.testing.assert_close(
        mine.mul_(clip_factor(norm, limit)), parameter.grad, rtol=0, atol=0, equal_nan=True
    )


def test_the_gate_s_reference_takes_norms_and_clipping_from_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that it finds what all contenders share."""
    spec = spec_from_mapping(mapping() | {"num_gpus": 1, "contender": {"name": "fsdp"}})
    for shared in (clip_factor, norm_power):
        monkeypatch.setattr(shared, "__code__", (lambda *_: torch.tensor(7.0)).__code__)
    alone = OneProcess(spec, open_batches(spec), CPU, ROUNDED["fp32"])
    course = alone.train(OptimizerConfig("sgd", lr=1.0, clip_norm=LIMIT), 1)
    moved = torch.cat([update.flatten() for update in course.updates[0].values()]).norm()
    assert float(moved) == pytest.approx(LIMIT, rel=1e-4)
    assert course.grad_norms[0] not in (7.0**0.5, pytest.approx(LIMIT))


def test_the_norm_of_20_million_numbers_is_right_on_a_cpu() -> None:
    """Where torch's own is off by 1e-3: of a flat gradient, and of one process's weights."""
    flat = torch.randn(20_000_000, generator=torch.Generator().manual_seed(0))
    right = float(flat.double().square().sum())
    for numbers in (flat, flat.view(1000, -1), flat.view(-1, 1000).t()):
        assert float(norm_power([(numbers, 1)], CPU)) == pytest.approx(right, rel=1e-6)
    values = mapping() | {"global_batch": 1, "num_gpus": 1, "contender": {"name": "fsdp"}}
    values["model"] |= {"layers": 1, "hidden": 512, "vocab": 40_000, "seq": 8, "ffn": 512}
    spec = spec_from_mapping(values)
    alone = OneProcess(spec, open_batches(spec), CPU, ROUNDED["fp32"])
    weights = [p.detach() for p in build_model(spec.model, spec.seed, CPU).parameters()]
    right = sum(float(weight.double().square().sum()) for weight in weights) ** 0.5
    assert alone.first_gradient()[2] == pytest.approx(right, rel=1e-6)


def by_hand(gradients: list[Tensor]) -> None:
    """Clips by a norm without torch's functions."""
    norm = sum(float(one.square().sum()) for one in gradients) ** 0.5
    torch._foreach_mul_(gradients, min(1.0, 1.0 / norm))


def centred(gradients: list[Tensor]) -> None:
    """Takes the mean of each."""
    for one in gradients:
        one.sub_(one.view(-1).mean())


def by_element(gradients: list[Tensor]) -> None:
    """Does to every number what does not depend on others."""
    for one in gradients:
        one.view(-1)[1:].clamp_(-1e4, 1e4)  # in pieces, for less memory
        one.nan_to_num_().clamp_(-1e3, 1e3).mul_(0.5).add_(one.sign(), alpha=1e-3)


NORMS: dict[str, Any] = {  # each was imported before
    "torch": lambda gradients: clip_grad_norm_(gradients, 1.0),
    "foreach": torch._foreach_norm,
    "hand": by_hand,
    "mean": centred,
}


REGISTERED: dict[str, Any] = {
    "before": lambda model, hook: model.optimizer.register_step_pre_hook(hook),
    "after": lambda model, hook: model.optimizer.register_step_post_hook(hook),
    "before all": lambda model, hook: register_optimizer_step_pre_hook(hook),
    "after all": lambda model, hook: register_optimizer_step_post_hook(hook),
}


@on_ranks(1)
def test_one_process_clips_by_hand() -> None:
    model = built()
    model.optimizer.register_step_pre_hook(
        lambda optimizer, *_: by_hand([one.grad for one in optimizer.param_groups[0]["params"]])
    )
    right = built(clip_norm=1.0)
    assert steps(model, 0, 1, 2) == pytest.approx(steps(right, 0, 1, 2), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "when"),
    [*((kind, "before") for kind in NORMS), *(("mean", when) for when in REGISTERED)],
)
@on_ranks(2)
def test_a_hook_that_takes_a_number_of_this_rank_alone_is_refused(kind: str, when: str) -> None:
    model = built(shard=2)

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        (group,) = optimizer.param_groups
        own: list[Any] = group["params"]
        NORMS[kind](own if kind == "torch" else [one.grad for one in own])

    registered = REGISTERED[when](model, hook)
    refuses("RuntimeError: optimizer: it, or a hook of it, takes a norm", lambda: step(model))
    registered.remove()
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    assert float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0)) > 1  # outside as ever


def limiting(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A hook that changes every number of a gradient by itself."""
    own = [one for group in optimizer.param_groups for one in group["params"]]
    by_element([one.grad for one in own if one.grad is not None])
    nn.utils.clip_grad_value_(own, 0.5)


def limited(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with this hook."""
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    optimizer.register_step_pre_hook(limiting)
    return optimizer


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"shard": 2}], ids=str)
@on_ranks(2)
def test_a_hook_changes_every_number_by_itself(degrees: dict[str, Any]) -> None:
    alone, _ = trained_alone(seeded([linear] * 4), [data()], limited)
    with built(**degrees) as model:
        model.optimizer.register_step_pre_hook(limiting)
        step(model)
        assert apart(dict(model.full_parameters()), dict(alone.named_parameters())) < 1e-6
