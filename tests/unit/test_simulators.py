"""The simulators of others: how a run is put to them, and what is said of their answers."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest

from benchmarks.studies.simulators import (
    calculon,
    compare,
    dlcalc,
    llm_analysis,
    runs,
    simumax,
    worker,
)
from benchmarks.studies.validation.rows import METRICS, PUBLISHED, read_rows


def run(**changed: Any) -> dict[str, Any]:
    """A run of Megatron-LM that all four express, but for ``changed``."""
    return {
        "layers": 48, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn": 28672, "vocab": 32000,
        "seq": 4096, "gated_mlp": True, "tied_embeddings": False, "rotary": True,
        "device": "a100", "memory_gib": 80.0, "memory_gb_s": 2039.0, "peak_tflops": 312.0,
        "gpus_per_node": 8, "link_gb_s": 300.0, "node_gb_s": 100.0,
        "num_gpus": 64, "tp": 4, "pp": 4, "chunks": 2, "dp": 4, "cp": 1, "zero": 1,
        "zero3_group": 4, "sequence_parallel": True, "schedule": "interleaved_1f1b", "even": True,
        "micro_batch": 2, "num_microbatches": 16, "global_batch": 128, "recompute": "none",
        "selective": "scores", "recompute_blocks": 0, "dtype": "bf16", "flash": True,
        "overlap_gradients": True,
    } | changed  # fmt: skip


@pytest.mark.parametrize("adapter", [dlcalc, llm_analysis, simumax])
def test_a_run_that_is_expressed(adapter: Any) -> None:
    assert adapter.refusal(run()) == ""


@pytest.mark.parametrize(
    ("adapter", "changed", "reason"),
    [
        (calculon, {}, "fused attention"),
        (calculon, {"flash": False, "kv_heads": 8}, "grouped-query attention"),
        (calculon, {"device": "b200"}, "the GPU: no file of it"),
        (dlcalc, {"sequence_parallel": False}, "tensor parallelism without sequence parallelism"),
        (dlcalc, {"recompute": "full"}, "the time of full recomputation"),
        (dlcalc, {"zero": 0}, "data parallelism without a distributed optimizer"),
        (llm_analysis, {"cp": 2}, "context parallelism"),
        (llm_analysis, {"recompute_blocks": 24}, "recomputation of some blocks only"),
        (simumax, {"zero": 3}, "ZeRO-2 and ZeRO-3"),
        (simumax, {"recompute": "full", "recompute_blocks": 20}, "unequally many recomputed"),
        (simumax, {"device": "h100"}, "the GPU: no file of it"),
    ],
)
def test_a_run_that_is_not_expressed(adapter: Any, changed: dict[str, Any], reason: str) -> None:
    assert reason in adapter.refusal(run(**changed))


def test_calculon_is_told_the_same_flops_and_where_groups_are() -> None:
    told = calculon.application(run())
    assert 2 * told["hidden"] * told["feedforward"] == 3 * 8192 * 28672
    execution = calculon.execution(run())
    nets = [execution[f"{name}_par_net"] for name in ("tensor", "pipeline", "data")]
    assert nets == [0, 1, 1]
    assert calculon.execution(run(dp=2, num_gpus=32))["data_par_net"] == 0
    shipped = {"mem1": {"GiB": 80, "GBps": 2048}, "networks": [{"size": 8}, {"size": 65536}]}
    inside, outside = calculon.system(run(), shipped)["networks"]
    assert (inside["bandwidth"], outside["bandwidth"]) == (300.0, 12.5)  # of one GPU


def test_llm_analysis_prices_gathers_of_zero_3_alone() -> None:
    sharded = llm_analysis.parallelism(run(zero=3, dp=16, zero3_group=8))
    assert (sharded["dp_size"], sharded["rdp_size"]) == (8, 2)
    replicated = llm_analysis.parallelism(run(zero=1, dp=16))
    assert (replicated["dp_size"], replicated["rdp_size"]) == (1, 16)


def test_simumax_recomputes_blocks_per_stage() -> None:
    told = simumax.strategy(run(recompute="full", recompute_blocks=24))
    assert (told["recompute_granularity"], told["recompute_layer_num"]) == ("full_block", 3)
    assert simumax.strategy(run(recompute="full"))["recompute_layer_num"] == 6


def test_dlcalc_says_its_parts_in_colours() -> None:
    parts = zip(dlcalc._PARTS, (1000.25, 20.5, 30.5, 40.0, 8.75), strict=True)
    text = "".join(f"  {name.ljust(20)} \x1b[91m{ms:8.2f} ms\x1b[0m   9.0%\n" for name, ms in parts)
    said = f"  Optimizer Step   \x1b[91m 7.00 ms\nITERATION TIME COMPONENTS\n{text}"
    assert dlcalc.seconds(said) == pytest.approx(1.1)
    assert dlcalc.buckets(run(layers=1, pp=4, tp=4)) == 1


def test_what_a_simulator_refuses_itself_is_recorded_in_its_words() -> None:
    adapter: Any = Mock()
    adapter.refusal.return_value = ""
    adapter.step_s.side_effect = [2.5, ValueError("512 not divisible by 72\nmore")]
    assert worker.answer(adapter, run()) == {"step_s": 2.5}
    said = {"reason": "it ends with ValueError: 512 not divisible by 72"}
    assert worker.answer(adapter, run()) == said
    adapter.refusal.return_value = "ZeRO-3"
    assert worker.answer(adapter, run()) == {"reason": "ZeRO-3"}


def test_a_constant_is_that_of_the_others_of_a_group() -> None:
    ratios = pd.Series([2.0, 2.0, 1.0, 3.0])
    groups = [pd.Series(["a", "a", "a", "b"]), pd.Series(["h100"] * 4)]
    left = compare.without_constant(ratios, groups)
    assert left.to_dict() == {0: 2 / 1.5, 1: 2 / 1.5, 2: 0.5}  # and the fourth is alone


def test_runs_are_put_with_the_columns_of_their_rows() -> None:
    told, seconds = runs.timed_runs(read_rows(PUBLISHED / "act_recompute.csv"))[
        "act_recompute.csv:2"
    ]
    assert seconds == 1.42
    assert (told["hidden"], told["tp"], told["recompute"], told["flash"]) == (
        6144,
        8,
        "full",
        False,
    )
    assert (told["link_gb_s"], told["node_gb_s"], told["gpus_per_node"]) == (300, 200, 8)


def test_every_simulator_was_asked_about_every_run_that_ours_prices() -> None:
    answers = pd.read_csv(compare.ANSWERS, dtype={"value": str})
    validation = pd.read_csv(
        compare.ANSWERS.parents[1] / "validation" / "validation.csv", low_memory=False
    )
    timed = validation["metric"].map(lambda name: METRICS[name].kind in runs.TIMED)
    priced = validation[timed & (validation["first_of_run"] == "yes")].set_index("place")
    for _, own in answers.groupby("simulator"):
        values = own.set_index("place")["value"]
        assert set(priced.index) <= set(values.index)
        assert (values.loc[priced.index] == priced["value"]).all()
    told = answers["step_s"].notna()
    assert (told != answers["reason"].notna()).all()
