"""``cluster=``: layers cut by their durations, orders as good as the planner's, and ``auto``.

One process as one rank of a job (``fake_world``): cutting needs no peers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from benchmarks import CHECKOUT
from tests.unit.shapes import gpt
from zeropp.auto import choose
from zeropp.cluster import named_cluster
from zeropp.contender.contender import ZEROPP, ZeroppKnobs
from zeropp.cost import price_plan
from zeropp.engine.tracing import fake_world
from zeropp.engine.walk import walk
from zeropp.model import build_piece
from zeropp.plan import Candidate, Task
from zeropp.schedule import event_loop
from zeropp.settings import Settings
from zeropp.shape import ModelShape
from zeropp.stages import LayerPrices, Stages, layer_costs, plan_layers

GPT = gpt(30, 2048, 16)

SMALL = gpt(6, 512, 8, vocab=1000, seq=512)


def cut_on(world: int, layers: list[Any], sample: torch.Tensor, batch: int, **more: Any) -> Stages:
    """What rank 0 of a job gets."""
    settings = Settings(sample=sample, global_batch=batch, **more)
    sizes = walk(layers, sample, {})
    with fake_world(0, world):
        return Stages(plan=plan_layers(settings, sizes), sizes=sizes)


def makers(shape: ModelShape) -> list[Any]:
    """The suite's model, made on the meta device."""
    return [
        lambda i=i: build_piece(shape, i, seed=0, device="meta") for i in range(shape.num_pieces)
    ]


def test_cut_and_order_are_as_good_as_the_planners() -> None:
    cluster = named_cluster("a800")
    degrees = {"pp": 4, "shard": 2, "chunks": 2, "unit": 8}
    knobs = ZeroppKnobs(**degrees, replicate=1, replicate_zero=0)  # type: ignore[arg-type]
    planned = ZEROPP.plan(
        Task(shape=GPT, cluster=cluster, num_gpus=8, global_batch=32, precision="bf16"),
        Candidate(knobs, 1),
    )
    tokens = torch.zeros(1, GPT.seq, dtype=torch.long)
    found = cut_on(8, makers(GPT), tokens, 32, **degrees, precision="bf16", cluster="a800")
    assert found.plan.cuts == planned.cuts
    price = price_plan(planned, cluster).stages
    orders = found.plan.schedule, planned.schedule
    steps = [event_loop.run(order, price).step_s for order in orders]
    assert steps[0] <= 1.005 * steps[1]


def test_settings_in_one_line() -> None:
    given = {"pp": 2, "chunks": 2, "weights": [1.0] * 12}
    stages = cut_on(2, uneven(), torch.zeros(4, 64), 64, **given)
    assert stages.describe() == (
        "pp=2 shard=1 replicate=1 chunks=2 unit=2 activation_cap=4 recompute=none; "
        "16 microbatches, layers per stage: 3 3 3 3"
    )


def uneven() -> list[nn.Module]:
    """Layers of very different durations that all have few parameters."""
    wide = [nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64)) for _ in range(3)]
    return [nn.Linear(64, 64), *wide, *(nn.Linear(64, 64) for _ in range(8))]


def test_stages_take_about_as_long_as_each_other() -> None:
    sample = torch.zeros(4, 64)
    stages = cut_on(2, uneven(), sample, 64, pp=2, chunks=2, cluster="h100")
    costs = layer_costs(stages.sizes, named_cluster("h100"), "fp32", "none")
    seconds = [cost.compute for cost in costs]
    work = [sum(seconds[int(begin) : int(end)]) for begin, end in pairwise(stages.plan.cuts)]
    assert max(work) < 2 * sum(work) / len(work)


def test_the_order_is_no_slower_than_the_one_for_equal_durations() -> None:
    sample = torch.zeros(4, 64)
    given = {"pp": 2, "chunks": 2, "weights": [1.0] * 12}
    planned = cut_on(2, uneven(), sample, 64, **given, cluster="a800")
    equal = cut_on(2, uneven(), sample, 64, **given)
    assert planned.plan.cuts == equal.plan.cuts
    costs = LayerPrices(equal.sizes, []).times(equal.plan, named_cluster("a800")).stages
    steps = [event_loop.run(one.plan.schedule, costs).step_s for one in (planned, equal)]
    assert steps[0] < steps[1]


def test_names_of_clusters() -> None:
    names = sorted(path.stem for path in (CHECKOUT / "conf" / "cluster").glob("*.yaml"))
    assert len(names) > 3
    assert all(named_cluster(name).name for name in names)
    with pytest.raises(zeropp.InfeasibleError, match="must be one of a100, a800") as caught:
        named_cluster("b900")
    assert "\n" not in str(caught.value)


def chosen(shape: ModelShape, world: int, **more: Any) -> Settings:
    """The settings of ``chosen_in_words``."""
    return chosen_in_words(shape, world, **more)[0]


def chosen_in_words(shape: ModelShape, world: int, **more: Any) -> tuple[Settings, str]:
    """What is chosen for a model of the suite on A800s, one sequence per microbatch."""
    tokens = torch.zeros(1, shape.seq, dtype=torch.long)
    given = {"precision": "bf16", "cluster": "a800", **more}
    settings = Settings(sample=tokens, global_batch=4 * world, **given)
    asked = frozenset(name for name, value in given.items() if value == "auto")
    sizes = walk(makers(shape), tokens, {})
    with fake_world(0, world):
        return choose(settings, asked, sizes)


EVERYTHING = dict.fromkeys(("pp", "shard", "replicate", "chunks", "unit", "recompute"), "auto")


def test_a_cpu_runs_a_step_in_one_unit() -> None:
    degrees: dict[str, Any] = {"pp": 2, "shard": 2, "chunks": 2}
    on_cpu: dict[str, Any] = {**degrees, "cluster": "cpu_gloo", "precision": "fp32"}
    assert chosen(SMALL, 4, unit="auto", **on_cpu).unit == 8
    tokens = torch.zeros(1, SMALL.seq, dtype=torch.long)
    found = [cut_on(4, makers(SMALL), tokens, 16, **how) for how in (on_cpu, degrees)]
    assert [one.plan.schedule.unit for one in found] == [8, 2]


def test_auto_takes_what_fits() -> None:
    knobs = chosen(SMALL, 8, **EVERYTHING)
    assert knobs.pp * knobs.shard * knobs.replicate == 8  # type: ignore[operator]
    assert knobs.recompute == "none"
    large = chosen(
        gpt(24, 8192, 64),
        8,
        **EVERYTHING,
    )
    assert large.pp * large.shard >= 4  # type: ignore[operator]
    kept = chosen(SMALL, 8, pp="auto", shard=2, replicate="auto", recompute="full")
    assert (kept.shard, kept.recompute) == (2, "full")


def test_auto_counts_what_the_given_optimizer_keeps() -> None:
    wide = gpt(24, 4096, 32, seq=256)
    given: dict[str, Any] = {"pp": 1, "shard": 1, "replicate": "auto", "recompute": "full"}
    given |= {"precision": "fp32", "unit": 2}
    found, words = chosen_in_words(wide, 2, **given, optimizer=plain_sgd, activation_cap=2)
    assert found.replicate == 2
    assert words.startswith("replicate chosen: estimated ")
    assert words.endswith("usable GiB")
    with pytest.raises(zeropp.InfeasibleError, match="1 settings need more memory than a device"):
        chosen(wide, 2, **given)  # Adam's two numbers per parameter


def plain_sgd(groups: Any) -> torch.optim.Optimizer:
    """Keeps nothing of a parameter."""
    return torch.optim.SGD(groups["all"], lr=0.1)


def test_auto_goes_on_after_a_setting_that_cannot_be_cut() -> None:
    given = {"pp": 2, "shard": "auto", "replicate": "auto", "unit": 2, "activation_cap": 2}
    assert chosen(SMALL, 8, **given, chunks="auto").chunks == 1  # more chunks need a larger cap
    with pytest.raises(zeropp.InfeasibleError) as caught:
        chosen(SMALL, 8, **given, chunks=2)
    words = "replicate, shard='auto': no setting can be cut; the last one: activation_cap=2: "
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cluster": None}, "pp='auto': needs cluster="),
        ({}, "pp, shard='auto': 4 settings need more memory than a device has"),
        ({"shard": 3}, "pp='auto': no degrees make up 8 ranks"),
    ],
)
def test_auto_is_refused_in_one_line(more: dict[str, Any], words: str) -> None:
    # Few layers, because each is called, and wide ones: 232 billion parameters.
    shape = gpt(8, 49152, 384)
    with pytest.raises(zeropp.InfeasibleError) as caught:
        chosen(shape, 8, **{"pp": "auto", "shard": "auto" if not more else 1, **more})
    assert str(caught.value).startswith(words)
