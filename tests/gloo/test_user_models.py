"""Layers and optimizers that a user of PyTorch may hand in, and the batches of a step: the model's
loader, the size of microbatches, rows of one pipeline that differ, and losses that are not what
``loss_reduction`` says over the rows of a microbatch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

import zeropp
from tests.gloo.layers import (
    ROWS,
    WIDTH,
    Calling,
    Conjugates,
    GivesComplex,
    GivesParameter,
    Kind,
    Saving,
    TakesComplex,
    TakesTwo,
    TwoTypes,
    linear,
)
from tests.gloo.models import (
    MICROBATCH,
    MODELS,
    REFUSED,
    STEPS,
    alone,
    apart,
    beside_cuts,
    built,
    data,
    error_of,
    kinds_of,
    loss_function,
    ranks_of,
    refuses,
    seeded,
    step,
    steps,
    trained_alone,
)
from tests.gloo.world import World, on_ranks
from zeropp.engine.ranks.given_rows import checksum
from zeropp.train.parallel_model import ParallelModel

DEGREES: list[dict[str, Any]] = [
    {"pp": 3, "chunks": 3},
    {"pp": 2, "chunks": 4, "split_backward": False},
    {"pp": 2, "shard": 2, "chunks": 3, "gradient_parts": 2},
    {"pp": 2, "replicate": 2, "replicate_zero": 1, "recompute": "full"},
    {"shard": 3, "gradient_parts": 3},
    {"pp": 3, "replicate": 2},
]


def train(degrees: dict[str, Any], place: Path) -> None:
    """Train and save each model."""
    for name, what in MODELS.items():
        kinds = kinds_of(name, degrees)
        with built(
            seeded(kinds, what.scale), sample=data()[0][:MICROBATCH], weights=[1.0] * len(kinds),
            **degrees,
        ) as model:  # fmt: skip
            steps(model, *range(STEPS))
            model.save(place / name)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_unusual_layers_are_those_of_one_process(
    world: World, degrees: dict[str, Any], tmp_path: Path
) -> None:
    world.run(train, degrees, tmp_path, size=ranks_of(degrees))
    for name, what in MODELS.items():
        kinds = kinds_of(name, degrees)
        expected = alone(name, kinds)
        found = {key: torch.full_like(value, torch.nan) for key, value in expected.items()}
        load({"model": found}, checkpoint_id=str(tmp_path / name), no_dist=True)
        for key, value in expected.items():
            if value.numel():
                error = apart({key: found[key]}, expected)
                assert error < what.tolerance, (name, key, kinds[int(key.partition(".")[0])])


def test_every_layer_stands_beside_a_cut() -> None:
    pairs = {
        pair
        for name in MODELS
        for degrees in DEGREES
        for pair in beside_cuts(kinds_of(name, degrees), degrees)
    }
    unusual = {kind for model in MODELS.values() for kind in model.kinds}
    assert unusual == {kind for pair in pairs for kind in pair}
    handed_on = [(GivesParameter, TakesTwo), (GivesComplex, Conjugates), (Conjugates, TakesComplex)]
    assert pairs.issuperset(handed_on)


def tokens() -> nn.Module:
    """Integers in, integers out: nothing before it can have a gradient."""
    return Calling(lambda tokens: (tokens + 1) % 5)


def embed() -> nn.Module:
    """An embedding behind it."""
    return nn.Embedding(5, WIDTH)


class Forgetful(nn.Module):
    """A layer whose output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(x.shape)


def in_place() -> nn.Module:
    """Changes what it is given."""
    return nn.ReLU(inplace=True)


@pytest.mark.parametrize(
    "kinds",
    [
        [tokens, tokens, embed, linear],
        [linear, linear, Forgetful, linear],
        [linear, in_place, linear, in_place],
    ],
    ids=["int", "forgets", "place"],
)
@pytest.mark.parametrize("pp", [2, 4])
@on_ranks(lambda pp: pp)
def test_boundaries_with_no_gradient_or_work_in_place(pp: int, kinds: list[Kind]) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(5, (ROWS,), generator=generator) if tokens in kinds else data()[0]
    batches = [(inputs, data()[1])] * 2
    expected, _ = trained_alone(seeded(kinds), batches, partial(torch.optim.SGD, lr=0.1))
    model = built(seeded(kinds), sample=inputs[:1], pp=pp, weights=[1.0] * len(kinds))
    for batch in batches:
        model.train_step(*batch)
    own = dict(model.full_parameters())
    assert not own or apart(own, dict(expected.named_parameters())) < 1e-6  # they come as fp32


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"shard": 2}], ids=str)
@on_ranks(2)
def test_targets_in_memory_of_inputs_stay_as_they_were(degrees: dict[str, Any]) -> None:
    """Also where the first layer changes its inputs in place."""
    losses = []
    for is_same in (True, False):
        with built(seeded([in_place, linear, linear]), **degrees) as model:
            inputs, _ = data()
            targets = inputs if is_same else inputs.clone()
            losses.append(float(model.train_step(inputs[model.rows], targets[model.rows]).loss))
    assert losses[0] == losses[1]


@on_ranks(2)
def test_two_types_and_a_rate_in_a_tensor_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    rate = lambda groups: torch.optim.AdamW(groups["all"], lr=torch.tensor(0.01), amsgrad=True)  # noqa: E731
    kinds = [linear, TwoTypes, TwoTypes, linear]
    with (
        built(seeded(kinds), shard=2, optimizer=rate) as first,
        built(seeded(kinds), shard=2, optimizer=rate) as second,
    ):
        step(first)
        first.optimizer.param_groups[0]["lr"].fill_(0.005)
        first.save(tmp_path / "saved")
        second.load(tmp_path / "saved")
        assert steps(first, 1, 2) == steps(second, 1, 2)
        rates = [float(model.optimizer.param_groups[0]["lr"]) for model in (first, second)]
        assert rates[0] == rates[1] == pytest.approx(0.005)


def refused() -> dict[str, str]:
    """What ``parallelize`` says to layers and optimizers that cannot be trained rightly, also where
    torch warns of what our own checks do."""
    group_of = lambda name, parameter: "wide" if parameter.dim() > 1 else "narrow"  # noqa: E731
    calls: dict[str, Callable[[], Any]] = {
        "loss": lambda: built(pp=2, loss_fn=nn.Linear(WIDTH, 1)),
        "group": lambda: built(
            pp=2, group_of=group_of, optimizer=lambda groups: torch.optim.SGD(groups["all"])
        ),
    }

    def call(kinds: Sequence[Kind], tokens: bool) -> Any:
        inputs = torch.arange(MICROBATCH) if tokens else data()[0][:MICROBATCH]
        return built(seeded(kinds), sample=inputs, pp=2)

    for name, (kinds, _) in REFUSED.items():
        calls[name] = partial(call, kinds, name == "max_norm")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Casting complex values")
        return {name: error_of(call) for name, call in calls.items()}


def test_layers_that_would_be_wrong_are_refused(world: World) -> None:
    first, second = world.run(refused, size=2)
    assert first == second
    for name, words in {
        **{name: words for name, (_, words) in REFUSED.items()},
        "group": "optimizer: cannot be made from the groups 'narrow' and 'wide': 'all' (as",
        "loss": "loss_fn: has the parameter 'weight', which nothing would train",
    }.items():
        said = first.pop(name)
        assert said.startswith(f"InfeasibleError: {words}"), said
        assert "\n" not in said
    assert not first


@on_ranks(2)
def test_an_empty_state_and_numbers_of_a_graph_are_no_reason() -> None:
    built(seeded([linear, Saving, linear]), sample=data()[0][:MICROBATCH], pp=2)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "rows": (
        lambda output, target: (output - target).square().mean(1),
        "TypeError: loss_fn: gives (2,), but a tensor of one number is needed",
    ),
    "a number": (
        lambda output, target: float(F.mse_loss(output, target)),
        "TypeError: loss_fn: gives float, but a tensor of one number is needed",
    ),
    "detached": (
        lambda output, target: F.mse_loss(output, target).detach(),
        "RuntimeError: train_step: the loss depends on nothing that is trained",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(1)
def test_a_loss_that_is_none_is_an_error(name: str) -> None:
    function, words = LOSSES[name]
    with built(loss_fn=function, sample=data()[0][:MICROBATCH]) as model:
        assert error_of(lambda: model.train_step(*data())).startswith(words)


LOADED, COUNT = 8, 27
PER_EPOCH = COUNT // LOADED


class Numbers(torch.utils.data.Dataset[Any]):
    """Rows that say which they are."""

    def __init__(self, count: int = COUNT) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), float(index)), torch.zeros(WIDTH)


def loading(**more: Any) -> ParallelModel:
    """Three small layers in fp32."""
    layers = [layer.float() for layer in seeded([linear] * 3)]
    given: dict[str, Any] = {"sample": torch.zeros(1, WIDTH), "microbatch_size": 2}
    given |= {"global_batch": LOADED, "optimizer": zeropp.OptimizerConfig("sgd", lr=1e-6)}
    return built(layers, **given | more)


def numbers_of(inputs: Tensor) -> list[int]:
    """Which rows these are."""
    return [int(row) for row in inputs[:, 0]]


def train_on(model: ParallelModel, steps: int) -> Iterator[list[int]]:
    """Which rows this rank trains on, from the model's loader."""
    while True:
        for inputs, targets in model.loader(Numbers(), seed=5):
            if not steps:
                return
            steps -= 1
            model.train_step(inputs, targets)
            yield numbers_of(inputs)


def in_stretches(
    stretches: list[tuple[dict[str, Any], int]], folder: Path
) -> list[tuple[int, list[int]]]:
    """(data-parallel rank, rows) of some steps with each of such keywords, which one run after
    another has."""
    rows = []
    for place, (keywords, count) in enumerate(stretches):
        with loading(**keywords) as model:
            if place:
                model.load(folder)
            rows += [(model.data_parallel_rank, part) for part in train_on(model, count)]
            model.save(folder)
    return rows


def test_an_epoch_has_every_row_once_and_goes_on_elsewhere(world: World, tmp_path: Path) -> None:
    stretches = [({"pp": 2, "replicate": 2}, 2), ({"shard": 4}, PER_EPOCH)]
    ranks = world.run(in_stretches, stretches, tmp_path / "c", size=4)
    steps = [dict(of_ranks) for of_ranks in zip(*ranks, strict=True)]
    batches = [[row for rank in sorted(step) for row in step[rank]] for step in steps]
    assert all(len(batch) == LOADED for batch in batches)
    first, second = batches[:PER_EPOCH], batches[PER_EPOCH:]
    seen = [row for batch in first for row in batch]
    assert len(set(seen)) == len(seen) == PER_EPOCH * LOADED
    assert seen != sorted(seen)
    assert len(second) == 2
    assert second != first[:2]


def test_batches_of_another_size_go_on_behind_the_rows_that_were_seen(
    world: World, tmp_path: Path
) -> None:
    def run(*sizes: int) -> list[list[int]]:
        stretches = [({"global_batch": size}, 2) for size in sizes]
        (found,) = world.run(in_stretches, stretches, tmp_path, size=1)
        return [rows for _, rows in found]

    found = run(LOADED, 2, LOADED, 4)
    first, later = found[:4], found[4:]
    assert len({row for part in first for row in part}) == 2 * LOADED + 2 * 2
    # Seven rows are left, too few for a batch: the next epoch begins.
    assert len({row for part in later for row in part}) == 2 * LOADED + 2 * 4
    assert later[0] == run(LOADED, LOADED)[3]


@on_ranks(1)
def test_several_steps_with_a_batch_are_refused_where_the_place_goes_by_steps() -> None:
    with loading() as model:
        for resume, workers in ((False, 0), (True, 0), (True, 2)):  # which run ahead
            batches = iter(model.loader(Numbers(), resume=resume, num_workers=workers))
            for _ in range(2):
                # Ranks of tests are daemons, which may have no workers.
                with mock.patch.dict(vars(current_process())["_config"], daemon=not workers):
                    batch = next(batches)
                model.train_step(*batch)
            model.train_step(*batch)
            said = error_of(partial(next, batches))
            assert said.startswith("ValueError: loader: 3 steps were done with 2") == resume
        batches = iter(model.loader(Numbers(9 * LOADED)))
        next(batches)
        model.train_step(*next(batches))  # as of one that is fetched ahead
        next(batches)
        said = error_of(partial(next, batches))
        assert said.startswith("ValueError: loader: 1 steps were done with 3")
        batches = iter(model.loader(Numbers(9 * LOADED)))
        model.train_step(*next(batches))
        next(batches)  # and no step with it
        said = error_of(partial(next, batches))
        assert said.startswith("ValueError: loader: 1 steps were done with 2")


class Averaged(torch.nn.Linear):
    """Keeps a mean in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the mean in place, and then outside."""
        self.mean += x.detach().mean()
        self.mean = self.mean * 0.5
        return super().forward(x)


@on_ranks(1)
def test_an_evaluation_leaves_numbers_and_a_refused_batch_is_refused_again() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().mean()

    def look(*_: object) -> None:
        raise zeropp.InfeasibleError("labels: not shifted")

    rows = torch.arange(8.0).view(2, 4)
    with zeropp.parallelize([Averaged()], loss, sample=rows[:1], global_batch=2) as model:
        model.train_step(rows, rows)
        layer: Any = model.engine.layers[0]
        before = layer.mean.clone()
        assert before
        model.eval_step(rows, rows)
        assert layer.mean == before
    vars(loss)["check_targets"] = look
    with zeropp.parallelize([Averaged()], loss, sample=rows[:1], global_batch=2) as model:
        for _ in range(2):
            refuses("InfeasibleError: labels: not", partial(model.train_step, rows, rows))


def evaluated_on() -> list[list[int]]:
    """Which rows this rank evaluates on, twice, after a step of training."""
    with loading(replicate=2) as model:
        next(train_on(model, 1))
        given: dict[str, Any] = {"shuffle": False, "resume": False, "drop_last": False}
        loader = model.loader(Numbers(), **given)
        return [numbers_of(inputs) for _ in range(2) for inputs, _ in loader]


def test_rows_to_evaluate_on_begin_at_the_first_one(world: World) -> None:
    first, second = world.run(evaluated_on, size=2)
    whole = [row for parts in zip(first, second, strict=True) for part in parts for row in part]
    assert whole == 2 * list(range(COUNT))
    assert len(first) == 2 * PER_EPOCH


@on_ranks(2)
def test_data_sets_that_do_not_fit_are_refused() -> None:
    stream: Any = iter(())
    uneven = Numbers(COUNT + torch.distributed.get_rank())
    with loading(replicate=2) as model:
        for dataset, words in (
            (uneven, "ranks differ: rank 0 has 27 rows where rank 1 has 28 rows"),
            (Numbers(LOADED - 1), "has 7 rows, fewer than global_batch=8"),
            (stream, "tuple_iterator has no length or no rows by number"),
        ):
            refuses(f"InfeasibleError: dataset: {words}", partial(model.loader, dataset))


@on_ranks(2)
def test_a_sample_has_any_number_of_rows() -> None:
    torch.manual_seed(0)
    inputs, losses = torch.randn(LOADED, WIDTH), []
    for rows, size, count in ((1, 4, 2), (3, 4, 2), (LOADED, 4, 2), (4, 0, 2), (3, 1, 8)):
        with loading(pp=2, sample=inputs[:rows], microbatch_size=size) as model:
            losses.append(float(model.train_step(inputs, inputs.tanh()).loss))
            assert model.plan.num_microbatches == count
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-6)


OTHER = 1  # the rank whose rows are others


def sampled() -> list[str]:
    """What steps say to the rows of samplers: one over all ranks, one over the data-parallel
    ranks; and then to steps in which one part of one rank's batch is another."""
    with built(pp=2) as model:
        said = []
        everywhere = (dist.get_rank(), dist.get_world_size())
        for rank, size in (everywhere, (model.data_parallel_rank, model.data_parallel_size)):
            indices: Any = range(2 * ROWS)
            sampler: Any = DistributedSampler(indices, size, rank, shuffle=False)
            rows = [*sampler][:ROWS]
            inputs, targets = (torch.cat([part, part + 1])[rows] for part in data())
            said.append(error_of(partial(model.train_step, inputs, targets)))
        inputs, targets = data()
        last = dist.get_rank() == OTHER
        turned, changed = (part.clone() if last else part for part in (inputs, targets))
        if last:
            turned[[0, 1]] = inputs[[1, 0]]
            changed[-1, -1] += 1e-12
        for call in (model.train_step, model.eval_step):
            said.append(error_of(partial(call, turned, targets)))
            said.append(error_of(partial(call, inputs, changed)))
        return [*said, str(step(model))]


def test_different_rows_in_one_pipeline_are_refused_on_every_rank(world: World) -> None:
    first, second = world.run(sampled, size=2)
    assert first == second
    words = (
        "RowsError: {}: ranks of one pipeline were given different rows: {!r} is not the same on"
    )
    for said, call, part in (
        (first[0], "train_step", "inputs"),
        (first[2], "train_step", "inputs"),
        (first[3], "train_step", "targets"),
        (first[4], "eval_step", "inputs"),
        (first[5], "eval_step", "targets"),
    ):
        assert said.startswith(words.format(call, part) + " ranks [0, 1]"), said
        assert "model.rows" in said
        assert "data_parallel_rank" in said
    assert first[1] == ""
    assert float(first[6]) > 0  # a refused step leaves the model as it was


@pytest.mark.parametrize("rank", [0, 3, -1])
@on_ranks(4)
def test_different_keyword_inputs_are_refused(rank: int) -> None:
    """Of one rank, whose mask only the loss function reads; replicas have other rows, rightly."""

    def loss(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        return loss_function(output * mask, target)

    mask = torch.ones(ROWS, 1, dtype=torch.float64)
    given: dict[str, Any] = {"loss_fn": loss, "sample_keywords": {"mask": mask[:1]}}
    with built(seeded([linear] * 2), pp=2, replicate=2, **given) as model:
        inputs, targets = (part[model.rows] for part in data())
        own = mask[model.rows] * (1 + (dist.get_rank() == rank))
        said = error_of(lambda: model.train_step(inputs, targets, mask=own))
    words = said.partition("'mask' is not the same on ranks [")[2]
    assert str(rank) in words if rank >= 0 else said == ""


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.bfloat16, torch.complex128])
def test_a_checksum_is_of_values_and_their_order(kind: torch.dtype) -> None:
    rows = torch.arange(1, 4 * WIDTH + 1).view(4, WIDTH).triu().to(kind)
    assert int(checksum(rows)) == int(checksum(rows.clone())) != 0
    others = (rows.flip(0), rows[:2], torch.zeros_like(rows), rows[:, 0], rows.t(), rows.flip(1))
    assert len({int(checksum(part)) for part in (rows, *others)}) == 7
    assert int(checksum(rows.t())) == int(checksum(rows.t().contiguous()))
    assert int(checksum(torch.empty(0, 2))) != 0  # which would not be compared
