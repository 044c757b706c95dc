"""Today's question: its cells and tables, and the published pairs beside them."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from benchmarks.specification.compose import compose
from benchmarks.specification.contenders import TODAY
from benchmarks.specification.reading import validated
from benchmarks.validation.rows import read_rows, training_tables
from benchmarks.verdict.measured_pairs import measured_pairs, tokens_per_s_per_gpu
from benchmarks.verdict.today import TodaySpec, today_tables

PLANS = {
    "zeropp": (10.0, "shard=64 b=1"),
    "zeropp_whole_sequences": (12.0, "shard=64 b=1"),
    "fsdp": (11.0, "shard=64 b=2"),
    "megatron_core_tp1": (14.0, "pp=8 replicate=8 b=1"),
    "megatron_core": (9.0, "tp=8 pp=4 replicate=2 b=2"),
}


def _rows(**changed: float) -> pd.DataFrame:
    lines: list[dict[str, Any]] = [
        {
            "model": "llama", "cluster": "h100", "num_gpus": 64, "global_batch": 256,
            "bandwidth": 1.0, "contender": name, "mode": "best",
            "step_s": changed.get(name, step_s), "plan": plan,
        }
        for name, (step_s, plan) in PLANS.items()
    ]  # fmt: skip
    return pd.DataFrame(lines)


def test_the_experiment_names_each_model_at_its_sequence() -> None:
    (config,) = compose("config", ["experiment=today"])
    spec: TodaySpec = validated(TodaySpec, config["today"], "today")
    cells = list(spec.cells("bf16"))
    assert len({cell.key for cell in cells}) == len(cells)
    sequences = {cell.task.shape.name: cell.task.shape.seq for cell in cells}
    assert (sequences["llama_405b"], sequences["llama_70b_32k"]) == (8192, 32768)


def test_speeds_are_zeropp_over_the_others() -> None:
    (line,) = today_tables(_rows())["speeds"].splitlines()[2:]
    texts = line.strip("| ").split(" | ")[2:]
    cells = dict(zip([name for name in TODAY if name != "zeropp"], texts, strict=True))
    assert cells["fsdp"] == "1.10"
    assert cells["megatron_core"].startswith("0.90")
    assert cells["torchtitan"] == "-"


@pytest.mark.parametrize(
    ("zeropp", "divided", "whole"),
    [(10.0, "**1.11**", "**1.22**"), (9.2, "**1.02**", "**1.22**"), (8.0, "**0.89**", "**1.22**")],
)
def test_the_fastest_plans_with_and_without_tensor_parallelism_are_compared(
    zeropp: float, divided: str, whole: str
) -> None:
    first, second = today_tables(_rows(zeropp=zeropp))["summary"].split("; with whole")
    assert divided in first
    assert whole in second
    assert ("in **1** of them" in first) == (zeropp > 9.0 * 1.06)
    assert "in **1** of them" in second


def test_a_pair_has_equal_work_on_both_sides() -> None:
    pairs = measured_pairs()
    assert len(pairs) > 20
    for pair in pairs:
        a, b = pair.without, pair.tensor
        assert (a.tp, a.hidden, a.device, a.num_gpus, a.seq) == (
            1, b.hidden, b.device, b.num_gpus, b.seq,
        )  # fmt: skip
        assert b.tp > 1
        assert 0.5 <= a.global_batch / b.global_batch <= 2


def test_tokens_follow_from_every_metric_that_needs_no_flops() -> None:
    rows = [line.row for path in training_tables() for line in read_rows(path) if line.row]
    by_metric = {row.metric: row for row in rows}
    one = by_metric["step_time"].model_copy(
        update={"unit": "s", "value": "2", "num_gpus": 4, "global_batch": 8, "seq": 100}
    )
    assert tokens_per_s_per_gpu(one) == 100
    same = {
        "steps_per_s": ("1/s", "0.5"), "samples_per_s": ("samples/s", "4"),
        "samples_per_s_per_gpu": ("samples/s/GPU", "1"), "tokens_per_s": ("tok/s", "400"),
        "tokens_per_s_per_gpu": ("tok/s/GPU", "100"),
    }  # fmt: skip
    for metric, (unit, value) in same.items():
        row = one.model_copy(update={"metric": metric, "unit": unit, "value": value})
        assert tokens_per_s_per_gpu(row) == 100, metric
    assert math.isnan(tokens_per_s_per_gpu(one.model_copy(update={"metric": "mfu", "unit": "%"})))
