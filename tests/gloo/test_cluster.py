"""``cluster=``: layers cut by their durations, and the order that ZeroPP's planner gives the suite.

One process as one rank of a job (``fake_world``): cutting needs no peers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from benchmarks import CHECKOUT
from zeropp.arguments import request_of
from zeropp.contender.contender import ZEROPP
from zeropp.contender.knobs import ZeroppKnobs
from zeropp.cut import Stages, cut
from zeropp.engine.fake_world import fake_world
from zeropp.engine.trial import try_layers
from zeropp.layer_costs import layer_costs, stage_costs
from zeropp.model import build_piece
from zeropp.named_cluster import named_cluster
from zeropp.plan import Candidate, Task
from zeropp.schedule import event_loop
from zeropp.shape import ModelShape

GPT = ModelShape("gpt", "gpt", 30, 2048, 16, 16, 8192, 51200, 2048)


def cut_on(world: int, layers: list[Any], sample: torch.Tensor, batch: int, **more: Any) -> Stages:
    """What rank 0 of a job gets."""
    with fake_world(0, world):
        return cut(layers, request_of(more), sample, batch)


def makers(shape: ModelShape) -> list[Any]:
    """The suite's model, made on the meta device."""
    return [lambda i=i: build_piece(shape, i, seed=0) for i in range(shape.num_pieces)]


@pytest.mark.parametrize(("pp", "shard", "chunks"), [(4, 2, 2), (8, 1, 3)])
def test_the_order_is_that_of_the_planner(pp: int, shard: int, chunks: int) -> None:
    cluster = named_cluster("a800")
    knobs = ZeroppKnobs(pp=pp, shard=shard, replicate=1, chunks=chunks, unit=8, replicate_zero=0)
    task = Task(GPT, cluster, pp * shard, 32 * shard, "bf16")
    planned = ZEROPP.plan(task, Candidate(knobs, 1))
    tokens = torch.zeros(1, GPT.seq, dtype=torch.long)
    found = cut_on(
        pp * shard, makers(GPT), tokens, 32 * shard, pp=pp, shard=shard, chunks=chunks, unit=8,
        precision="bf16", cluster="a800",
    )  # fmt: skip
    assert found.schedule.programs == planned.schedule.programs


def uneven() -> list[nn.Module]:
    """Layers of very different durations that all have few parameters."""
    wide = [nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64)) for _ in range(3)]
    return [nn.Linear(64, 64), *wide, *(nn.Linear(64, 64) for _ in range(8))]


def test_stages_take_about_as_long_as_each_other() -> None:
    sample = torch.zeros(4, 64)
    request = request_of({"pp": 2, "chunks": 2, "cluster": "h100"})
    conditions = request.conditions()
    assert conditions is not None
    stages = cut_on(2, uneven(), sample, 64, pp=2, chunks=2, cluster="h100")
    seconds = [cost.compute for cost in layer_costs(try_layers(uneven(), sample, {}), conditions)]
    work = [sum(seconds[begin:end]) for begin, end in pairwise(stages.cuts)]
    assert max(work) < 2 * sum(work) / len(work)


def test_the_order_is_no_slower_than_the_one_for_equal_durations() -> None:
    sample = torch.zeros(4, 64)
    given = {"pp": 2, "chunks": 2, "weights": [1.0] * 12}
    conditions = request_of({**given, "cluster": "a800"}).conditions()
    assert conditions is not None
    planned = cut_on(2, uneven(), sample, 64, **given, cluster="a800")
    equal = cut_on(2, uneven(), sample, 64, **given)
    assert planned.cuts == equal.cuts
    costs = stage_costs(
        equal.sizes, equal.cuts, equal.schedule.stage_rank, equal.layout, conditions
    )
    steps = [event_loop.run(one.schedule, costs).step_s for one in (planned, equal)]
    assert steps[0] < steps[1]


def test_names_of_clusters() -> None:
    names = sorted(path.stem for path in (CHECKOUT / "conf" / "cluster").glob("*.yaml"))
    assert len(names) > 3
    assert all(named_cluster(name).name for name in names)
    with pytest.raises(zeropp.InfeasibleError, match="must be one of a100, a800") as caught:
        named_cluster("b900")
    assert "\n" not in str(caught.value)
