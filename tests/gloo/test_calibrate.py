"""Two gloo ranks measure themselves, and what they measure becomes a preset."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import yaml

from benchmarks.calibrate.__main__ import main
from benchmarks.calibrate.constants import calibrated, constants_of, preset_text, wrong
from benchmarks.calibrate.measure import Timed, Times, collectives, kernels, overlap
from benchmarks.specification.reading import preset, validated
from tests.gloo.world import World
from zeropp.price.cluster import Cluster
from zeropp.types.shape import ModelShape

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
    values = {c.place: c.value for c in constants_of([times], like, half=True)}
    share = 4 * like.inter.bandwidth_gb_s / 8
    assert math.isclose(values["inter.efficiency"], 4.0 / share, rel_tol=1e-3)


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
