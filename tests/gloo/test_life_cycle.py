"""Models that are made from the same layers, one after another or at the same time, on a user's
mesh or device, and steps from which nothing can be learnt."""

from __future__ import annotations

import copy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.gloo.layers import ROWS, Kind, Scale, frozen, linear
from tests.gloo.models import built, data, error_of, seeded, step, steps
from tests.gloo.world import on_ranks


@on_ranks(2)
def test_layers_belong_to_one_model_until_it_is_closed() -> None:
    layers = seeded([linear] * 4)
    with built(layers, pp=2) as first:
        found = [step(first, 0)]
        said = error_of(lambda: built(layers, pp=2))
        assert said.startswith("InfeasibleError: layers[0]: 'weight' belongs to another model that")
        found.append(step(first, 1))
        others = nn.ModuleList(layers[2:] if dist.get_rank() == 0 else layers[:2])
        assert all(one.isnan().all() for one in others.parameters())  # not the first values
    words = "RuntimeError: this model was closed (create a new model, and load a checkpoint)"
    assert error_of(lambda: step(first)) == error_of(first.full_state_dict) == words
    with built(layers, pp=2) as again:
        found += steps(again, 2, 3)
    with built(pp=2) as alone:
        assert found == steps(alone, 0, 1, 2, 3)
    assert len(set(found)) == 4


@on_ranks(2)
def test_a_model_that_a_peer_has_refused_keeps_no_layers() -> None:
    taken, new = seeded([linear] * 2), seeded([linear])
    with built(taken, pp=2):
        said = error_of(lambda: built([new[0], taken[1]], pp=2))
        assert said.startswith("InfeasibleError: layers[1]: 'weight' belongs to another model that")
    with built([new[0], taken[1]], pp=2) as model:
        assert step(model) > 0


@pytest.mark.parametrize(("kind", "parameter"), [(linear, "weight"), (Scale, "scale")])
@on_ranks(2)
def test_layers_without_values_are_refused(kind: Kind, parameter: str) -> None:
    """Those that an earlier model, now closed, has sharded, and copies that were taken of them
    between its steps."""
    layers = seeded([kind] * 4)
    with built(layers, shard=2) as first:
        step(first)
        copies = copy.deepcopy(layers)
    calls = partial(built, layers, shard=2), partial(built, copies, pp=2)
    for said in map(error_of, calls):
        assert said.startswith(f"InfeasibleError: layers[0]: '{parameter}' has no values"), said
        assert "\n" not in said


@pytest.mark.parametrize("degrees", [{"shard": 2}, {"shard": 2, "chunks": 2}], ids=str)
@on_ranks(2)
def test_sharded_layers_can_be_read_between_steps(degrees: dict[str, Any]) -> None:
    """They are NaN to whoever reads or copies them, and the losses are as where nobody does."""
    layers, found = seeded([linear] * 4), []
    with built(layers, **degrees) as model:
        for number in range(3):
            found.append(step(model, number))
            for one in (*copy.deepcopy(layers), *layers):
                assert all(parameter.isnan().all() for parameter in one.parameters())
            model.eval_step(*(part[model.rows] for part in data(9)))
    with built(**degrees) as model:
        assert found == steps(model, 0, 1, 2)
    assert len(set(found)) == 3


@on_ranks(2)
def test_two_models_in_one_process() -> None:
    """Trained in turn as one after the other."""
    first, second = {"pp": 2}, {"shard": 2}
    layers = [seeded([linear] * 4), seeded([linear] * 3)]
    with built(layers[0], **first) as one, built(layers[1], **second) as other:
        found = [step(model, number) for number in range(3) for model in (one, other)]
    with built(pp=2) as model:
        assert found[::2] == steps(model, 0, 1, 2)
    with built(seeded([linear] * 3), shard=2) as model:
        assert found[1::2] == steps(model, 0, 1, 2)


class Detaching(nn.Module):
    """Gives nothing before it a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().tanh()


UNTRAINED: dict[str, list[Kind]] = {
    "all frozen": [frozen] * 4,
    "no parameters": [nn.Tanh] * 4,
    "detached": [linear, Detaching, frozen, frozen],
}


@pytest.mark.parametrize("name", UNTRAINED)
@on_ranks(1)
def test_a_loss_that_depends_on_nothing_trained(name: str) -> None:
    with built(seeded(UNTRAINED[name])) as model:
        assert model.eval_step(*data()) > 0
        said = error_of(lambda: step(model))
        assert "the loss depends on nothing that is trained" in said


@on_ranks(4)
def test_a_users_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    with built(mesh=mesh) as model:
        step(model)
        assert model.data_parallel_size == 2
        assert model.data_parallel_rank == dist.get_rank() % 2
        first = ROWS // 2 * model.data_parallel_rank
        assert (model.rows.start, model.rows.stop) == (first, first + ROWS // 2)


@on_ranks(2)
def test_a_cpu_with_an_index_is_the_cpu() -> None:
    losses = []
    for device in ("cpu:0", "cpu"):
        with built(pp=2, device=device) as model:
            losses.append(step(model))
    assert losses[0] == losses[1] > 0


@on_ranks(2)
def test_steps_that_cannot_be_right() -> None:
    model = built(pp=2, timeout=timedelta(seconds=5))
    inputs, targets = data()
    said = error_of(lambda: model.train_step(inputs[:3], targets[:3]))
    assert said.startswith("ValueError: inputs: 3 rows, but this rank trains on 12")
    with torch.no_grad():
        said = error_of(lambda: model.train_step(inputs, targets))
    assert said.startswith("RuntimeError: train_step: gradients are disabled")
    # The first stage raises, and its peer waits for it no longer than told.
    assert error_of(lambda: model.train_step(inputs[:, :3], targets))
    said = error_of(lambda: model.train_step(inputs, targets))
    assert said.startswith("RuntimeError: an earlier step raised")
