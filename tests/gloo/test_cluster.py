"""``cluster=``: layers cut by their durations, orders as good as the planner's, and ``auto``; and a
cluster's preset, which two gloo ranks measure."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

import zeropp
from baselines.model import build_piece, sliced_cross_entropy
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks import CHECKOUT
from benchmarks.calibrate.__main__ import main
from benchmarks.calibrate.constants import calibrated, constants_of, preset_text, wrong
from benchmarks.calibrate.measure import Timed, Times, collectives, kernels, overlap
from benchmarks.specification.reading import preset, validated
from tests.gloo.world import World, on_ranks
from tests.unit.shapes import gpt
from zeropp.choose.layer_prices import LayerPrices, layer_passes
from zeropp.choose.task import Candidate, Task
from zeropp.emulate.recorder import Recorder
from zeropp.engine.settings import Settings, read
from zeropp.engine.walk import LayerSizes, walk
from zeropp.price import model_flops_per_token, price_plan
from zeropp.price.cluster import Cluster, cluster_of
from zeropp.schedule import event_loop
from zeropp.schedule.plan import Plan
from zeropp.train import auto
from zeropp.train.auto import choose, plan_on_cluster
from zeropp.train.parallel_model import describe
from zeropp.train.stages import plan_layers
from zeropp.types.shape import ModelShape

GPT = gpt(30, 2048, 16)

SMALL = gpt(6, 512, 8, vocab=1000, seq=512)


def cut_on(
    world: int, layers: list[Any], sample: torch.Tensor, batch: int, **more: Any
) -> tuple[Plan, list[LayerSizes]]:
    """The plan of this many ranks, and the sizes of the layers."""
    settings = Settings(sample=sample, global_batch=batch, **more)
    sizes = walk(layers, sample, {}, recorder=Recorder)
    if settings.hardware:
        return plan_on_cluster(settings, frozenset(), sizes, world).plan, sizes
    return plan_layers(settings, sizes, world).plan, sizes


def makers(shape: ModelShape) -> list[Any]:
    """The suite's model, made on the meta device."""
    return [
        lambda i=i: build_piece(shape, i, seed=0, device="meta") for i in range(shape.num_pieces)
    ]


def test_cut_and_order_are_as_good_as_the_planners() -> None:
    cluster = cluster_of("a800")
    degrees = {"pp": 4, "shard": 2, "chunks": 2, "unit": 8}
    knobs = ZeroppKnobs(**degrees, replicate=1, replicate_zero=0)  # type: ignore[arg-type]
    planned = ZEROPP.plan(
        Task(shape=GPT, cluster=cluster, num_gpus=8, global_batch=32, precision="bf16"),
        Candidate(knobs, 1),
    )
    tokens = torch.zeros(1, GPT.seq, dtype=torch.long)
    plan, _ = cut_on(8, makers(GPT), tokens, 32, **degrees, precision="bf16", cluster="a800")
    assert plan.cuts == planned.cuts
    price = price_plan(planned, cluster).stages
    orders = plan.schedule, planned.schedule
    steps = [event_loop.run(order, price).step_s for order in orders]
    assert steps[0] <= 1.005 * steps[1]


def test_settings_in_one_line() -> None:
    given = {"pp": 2, "chunks": 2, "weights": [1.0] * 12}
    plan, _ = cut_on(2, uneven(), torch.zeros(4, 64), 64, **given)
    assert describe(plan) == (
        "pp=2 shard=1 replicate=1 chunks=2 unit=2 activation_cap=4 recompute=none; "
        "16 microbatches, layers per stage: 3 3 3 3"
    )


def uneven() -> list[nn.Module]:
    """Layers of very different durations that all have few parameters."""
    wide = [nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64)) for _ in range(3)]
    return [nn.Linear(64, 64), *wide, *(nn.Linear(64, 64) for _ in range(8))]


def test_stages_take_about_as_long_as_each_other() -> None:
    sample = torch.zeros(4, 64)
    plan, sizes = cut_on(2, uneven(), sample, 64, pp=2, chunks=2, cluster="h100")
    seconds = [layer.total for layer in layer_passes(sizes, plan, cluster_of("h100"))]
    work = [sum(seconds[begin:end]) for begin, end in pairwise(plan.cuts)]
    assert max(work) < 2 * sum(work) / len(work)


def test_the_order_is_no_slower_than_the_one_for_equal_durations() -> None:
    sample = torch.zeros(4, 64)
    given = {"pp": 2, "chunks": 2, "weights": [1.0] * 12}
    planned, _ = cut_on(2, uneven(), sample, 64, **given, cluster="a800")
    equal, sizes = cut_on(2, uneven(), sample, 64, **given)
    assert planned.cuts == equal.cuts
    costs = LayerPrices(sizes, []).times(equal, cluster_of("a800")).stages
    steps = [event_loop.run(plan.schedule, costs).step_s for plan in (planned, equal)]
    assert steps[0] < steps[1]


def test_names_of_clusters() -> None:
    names = sorted(path.stem for path in (CHECKOUT / "conf" / "cluster").glob("*.yaml"))
    assert len(names) > 3
    assert all(cluster_of(name).name for name in names)
    with pytest.raises(zeropp.InfeasibleError, match="must be one of a100, a100_40gb") as caught:
        cluster_of("b900")
    assert "\n" not in str(caught.value)


def chosen(shape: ModelShape, world: int, **more: Any) -> Settings:
    """The settings of ``chosen_in_words``."""
    return chosen_in_words(shape, world, **more)[0]


def chosen_in_words(shape: ModelShape, world: int, **more: Any) -> tuple[Settings, str]:
    """What is chosen for a model of the suite on A800s, one sequence per microbatch."""
    tokens = torch.zeros(1, shape.seq, dtype=torch.long)
    given = {"precision": "bf16", "cluster": "a800", **more}
    settings = Settings(sample=tokens, global_batch=4 * world, **given)
    sizes = walk(makers(shape), tokens, {}, recorder=Recorder)
    return choose(settings, read(given | {"sample": tokens, "global_batch": 1})[1], sizes, world)[
        :2
    ]


EVERYTHING = dict.fromkeys(("pp", "shard", "replicate", "chunks", "unit", "recompute"), "auto")


def test_a_cpu_runs_a_step_in_one_unit() -> None:
    degrees: dict[str, Any] = {"pp": 2, "shard": 2, "chunks": 2}
    on_cpu: dict[str, Any] = {**degrees, "cluster": "cpu_gloo", "precision": "fp32"}
    assert chosen(SMALL, 4, unit="auto", **on_cpu).unit == 8
    tokens = torch.zeros(1, SMALL.seq, dtype=torch.long)
    plans = [cut_on(4, makers(SMALL), tokens, 16, **how)[0] for how in (on_cpu, degrees)]
    assert [plan.schedule.unit for plan in plans] == [8, 2]


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


def test_degrees_are_chosen_without_a_job() -> None:
    tokens = torch.zeros(1, SMALL.seq, dtype=torch.long)
    keywords: dict[str, Any] = {"precision": "bf16", "cluster": "a800", **EVERYTHING}
    keywords |= {"sample": tokens, "global_batch": 32}
    values = zeropp.degrees(makers(SMALL), 8, **keywords)
    asked = chosen(SMALL, 8, **EVERYTHING)
    assert values == {name: getattr(asked, name) for name in EVERYTHING}
    assert "auto" not in values.values()
    assert zeropp.degrees(makers(SMALL), 8, **keywords | values) == {}
    sizes = walk(makers(SMALL), tokens, {}, recorder=Recorder)
    plans = [
        plan_on_cluster(*read(given), sizes, 8).plan for given in (keywords, keywords | values)
    ]
    assert plans[0] == plans[1]


def test_the_size_of_microbatches_is_chosen() -> None:
    keywords: dict[str, Any] = {"precision": "bf16", "cluster": "a800", "pp": 2, "shard": 2}
    keywords |= {"sample": torch.zeros(1, SMALL.seq, dtype=torch.long), "global_batch": 32}
    values = zeropp.degrees(makers(SMALL), 4, **keywords, microbatch_size="auto")
    assert values["microbatch_size"] in (2, 4, 8)  # one is slow, and 16 are no pipeline
    times = {rows: chosen_step_s(keywords | {"microbatch_size": rows}) for rows in (1, 2, 4, 8)}
    assert min(times, key=lambda rows: times[rows]) == values["microbatch_size"]
    with pytest.raises(zeropp.InfeasibleError, match="microbatch_size='auto': needs clus"):
        zeropp.degrees(makers(SMALL), 4, **keywords | {"cluster": None}, microbatch_size="auto")


def chosen_step_s(keywords: dict[str, Any]) -> float:
    """The estimated seconds per step on four ranks, with the fastest units."""
    settings = Settings(**keywords)
    sizes = walk(makers(SMALL), *settings.microbatch, recorder=Recorder)
    return choose(settings, frozenset(), sizes, 4)[2]


class TiedLayers(list[Any]):
    """Layers that know which of their parameters are one."""

    tied = ((0, "weight"), (3, "weight"))


def test_degrees_are_chosen_for_layers_that_know_what_is_tied() -> None:
    layers = TiedLayers(nn.Linear(8, 8) for _ in range(4))
    keywords = {"sample": torch.zeros(1, 8), "global_batch": 8, "cluster": "a800"}
    with mock.patch.object(auto, "choose", wraps=choose) as asked:
        assert zeropp.degrees(layers, 2, **keywords, pp="auto", unit=2) == {"pp": 2}
    assert asked.call_args.args[0].tied == TiedLayers.tied


@pytest.mark.parametrize("cluster", ["h100", None])
@on_ranks(2)
def test_a_step_says_its_rates(cluster: str | None) -> None:
    shape = gpt(2, 32, 2, vocab=64, seq=16)
    layers = [build_piece(shape, i, 0, torch.device("cpu")) for i in range(shape.num_pieces)]
    rows = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    given: dict[str, Any] = {"sample": rows[:1], "global_batch": 4, "shard": 2}
    ends = [1.0, 3.5, 4.0, 9.0]  # of the four steps
    with (
        mock.patch("zeropp.train.parallel_model.perf_counter", side_effect=ends),
        zeropp.parallelize(
            layers, sliced_cross_entropy, cluster=cluster, dropout_seed=None, **given
        ) as model,
    ):
        first = model.train_step(rows, rows)
        second = model.train_step(rows, rows)
        model.eval_step(rows, rows)
        third = model.train_step(rows, rows)
        model.forward_only(rows)
        fourth = model.train_step(rows, rows)
    for behind in (first, third, fourth):
        assert behind.tokens_per_s is behind.mfu is None
    assert second.tokens_per_s == 4 * 16 / 2.5
    expected = None
    if cluster is not None:
        peak = 2e12 * (cluster_of(cluster).device.peak_fp32_tflops or 0.0)  # of both ranks
        expected = pytest.approx(second.tokens_per_s * model_flops_per_token(shape) / peak)
    assert second.mfu == expected


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


def test_auto_plans_for_what_must_be_whole() -> None:
    layers, tokens = makers(SMALL), torch.zeros(1, SMALL.seq, dtype=torch.long)
    settings = Settings(
        sample=tokens, global_batch=8, cluster="a800", pp="auto", optimizer=two_kinds,
        group_of=lambda name, _: "matrices" if name[0] == 1 else "others", shard=2, unit=2,
    )  # fmt: skip
    sizes = walk(layers, tokens, {}, recorder=Recorder, group_of=settings.group_of)
    plan, chosen_line, _ = plan_on_cluster(settings, frozenset({"pp"}), sizes, 4)
    assert plan.whole_groups == ("matrices",)
    assert chosen_line.startswith("pp chosen")
    ends = [str(action) for action in plan.schedule.programs[0][-3:]]
    assert ends == ["0GATHER_WHOLE", "0UPDATE", "0GATHER_UPDATED"]


def two_kinds(groups: Any) -> list[torch.optim.Optimizer]:
    """One looks at all elements of a parameter, and the other at each."""
    return [torch.optim.Adafactor(groups["matrices"]), torch.optim.SGD(groups["others"])]


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


GROUP = "within a node"


def measured(shape: ModelShape) -> Times:
    """The times of one rank of the group."""
    device, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    times = Times(host="here")
    kernels(times, shape, device, torch.float32)
    collectives(times, {GROUP: group}, device, lambda words: None)
    overlap(times, shape, group, device, torch.float32)
    return times


def test_ranks_measure_a_preset(world: World) -> None:
    shape = replace(preset("model", "llama_tiny", ModelShape), seq=32)
    ranks = world.run(measured, shape, size=2)
    like = preset("cluster", "cpu_gloo", Cluster)
    constants = constants_of(ranks, like, half=False)
    assert all(math.isfinite(constant.value) for constant in constants)
    cluster = calibrated(like, "mine", constants)
    assert cluster.device.peak_fp32_tflops == cluster.device.matmul_fp32_tflops
    text = preset_text(cluster, constants, "two ranks")
    assert validated(Cluster, yaml.safe_load(text)) == cluster
    for constant in constants:
        assert f"{constant.place.rpartition('.')[2]}:" in text
    assert text.count("# spread") == len(constants)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--name h100", "--name h100: a preset that was not measured"),
        ("--name my-laptop", "must consist of letters"),
        ("--name mine --ranks -1", "--ranks -1: must be at least 1"),
        ("--name cpu_2cores --like moon", "cluster='moon': no such preset"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["calibrate", *words.split()])
    assert main() == 2
    assert said in capsys.readouterr().err


def synthetic(gather_us: float = 100.0, gb_s: float = 10.0, product: float = 1e-3) -> Times:
    """Times of a rank of eight whose rates are known."""
    times = Times(host="node", group_sizes={GROUP: 8})
    steady = Timed(1e-5, 0.01)
    times.tiny = times.launch = times.attention = times.stream = steady
    times.attention_flops, times.stream_bytes = 1e9, 10**6
    times.products = {(1024, 1024, 1024): Timed(product, 0.0)}
    for count in (2**16, 2**22, 2**28):
        seconds = gather_us * 1e-6 + 7 / 8 * count / (gb_s * 1e9)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "send"):
            times.collectives[kind, GROUP, count] = Timed(seconds, 0.01)
    return times


def test_latency_and_rate_of_a_link() -> None:
    like = preset("cluster", "h100", Cluster)
    values = {c.place: c.value for c in constants_of([synthetic()] * 8, like, half=True)}
    assert math.isclose(values["intra.latency_us"], 100 - 7 * like.intra.hop_us, rel_tol=1e-3)
    assert math.isclose(values["intra.efficiency"], 10 / 450, rel_tol=1e-3)
    assert math.isclose(values["device.matmul_bf16_tflops"], 2 * 1024**3 / 1e-3 / 1e12)
    assert math.isclose(values["reduction_gain"], 2.0, rel_tol=1e-2)


def test_ranks_of_a_node_share_its_nics() -> None:
    """Eight ranks measure at once; a V100's node has four NICs."""
    like = preset("cluster", "v100", Cluster)
    times = synthetic(gb_s=4.0)
    times.group_sizes["across nodes"] = 8  # nodes
    inside = dict(times.collectives)
    times.collectives |= {(kind, "across nodes", n): of for (kind, _, n), of in inside.items()}
    constants = constants_of([times], like, half=True)
    values = {c.place: c.value for c in constants}
    share = 4 * like.inter.bandwidth_gb_s / 8
    assert math.isclose(values["inter.efficiency"], 4.0 / share, rel_tol=1e-3)
    measured = calibrated(like, "mine", constants).busbw_gb_s or 0.0  # of all GPUs of a node
    assert math.isclose(measured, 8 * 4.0, rel_tol=1e-3)


def test_what_looks_wrong_is_named() -> None:
    like = preset("cluster", "h100", Cluster)
    ranks = [synthetic() for _ in range(8)]
    lines = wrong(ranks, constants_of(ranks, like, half=True), like)
    assert not any("Rank" in line for line in lines)
    assert any(line.startswith("intra.efficiency: 3% of what") for line in lines)
    ranks[3], ranks[5] = synthetic(product=1.2e-3), synthetic(gb_s=5.0)
    lines = wrong(ranks, constants_of(ranks, like, half=True), like)
    assert any(line.startswith("Rank 3 on node: products take 20% longer") for line in lines)
    assert any(line.startswith("Rank 5 on node: messages within a node") for line in lines)
