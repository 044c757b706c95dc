"""What one GPU says of the verdict's prices."""

from __future__ import annotations

import pytest

from benchmarks import CHECKOUT
from benchmarks.verdict.on_a_gpu import card_ratios, on_a_gpu
from benchmarks.verdict.uncertainty import Interval

FOLDER = CHECKOUT / "results/reference/one_gpu"
ROWS = ("deepspeed_3d", "fsdp")


def test_every_program_is_seen_in_the_same_cell() -> None:
    ratios = card_ratios(FOLDER)
    assert set(ratios) == {"zeropp", "fsdp", "deepspeed_3d", "megatron_core_local"}
    assert all(0.9 < ratio < 1.1 for ratio in ratios.values())


@pytest.mark.parametrize("row", ROWS)
def test_a_median_moves_by_how_far_both_programs_are_off(row: str) -> None:
    medians = {name: {"1": Interval(1.0, 0.9, 1.1), "4": Interval(2.0, 1.9, 2.1)} for name in ROWS}
    text, ratios = on_a_gpu(medians, FOLDER), card_ratios(FOLDER)
    factor = ratios["zeropp"] / ratios[row]
    assert f"{factor:.2f} and {2 * factor:.2f} for 1.00 and 2.00" in text
