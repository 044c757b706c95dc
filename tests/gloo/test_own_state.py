"""State that looks like a tensor, a dict or an optimizer, and is less or more: parts of tensors,
optimizers that look their state up, that keep something beside it, or that are several."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gloo.layers import WIDTH, One, linear
from tests.gloo.models import apart, built, data, error_of, seeded, steps, trained_alone
from tests.gloo.world import World, on_ranks
from zeropp.engine.checkpoint import HeldPart

Groups = Mapping[str, list[nn.Parameter]]


def own(kind: Callable[..., Any], **settings: Any) -> Callable[[Groups], Any]:
    """An optimizer of all parameters."""
    return lambda groups: kind(groups["all"], **settings)


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda part: part.sum(),
    "a moving average": lambda part: torch.zeros(part.shape, dtype=part.dtype).lerp_(part, 0.1),
    "a plain layer": lambda part: linear().double().load_state_dict({"weight": part}, strict=False),
    "torch.save": lambda part: torch.save({"weight": part}, io.BytesIO()),
    "safetensors": lambda part: safetensors.torch.save({"weight": part}),
    "numpy": lambda part: part.numpy(),
    "the list of its rows": lambda part: part.tolist(),
    "a write": lambda part: part.copy_(torch.zeros(part.shape)),
    "a broadcast": lambda part: dist.broadcast(part, 0),
    "a storage": lambda part: part.untyped_storage(),
    "a row": lambda part: part[0],
}


@on_ranks(2)
def test_a_part_of_a_tensor_is_copied_and_moved_but_never_read() -> None:
    with built(shard=2) as model:
        part = next(one for one in model.state_dict().values() if one.dim() == 2)
        assert isinstance(part, HeldPart)
        assert (part.shape, part.dtype) == ((WIDTH, WIDTH), torch.float64)
        for name, read in READS.items():
            said = error_of(partial(read, part))
            assert "model.full_state_dict()" in said, (name, said)
        kept = copy.deepcopy(model.state_dict())
        cloned = {
            name: value.cpu().clone().float() if isinstance(value, HeldPart) else value
            for name, value in model.state_dict().items()
        }
        before = dict(model.full_parameters())
        for saved, within in ((kept, 0.0), (cloned, 1e-6)):
            steps(model, 0)
            model.load_state_dict(saved)
            assert apart(dict(model.full_parameters()), before) <= within


@on_ranks(1)
def test_one_rank_has_whole_tensors(tmp_path: Path) -> None:
    with built() as model:
        steps(model, 0)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        read = torch.load(tmp_path / "model.pt")
        plain = nn.ModuleList(seeded([linear] * 4))
        plain.load_state_dict({name: read[name] for name in plain.state_dict()})
        assert apart(model.full_state_dict(), plain.state_dict()) < 1e-6
        steps(model, 1)
        model.load_state_dict(read)
        assert apart(model.full_state_dict(), plain.state_dict()) < 1e-6


class Block(One):
    """Has no length, as no module has but lists."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


@on_ranks(2)
def test_a_compiled_layer_is_a_layer() -> None:
    def compiled() -> Any:
        return torch.compile(Block(), backend="eager")

    trained: list[list[float]] = []
    for kinds in ([linear, Block, linear], [linear, compiled, linear]):
        layers = seeded(kinds)
        with built(layers, pp=2, microbatch_size=2) as model:
            trained.append(steps(model, 0, 1))
    assert trained[0] == trained[1]


class Look(torch.optim.SGD):
    """Looks its state up when it is made, which leaves empty entries, as schedule-free's do."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        for group in self.param_groups:
            assert not any(self.state[parameter] for parameter in group["params"])


class Fading(torch.optim.SGD):
    """A rate that falls with a count that is kept, as ``count`` says."""

    count: str

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        state: dict[Any, Any] = self.state
        for group in self.param_groups:
            if self.count == "group":
                group["done"] = done = group.get("done", 0) + 1
            elif self.count == "state":
                state["done"] = done = state.get("done", 0) + 1
            elif self.count == "tensor":
                state["done"] = state.get("done", torch.zeros(1)) + 1
                done = int(state["done"])
            else:
                self.done = done = getattr(self, "done", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(done)
        super().step(closure)


class ByGroup(Fading):
    """In its group, from its first step on."""

    count = "group"


class ByState(Fading):
    """In its state, under a name, as SPAM does."""

    count = "state"


class ByTensor(Fading):
    """In its state, as a tensor under a name, as MADGRAD does."""

    count = "tensor"


class ByAttribute(Fading):
    """In an attribute alone, which a plain loop loses."""

    count = "own"


class ByStateDict(Fading):
    """In a state dict of its own, as StableSPAM does."""

    count = "own"

    def state_dict(self) -> dict[str, Any]:
        """With the count."""
        return {**super().state_dict(), "done": getattr(self, "done", 0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """With the count."""
        self.done = state_dict["done"]
        super().load_state_dict(state_dict)


RESUMED = {
    kind.__name__: own(kind, lr=0.1, momentum=0.9, dampening=0.5)
    for kind in (Look, ByGroup, ByState, ByTensor, ByStateDict, ByAttribute)
}


def resumed(kind: str, place: Path, degrees: dict[str, Any], first: int) -> dict[str, Tensor]:
    with built(optimizer=RESUMED[kind], elementwise=bool(degrees), **degrees) as model:
        if first:
            model.load(place)
        steps(model, *range(first, first + 2))
        model.save(place)
        return model.full_state_dict()


@pytest.mark.parametrize("kind", RESUMED)
def test_an_optimizer_goes_on_with_all_that_it_keeps(
    kind: str, world: World, tmp_path: Path
) -> None:
    world.run(resumed, kind, tmp_path / "saved", {"shard": 2}, 0, size=2)
    found, *_ = world.run(resumed, kind, tmp_path / "saved", {}, 2, size=1)
    optimizer: Any = lambda p: RESUMED[kind]({"all": p})  # noqa: E731
    alone = trained_alone(seeded([linear] * 4), map(data, range(4)), optimizer)
    assert apart(found, alone.state_dict()) < 1e-6


@on_ranks(1)
def test_a_save_or_a_load_before_the_first_step_changes_no_optimizer(tmp_path: Path) -> None:
    for kind in RESUMED:
        losses = []
        for saves in (False, True):
            with built(optimizer=RESUMED[kind]) as model:
                if saves:
                    torch.manual_seed(1)
                    drawn = torch.rand(1)
                    torch.manual_seed(1)
                    model.save(tmp_path / kind)
                    model.load(tmp_path / kind)
                    model.load_state_dict(model.state_dict())
                    assert torch.equal(drawn, torch.rand(1))
                losses.append(steps(model, 0, 1, 2))
        assert losses[0] == losses[1], kind


@on_ranks(1)
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    kinds = {
        "adamw": own(torch.optim.AdamW, lr=0.1),
        "sgd": own(torch.optim.SGD, lr=0.1),
        "momentum": own(torch.optim.SGD, lr=0.1, momentum=0.9),
    }
    for saved, make in kinds.items():
        with built(optimizer=make) as model:
            steps(model, 0)
            model.save(tmp_path / saved)
    for name, make in kinds.items():
        for saved in {*kinds} - {name}:
            with built(optimizer=make) as model:
                said = error_of(partial(model.load, tmp_path / saved))
                assert "so that it is of another optimizer (weights_only=True" in said, said
                assert model.optimizer.param_groups[0]["lr"] == 0.1
                model.load(tmp_path / saved, weights_only=True)


def two(groups: Groups) -> list[torch.optim.Optimizer]:
    """Both have settings and state."""
    return [torch.optim.Muon(groups["matrices"], lr=0.1), torch.optim.AdamW(groups["others"])]


def two_of_them() -> Any:
    return built(
        group_of=lambda _, parameter: "matrices" if parameter.dim() == 2 else "others",
        optimizer=two,
    )


@on_ranks(1)
def test_several_optimizers_share_what_the_one_shows() -> None:
    with two_of_them() as model:
        steps(model, 0)
        optimizer: Any = model.optimizer
        saved = copy.deepcopy(optimizer.state_dict())
        at = model.full_state_dict()
        right = steps(model, 1, 2)
        model.load_state_dict({name: at.get(name, one) for name, one in model.state_dict().items()})
        optimizer.load_state_dict(saved)
        optimizer.parts[0].load_state_dict(saved["parts"][0])  # as whoever kept it may
        assert steps(model, 1, 2) == pytest.approx(right, rel=1e-6)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        assert len(set(steps(model, 3, 3))) == 1
        for change in (
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
            lambda: setattr(optimizer, "param_groups", []),
            lambda: setattr(optimizer, "state", {}),
            lambda: optimizer.state.clear(),
        ):
            assert error_of(change).startswith("AttributeError: ")


class Averaging(torch.optim.SGD):
    """Has the mean of its values in evaluations, as schedule-free's have theirs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.done = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        super().step(closure)
        self.done += 1
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            mean.lerp_(parameter, 1 / self.done)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the two."""
        for parameter in self.param_groups[0]["params"]:
            kept = parameter.clone()
            parameter.copy_(self.state[parameter]["mean"])
            self.state[parameter]["mean"] = kept


def swapping(degrees: dict[str, Any]) -> list[float]:
    layers = seeded([linear] * 4)
    with built(layers, optimizer=own(Averaging), elementwise=True, **degrees) as model:
        losses = steps(model, 0, 1)
        optimizer: Any = model.optimizer
        for number in (2, 3):
            optimizer.swap()
            losses.append(model.eval_step(*(part[model.rows] for part in data(9))))
            if number == 2:
                optimizer.swap()
            losses += steps(model, number)
    return losses


def clamping(degrees: dict[str, Any]) -> list[float]:
    """Losses of a loop that clamps weights after every step."""
    losses = []
    with built(seeded([linear] * 4), **degrees) as model:
        for number in range(3):
            losses += steps(model, number)
            with torch.no_grad():
                for one in model.optimizer.param_groups[0]["params"]:
                    one.clamp_(-0.1, 0.1)
    return losses


def test_what_an_optimizer_changes_between_steps_is_gathered_again(world: World) -> None:
    topologies: list[dict[str, Any]] = [{"replicate": 2, "replicate_zero": 1}, {"shard": 2}]
    for train in (swapping, clamping):
        (right,) = world.run(train, {}, size=1)
        for degrees in topologies:
            for found in world.run(train, degrees, size=2):
                assert found == pytest.approx(right, rel=1e-12)
    (narrow,) = world.run(swapping, {"precision": "bf16"}, size=1)
    for found in world.run(swapping, {**topologies[0], "precision": "bf16"}, size=2):
        assert found == pytest.approx(narrow, rel=1e-2)
