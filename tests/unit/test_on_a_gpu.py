"""What one GPU says of the verdict's prices."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks import CHECKOUT
from benchmarks.verdict.on_a_gpu import card_ratios, on_a_gpu
from benchmarks.verdict.uncertainty import Interval

FOLDER = CHECKOUT / "results/reference/one_gpu"
ROWS = ("megatron_core", "deepspeed_3d", "fsdp")


def test_points_with_tensor_parallelism_are_left_out() -> None:
    ratios = card_ratios(FOLDER)
    assert {name: len(of) for name, of in ratios.items()} == {
        "zeropp": 4, "fsdp": 2, "deepspeed_3d": 1, "megatron_core_local": 1,
    }  # fmt: skip
    assert all(0.8 < ratio < 1.2 for of in ratios.values() for ratio in of)


@pytest.mark.parametrize("row", ROWS)
def test_a_median_moves_by_how_far_both_programs_are_off(row: str) -> None:
    medians = {name: {"1": Interval(1.0, 0.9, 1.1), "4": Interval(2.0, 1.9, 2.1)} for name in ROWS}
    text, ratios = on_a_gpu(medians, FOLDER), card_ratios(FOLDER)
    ran = {"megatron_core": "megatron_core_local", "fsdp": "fsdp"}.get(row, "deepspeed_3d")
    factor = median(ratios["zeropp"]) / median(ratios[ran])
    assert f"{factor:.2f} and {2 * factor:.2f} for 1.00 and 2.00" in text
