"""Repeated runs: every point as often as asked for, and intervals that hold the next run."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from statistics import median

import hydra
import numpy as np
import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from benchmarks import CHECKOUT
from benchmarks.launch.points import plan_point, still_to_run
from benchmarks.records.environment import read_code
from benchmarks.records.samples import half_width, pooled_spread, ratio_of_medians, summarise
from benchmarks.report.frame import CELL, latest_ok, load_frame
from benchmarks.report.speedup import with_speedups
from benchmarks.specification import CONF
from benchmarks.specification.compose import _any_knob, _parsed, _plain, compose
from tests.unit.synthetic_records import frame_of, make_record
from tests.unit.toy_spec import spec_of

PEERS = CHECKOUT / "results" / "reference" / "peers"


@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_an_interval_holds_nine_of_ten_next_runs(tails: str) -> None:
    random, held, shape = np.random.default_rng(0), [], (16, 4)
    for _ in range(300):
        noise = random.normal(size=shape) if tails == "normal" else random.standard_t(3, shape)
        times = np.exp(0.05 * noise)
        spread, freedom = pooled_spread(times[:, :3].tolist())
        for *runs, following in times.tolist():
            distance = abs(math.log(following / median(runs)))
            held.append(distance < half_width([3], spread, freedom, next_runs=1))
    assert 0.9 < sum(held) / len(held) < 0.98


def test_the_committed_peers_hold_nine_of_ten_of_their_own_runs() -> None:
    frame, _ = load_frame([PEERS])
    groups = [list(g["step_s"]) for _, g in frame.groupby([*CELL, "contender", "layout"])]
    groups = [group for group in groups if len(group) > 2]
    spread, freedom = pooled_spread(groups)
    held = [
        abs(math.log(one / median(group[:place] + group[place + 1 :])))
        < half_width([len(group) - 1], spread, freedom, next_runs=1)
        for group in groups
        for place, one in enumerate(group)
    ]
    assert sum(held) >= 0.9 * len(held)


def test_repeated_runs_become_one_row_with_their_median(tmp_path: Path) -> None:
    records = [
        make_record(
            name,
            attempt=f"local-{number}",
            step_s=[0.001 * step for step in range(seconds - 3, seconds + 4)],
            fields={"code_digest": "the same files"},
        )
        for name, times in (("zeropp", (100, 130, 110)), ("deepspeed_3d", (200, 210, 220)))
        for number, seconds in enumerate(times)
    ]
    rows = latest_ok(frame_of(*records, root=tmp_path))
    assert list(rows["runs"]) == [3, 3]
    assert sorted(rows["step_s"]) == pytest.approx([0.11, 0.21])
    assert (rows["step_s_low"] < rows["step_s"]).all()
    assert (rows["step_s_high"] > rows["step_s"]).all()
    (row,) = with_speedups(rows, "deepspeed_3d").query("contender == 'zeropp'").to_dict("records")
    assert row["speedup"] == pytest.approx(21 / 11)
    assert row["speedup_low"] < 21 / 11 < row["speedup_high"]
    assert (rows["tokens_per_s_per_gpu"] * rows["step_s"]).round(6).nunique() == 1


def test_a_cluster_whose_runs_differ_widens_no_interval_of_another(tmp_path: Path) -> None:
    records = [
        make_record(
            num_gpus=gpus,
            attempt=f"local-{number}",
            step_s=[step_s] * 5,
            fields={"code_digest": "the same files"},
        )
        for gpus, times in ((2, (1.0, 3.0, 9.0)), (4, (1.0, 1.01, 1.02)))
        for number, step_s in enumerate(times)
    ]
    frame = frame_of(*records, root=tmp_path)
    frame["cluster"] = frame["num_gpus"].map({2: "noisy", 4: "calm"})
    rows = latest_ok(frame).set_index("cluster")
    assert rows["run_spread"]["calm"] == pytest.approx(0.01, rel=0.02)
    assert rows["run_spread"]["noisy"] == pytest.approx(math.log(3.0), rel=0.02)
    assert list(rows["run_freedom"]) == [2, 2]


def test_a_speedup_over_a_single_run_is_that_of_the_times_beside_it(tmp_path: Path) -> None:
    records = [
        make_record(
            name,
            attempt=f"local-{number}",
            step_s=[step_s] * 5,
            fields={"code_digest": "the same files"},
        )
        for name, times in (("zeropp", (1.0, 1.2, 1.3)), ("deepspeed_3d", (2.4,)))
        for number, step_s in enumerate(times)
    ]
    rows = with_speedups(latest_ok(frame_of(*records, root=tmp_path)), "deepspeed_3d")
    (row,) = rows.query("contender == 'zeropp'").to_dict("records")
    assert row["speedup"] == pytest.approx(2.0)
    assert row["speedup_low"] < 1.5 < 2.5 < row["speedup_high"]


def test_every_point_is_to_run_as_often_as_asked_for(tmp_path: Path) -> None:
    points = [plan_point(spec_of(num_gpus=count)) for count in (2, 4)]
    today = {"code_digest": read_code(ask_git=False).digest}

    def missing(repeats: int) -> Counter[int]:
        todo, _ = still_to_run(
            points, tmp_path, provenance="measured", variant="", rerun="missing", repeats=repeats
        )
        return Counter(point.spec.num_gpus for point in todo)

    assert missing(3) == {2: 3, 4: 3}
    for number in (1, 2):
        place = tmp_path / points[0].spec.spec_id / f"local-{number}"
        record = make_record(attempt=f"local-{number}", fields=today)
        record.write(place / "record.json")
    assert missing(3) == {2: 1, 4: 3}
    assert missing(1) == {4: 1}
    # Runs with other files are another row, which says nothing of this one until it is whole.
    for number, gone in enumerate(({2: 1, 4: 3}, {2: 1, 4: 3}, {4: 3})):
        place = tmp_path / points[0].spec.spec_id / f"others-{number}"
        record = make_record(attempt=place.name, fields={"code_digest": "other files"})
        record.write(place / "record.json")
        assert missing(3) == gone
    assert missing(1) == {4: 1}


@pytest.mark.parametrize(
    "words",
    [
        "model=gpt_tiny,llama_tiny ++model.document=16,32 ~launcher.steps",
        "contender=glob(z*) contender.pp=2,1 sequences_per_gpu=2",
        "launcher=slurm launcher.setup=[a,b],[c] +launcher.queues={1:{partition:x}},{}",
        "cluster=h100,a100 cluster.device.memory_gib=40,80 seed=null",
    ],
)
def test_a_point_of_a_sweep_is_what_it_is_alone(words: str) -> None:
    """Groups are composed once for points that share them."""
    parsed = [_parsed(word.replace("glob(z*)", "zeropp")) for word in words.split()]
    (points,) = BasicSweeper.split_arguments(parsed, None)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        alone = [_plain(hydra.compose("config", [*map(_any_knob, point)])) for point in points]
    assert compose("config", ["-m", *words.split()]) == alone


def test_an_experiment_lists_points_of_several_contenders() -> None:
    listed = yaml.safe_load((CHECKOUT / "conf/experiment/peers.yaml").read_text("utf-8"))["points"]
    of = Counter(line.split()[0] for line in listed)
    assert len(of) == 5
    assert min(of.values()) >= 3  # each contender in three configurations
    few = compose("config", ["experiment=peers", "contender=fsdp,zeropp", "model=gpt_tiny"])
    assert {point["model"]["name"] for point in few} == {"gpt_tiny"}
    found = Counter(f"contender={point['contender']['name']}" for point in few)
    assert found == {name: of[name] for name in ("contender=fsdp", "contender=zeropp")}


@pytest.mark.parametrize(
    ("samples", "doubt"),
    [
        ([1.0], "1 step"),
        ([1.0, 1.1, 1.2, 1.3], "4 steps"),
        ([1.0, 2.0, 1.0, 3.0, 1.5, 2.5], "spread 71.4 %"),
        ([1.0, 1.001, 1.0], ""),  # a spread of 0 % leaves nothing in doubt
        ([1.0, 1.01, 1.02, 1.0, 1.01, 1.02, 1.01], ""),
    ],
)
def test_few_or_scattered_samples_are_doubted_with_the_reason(
    samples: list[float], doubt: str
) -> None:
    summary = summarise(samples)
    assert summary.doubt == doubt
    assert summary.low <= summary.median <= summary.high
    assert (summary.low < summary.high) == (len(samples) > 1)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no median"):
        summarise([])


def test_few_samples_have_wide_intervals() -> None:
    for width, next_runs in ((math.sqrt(1 + math.pi / 4), 1), (math.sqrt(math.pi / 4), 0)):
        # Student's quantiles are those of any table.
        assert half_width([2], 1.0, 1, next_runs) == pytest.approx(12.706 * width, rel=1e-4)
        assert half_width([2], 1.0, 30, next_runs) == pytest.approx(2.0423 * width, rel=1e-4)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    draw = random.Random(1)
    hits = ratios = 0
    for _ in range(200):
        first, second = ([draw.gauss(1.0, 0.05) for _ in range(20)] for _ in range(2))
        summary, ratio = summarise(first), ratio_of_medians(first, second)
        hits += summary.low <= 1.0 <= summary.high
        ratios += ratio.low <= 1.0 <= ratio.high
    assert 180 <= hits <= 198  # 95 % nominal
    assert 180 <= ratios <= 198


def test_ratio_finds_a_real_difference() -> None:
    draw = random.Random(2)
    slow, fast = ([base + 0.02 * draw.random() for _ in range(10)] for base in (1.2, 1.0))
    assert ratio_of_medians(slow, fast).low > 1.15
