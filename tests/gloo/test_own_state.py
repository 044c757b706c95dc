"""State: what looks like a tensor, a dict or an optimizer, and is less or more; and the model as a
``Stateful`` of torch.distributed.checkpoint: what it saves, who can read it."""

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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful

from tests.gloo.layers import ROWS, WIDTH, One, linear
from tests.gloo.models import (
    adamw,
    apart,
    built,
    check_state,
    data,
    error_of,
    grouped,
    ranks_of,
    refuses,
    seeded,
    stateful,
    steps,
    trained_alone,
    trained_part,
)
from tests.gloo.world import World, on_ranks
from zeropp.engine.checkpoint import HeldPart
from zeropp.train.parallel_model import ParallelModel

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
        with built(seeded(kinds), pp=2, microbatch_size=2) as model:
            trained.append(steps(model, 0, 1))
    assert trained[0] == trained[1]


class Look(torch.optim.SGD):
    """Looks its state up when it is made, which leaves empty entries, as schedule-free's do."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        for group in self.param_groups:
            assert not any(self.state[parameter] for parameter in group["params"])


class Fading(torch.optim.SGD):
    """A rate that falls with a count that is kept: in its group, from its first step on; in its
    state under a name, as SPAM does; there as a tensor, as MADGRAD does; or in an attribute alone,
    which a plain loop loses."""

    def __init__(self, parameters: Any, count: str = "attribute") -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9, dampening=0.5)
        self.count = count

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


class StateDict(Fading):
    """In a state dict of its own, as StableSPAM does."""

    def state_dict(self) -> dict[str, Any]:
        """With the count."""
        return {**super().state_dict(), "done": getattr(self, "done", 0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """With the count."""
        self.done = state_dict["done"]
        super().load_state_dict(state_dict)


RESUMED = {
    "looked up": own(Look, lr=0.1, momentum=0.9, dampening=0.5),
    "state dict": own(StateDict),
    **{kind: own(Fading, count=kind) for kind in ("group", "state", "tensor", "attribute")},
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
    alone, _ = trained_alone(seeded([linear] * 4), map(data, range(4)), optimizer)
    assert apart(found, alone.state_dict()) < 1e-6


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
                assert "or of another optimizer (weights_only=True" in said, said
                assert model.optimizer.param_groups[0]["lr"] == 0.1
                model.load(tmp_path / saved, weights_only=True)


class Never:
    """Is not copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Never:
        raise AssertionError

    def after(self, *_: Any) -> None:
        """A hook of an optimizer."""


@on_ranks(1)
def test_what_the_hooks_of_an_optimizer_are_bound_to_is_not_copied() -> None:
    with built(optimizer=own(torch.optim.AdamW, lr=0.1)) as model:
        model.optimizer.register_step_post_hook(Never().after)
        assert model.state_dict()


@on_ranks(1)
def test_several_optimizers_share_what_the_one_shows() -> None:
    """Both have settings and state."""
    with built(
        group_of=lambda _, parameter: "matrices" if parameter.dim() == 2 else "others",
        optimizer=lambda groups: [
            torch.optim.Muon(groups["matrices"], lr=0.1),
            torch.optim.AdamW(groups["others"]),
        ],
    ) as model:
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


TOPOLOGIES: list[dict[str, Any]] = [
    {"pp": 2, "shard": 2, "chunks": 2},
    {"shard": 3},
    {"pp": 2, "replicate": 2, "replicate_zero": 1},
    {},
]


def alone(count: int) -> dict[str, Any]:
    """The state of the layers after some steps in one process."""
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    return trained_alone(stateful(), map(data, range(count)), optimizer)[0].state_dict()


def parallel(**degrees: Any) -> ParallelModel:
    return built(stateful(), optimizer=adamw, **degrees)


def go_on(degrees: dict[str, Any], start: Path | None, target: Path, count: int) -> dict[str, Any]:
    """Load through torch, train, save through torch; gives the state dict on rank 0."""
    with parallel(**degrees) as model:
        assert isinstance(model, Stateful)
        first = 0
        if start is not None:
            counter = {"steps": torch.zeros((), dtype=torch.long)}
            load({"model": model, "loop": counter}, checkpoint_id=str(start))
            first = int(counter["steps"])
            assert model.engine.steps_done == first
        steps(model, *range(first, first + count))
        counter = {"steps": torch.tensor(first + count)}
        save({"model": model, "loop": counter}, checkpoint_id=str(target))
        return model.full_state_dict()


def test_training_goes_on_in_other_topologies_and_one_process_reads_it(
    world: World, tmp_path: Path
) -> None:
    start = None
    for number, degrees in enumerate(TOPOLOGIES):
        target = tmp_path / str(number)
        whole, *others = world.run(go_on, degrees, start, target, 2, size=ranks_of(degrees))
        assert not any(others)
        expected = trained_part(alone(2 * (number + 1)))
        check_state(trained_part(whole), expected, 1e-6)  # parameters come as fp32
        read = {"model": nn.ModuleList(stateful()).state_dict()}
        load(read, checkpoint_id=str(target), no_dist=True)
        check_state(trained_part(read["model"]), expected, 1e-12)
        start = target


@on_ranks(4)
def test_an_asynchronous_save_has_the_state_of_its_beginning(tmp_path: Path) -> None:
    with parallel(pp=2, shard=2) as model, parallel(shard=4) as other:
        steps(model, 0, 1)
        before = model.full_state_dict()
        saving: Any = async_save({"model": model}, checkpoint_id=str(tmp_path / "saved"))
        steps(model, 2, 3)
        saving.result()
        load({"model": other}, checkpoint_id=str(tmp_path / "saved"))
        found = other.full_state_dict()
        assert bool(before) == bool(found) == (dist.get_rank() == 0)
        if before:
            check_state(trained_part(found), trained_part(before), 0.0)


@on_ranks(4)
def test_whole_tensors_load_by_name() -> None:
    trained = alone(3)
    with parallel(pp=2, shard=2) as model:
        model.load_state_dict(trained)
        found = model.full_state_dict()
        if dist.get_rank() == 0:
            check_state(found, trained, 1e-6)
        missing = {name: value for name, value in trained.items() if name != "4.bias"}
        for given, words in (
            (missing, "4.bias: is missing"),
            ({**trained, "5.weight": torch.zeros(1)}, "5.weight: the model has nothing of that"),
            (
                {**trained, "0.weight": torch.zeros(WIDTH, WIDTH + 1)},
                "0.weight: has shape (8, 9), the model",
            ),
            ({**trained, "1.seen": torch.zeros(1)}, "1.seen: has shape (1,), the model ()"),
        ):
            others = {name: value + 1 if value.dim() else value for name, value in given.items()}
            refuses(
                f"ValueError: load_state_dict: {words}",
                partial(model.load_state_dict, {**others, "steps_done": 99}),
            )
        after = model.full_state_dict()
        assert all(torch.equal(after[name], value) for name, value in found.items())
        assert model.engine.steps_done == 0


@on_ranks(2)
def test_a_model_with_other_groups_keeps_its_own_settings(tmp_path: Path) -> None:
    with grouped({"pp": 2}) as model:
        steps(model, 0, 1)
        model.save(tmp_path / "checkpoint")
        before = model.full_state_dict()
    rate = lambda groups: torch.optim.AdamW(groups["all"], lr=0.5)  # noqa: E731
    with built(stateful(), shard=2, optimizer=rate) as model:
        model.load(tmp_path / "checkpoint")
        after = model.full_state_dict()
        assert [group["lr"] for group in model.optimizer.param_groups] == [0.5]
        assert {float(kept["step"]) for kept in model.optimizer.state.values()} == {2.0}
    assert set(after) == set(before)
    assert all(torch.equal(before[name], after[name]) for name in before)


def anneal(
    degrees: dict[str, Any], start: dict[str, Any] | None, place: Path, first: int, last: int
) -> tuple[list[list[float]], dict[str, Any], dict[str, Tensor]]:
    """Train some steps with a scheduler, from a checkpoint on and into one. ``save`` writes those
    after an even number of steps and reads the others, torch writes and reads the rest."""
    with grouped(degrees) as model:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(model.optimizer, T_max=8)
        if start is not None:
            if first % 2:
                model.load(place / str(first))
            else:
                load({"model": model}, checkpoint_id=str(place / str(first)))
            scheduler.load_state_dict(start)
        rates = []
        for step in range(first, last):
            steps(model, step)
            scheduler.step()
            rates.append([group["lr"] for group in model.optimizer.param_groups])
        if last % 2:
            save({"model": model}, checkpoint_id=str(place / str(last)))
        else:
            model.save(place / str(last))
        return rates, scheduler.state_dict(), model.full_state_dict()


def test_a_scheduler_goes_on_and_both_kinds_of_checkpoint_are_one(
    world: World, tmp_path: Path
) -> None:
    ((expected, _, whole),) = world.run(anneal, {}, None, tmp_path, 0, 6, size=1)
    stretches: list[tuple[dict[str, Any], int, int]] = [
        ({"pp": 2}, 0, 2), ({"shard": 2}, 2, 5), ({"pp": 2, "chunks": 2}, 5, 6)
    ]  # fmt: skip
    scheduler = None
    for degrees, first, last in stretches:
        results = world.run(anneal, degrees, scheduler, tmp_path, first, last, size=2)
        for rates, _, _ in results:
            assert len(rates) == last - first
            for found, rate in zip(rates, expected[first:last], strict=True):
                assert found == pytest.approx(rate, rel=1e-12)
        _, scheduler, state = results[0]
    check_state(trained_part(state), trained_part(whole), 1e-6)


UNBEGUN: dict[str, Callable[..., Any]] = {
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "looked up": partial(Look, momentum=0.9),
    "state dict": StateDict,
    **{kind: partial(Fading, count=kind) for kind in ("group", "state", "tensor", "attribute")},
}


@pytest.mark.parametrize("kind", UNBEGUN)
@on_ranks(2)
def test_a_checkpoint_before_the_first_step_leaves_the_optimizer_unbegun(
    kind: str, tmp_path: Path
) -> None:
    """Parameters after two steps: without a checkpoint, after saving one before the first step and
    reading it, in a new model that has read that, and in one that took over trained weights' step,
    but no state of the optimizer."""
    found = []
    for how in ("no checkpoint", "save", "load", "weights"):
        with grouped({"pp": 2}, UNBEGUN[kind]) as model:
            before = torch.get_rng_state()
            if how == "save":
                model.save(tmp_path / "checkpoint")
            if how in ("save", "load"):
                model.load(tmp_path / "checkpoint")
                model.load_state_dict(model.state_dict())
            elif how == "weights":
                weights = nn.ModuleList(stateful()).state_dict()
                model.load_state_dict({**weights, "steps_done": torch.tensor(7)})
                assert model.engine.steps_done == 7
            assert how == "weights" or torch.equal(before, torch.get_rng_state())
            steps(model, 0, 1)
            found.append(model.full_state_dict())  # empty on rank 1
    for other in found[1:] if dist.get_rank() == 0 else ():
        check_state(trained_part(other), trained_part(found[0]), 0.0)


@on_ranks(2)
def test_frozen_parameters_and_buffers_are_saved_and_loaded(tmp_path: Path) -> None:
    """By the engine's own files, after changes."""
    with parallel(pp=2, chunks=2) as model:
        steps(model, 0)
        model.save(tmp_path / "checkpoint")
        before = model.full_state_dict()
        with torch.no_grad():
            for flat in model.engine.flats:
                flat.master.zero_()
            for buffer in model.engine.buffers().values():
                buffer.fill_(99)
        model.load(tmp_path / "checkpoint")
        after = model.full_state_dict()
    assert list(before) == list(after)
    if dist.get_rank() == 0:
        assert float(before["3.seen"]) == ROWS
        assert len(before) == len(stateful()) * 2 + 2
        assert apart(after, before) == 0.0


@on_ranks(2)
def test_weights_alone_are_loaded(tmp_path: Path) -> None:
    place, plain = tmp_path / "checkpoint", tmp_path / "plain"
    if dist.get_rank() == 0:
        state = nn.ModuleList(stateful()).state_dict()
        save({"model": state}, checkpoint_id=str(plain), no_dist=True)
    with grouped({"pp": 2}) as model:
        start = dict(model.full_parameters())
        steps(model, 0, 1)
        model.save(place)
        before = dict(model.full_parameters())
    with grouped({"pp": 2, "chunks": 2}) as model:
        model.load(place, weights_only=True)
        after = {name: one for name, one in model.full_parameters() if name in before}
        assert apart(after, before) == 0.0
        assert model.engine.steps_done == len(model.optimizer.state) == 0
        model.load(plain, weights_only=True)
        again = dict(model.full_parameters())
        assert all(torch.equal(again[name], start[name]) for name in after)
    with built(seeded([linear] * 4), optimizer=own(torch.optim.SGD, lr=0.1), shard=2) as model:
        if dist.get_rank() == 0:
            state = nn.ModuleList(seeded([linear] * 4)).state_dict()
            save({"model": state}, checkpoint_id=str(tmp_path / "bare"), no_dist=True)
        assert "has no steps_done (weights_only=True" in error_of(
            partial(model.load, tmp_path / "bare")
        )


@on_ranks(4)
def test_parts_that_are_cut_as_on_other_ranks_are_refused() -> None:
    layers: Any = [partial(nn.Linear, WIDTH, 8 * WIDTH, bias=False)]
    with built(seeded(layers), shard=4) as other:
        state = copy.deepcopy(other.state_dict())
    with built(seeded(layers), shard=2, replicate=2) as model:
        said = error_of(lambda: model.load_state_dict(state))
        assert "is cut as on another rank" in said, said
