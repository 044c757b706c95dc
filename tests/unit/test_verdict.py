"""The verdict: what the tuner prices is what the contenders' planners run, and the committed
tables follow from the committed rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.specification.contenders import CONTENDERS
from benchmarks.studies.claim_33.judge import BASELINES, CLAIM, judge, summary
from tests.unit.simulated_task import task
from zeropp.sim.simulator import simulate
from zeropp.tune.search import search

REFERENCE = Path(__file__).resolve().parents[2] / "results" / "reference" / "claim_33"


@pytest.mark.parametrize("name", CONTENDERS)
def test_the_contenders_planner_gives_the_plan_that_was_priced(name: str) -> None:
    what, contender = task(64, 128), CONTENDERS[name]
    winner = search(what, contender, tolerance=0.05).winner
    assert winner is not None
    ran = simulate(contender.plan(what, winner.candidate), what.cluster)
    assert (ran.step_s, ran.peak_bytes) == (winner.step_s, winner.peak_bytes)


def test_a_cell_is_judged_by_its_speed_up() -> None:
    speeds = {"zeropp": 133.0, "deepspeed_3d": 100.0, "megatron_core": 120.0, "best_3d": 132.0}
    rows = [
        {
            "model": "m",
            "cluster": "c",
            "num_gpus": 8,
            "global_batch": 8,
            "bandwidth": 1.0,
            "contender": name,
            "mode": "best",
            "tokens_per_s_per_gpu": speed,
            "peak_gib": 10.0,
            "bubble": 0.1,
        }
        for name, speed in speeds.items()
    ]
    verdict = judge(pd.DataFrame(rows)).iloc[0]
    assert verdict["speedup_over_deepspeed_3d"] >= CLAIM
    assert verdict["verdict_over_deepspeed_3d"] == "reproduced"
    assert verdict["verdict_over_megatron_core"] == "faster, not reproduced"
    assert verdict["verdict_over_best_3d"] == "tie"
    assert verdict["regime"] == "small batch, idle 10 % in 3D"


def test_cells_in_which_zeropp_does_not_fit_are_told() -> None:
    def cell(batch: int, ours: float | None) -> list[dict[str, object]]:
        keys = {"model": "m", "cluster": "c", "num_gpus": 8, "global_batch": batch}
        keys |= {"bandwidth": 1.0, "mode": "best", "bubble": 0.1}
        speeds = {"zeropp": ours} | dict.fromkeys(BASELINES, 100.0)
        return [
            keys | {"contender": name, "tokens_per_s_per_gpu": speed, "peak_gib": speed}
            for name, speed in speeds.items()
        ]

    verdicts = judge(pd.DataFrame([*cell(8, 90.0), *cell(16, None)]))
    assert list(verdicts["verdict_over_best_3d"]) == [
        "slower, not reproduced",
        "ZeroPP does not fit",
    ]
    assert "1 cells, median 0.90" in summary(verdicts)
    assert summary(verdicts).count("In 1 more no plan of ZeroPP fits.") == len(BASELINES)


def test_committed_tables_follow_from_the_committed_rows() -> None:
    verdicts = judge(pd.read_csv(REFERENCE / "plans.csv"))
    assert summary(verdicts) == (REFERENCE / "verdict.md").read_text()
