"""What one GPU says of the verdict's prices: a rank alone of each program, described and measured
(``results/reference/one_gpu``), and where the medians would be if all plans were as far off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from benchmarks.report.one_gpu import one_gpu_tables
from benchmarks.verdict.judge import BASELINES
from benchmarks.verdict.uncertainty import Interval

# The rows of the verdict whose program ran. Megatron-Core ran with its own layers, without
# Transformer Engine, and so says nothing of its row.
_RAN = ("deepspeed_3d", "fsdp")
_LABELS = {
    "zeropp": "ZeroPP",
    "deepspeed_3d": "DeepSpeed",
    "fsdp": "FSDP2",
    "megatron_core_local": "Megatron-Core with its own layers",
}


def card_ratios(folder: Path) -> dict[str, float]:
    """Described over measured time by contender, of all actions of its best plan in the one cell
    that every program ran without tensor parallelism. What a step does outside its actions is the
    copies of collectives that are not there."""
    (actions,) = (table.data for table in one_gpu_tables(folder) if table.name == "actions")
    cell: pd.DataFrame = actions[
        actions["point"].str.startswith("a_") & (actions["action"] == "all")
    ]
    return dict(zip(cell["contender"], cell["described_over_measured"], strict=True))


def on_a_gpu(medians: Mapping[str, Mapping[str, Interval]], folder: Path) -> str:
    """The ratios, and the ``medians`` of the verdict times how far they differ."""
    ratios = card_ratios(folder)
    seen = "; ".join(f"{label} {ratios[name]:.2f}" for name, label in _LABELS.items())
    moved = []
    for row in _RAN:
        factor = ratios["zeropp"] / ratios[row]
        values = [interval.value for interval in medians[row].values()]
        before, after = (_pair([v * f for v in values]) for f in (1.0, factor))
        moved.append(f"over {BASELINES[row]} {after} for {before}")
    return (
        "One H100 has run one rank alone of each program, without network and peers: the best plan "
        "of one cell (6.2B, 64 H100). Described over measured time of its forwards, backwards and "
        f"update: {seen}. Were all prices of these programs as far off, the medians with one and "
        f"with four or more sequences would be {'; '.join(moved)}."
    )


def _pair(values: Sequence[float]) -> str:
    return " and ".join(f"{value:.2f}" for value in values)
