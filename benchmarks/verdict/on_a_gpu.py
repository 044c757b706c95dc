"""What one GPU says of the verdict's prices: a rank alone of each program, described and measured
(``results/reference/one_gpu``), and where the medians would be if all plans were as far off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import pandas as pd

from benchmarks.report.one_gpu import one_gpu_tables
from benchmarks.verdict.judge import BASELINES
from benchmarks.verdict.uncertainty import Interval

# Whose ratio stands for a row of the verdict; ZeRO-3 has none. Megatron-Core ran with its own
# layers there, without Transformer Engine.
_RAN = {
    "megatron_core": "megatron_core_local",
    "deepspeed_3d": "deepspeed_3d",
    "fsdp": "fsdp",
}
_LABELS = {
    "zeropp": "ZeroPP",
    "deepspeed_3d": "DeepSpeed",
    "fsdp": "FSDP2",
    "megatron_core_local": "Megatron-Core with its own layers",
}


def card_ratios(folder: Path) -> dict[str, list[float]]:
    """Described over measured steps by contender, of the points without tensor parallelism: those
    with it were bound by the host, or computed with numbers that are none."""
    (steps,) = (table.data for table in one_gpu_tables(folder) if table.name == "steps")
    kept: pd.DataFrame = steps[~steps["layout"].str.contains(r"\btp=")]
    groups = kept.groupby("contender")["described_over_measured"]
    return {str(name): sorted(ratios) for name, ratios in groups}


def on_a_gpu(medians: Mapping[str, Mapping[str, Interval]], folder: Path) -> str:
    """The ratios, and the ``medians`` of the verdict times how far they differ."""
    ratios = card_ratios(folder)
    seen = "; ".join(
        f"{_LABELS[name]} {median(ratios[name]):.2f} ({_points(ratios[name])})" for name in _LABELS
    )
    moved = []
    for row, ran in _RAN.items():
        factor = median(ratios["zeropp"]) / median(ratios[ran])
        values = [interval.value for interval in medians[row].values()]
        before, after = (_pair([v * f for v in values]) for f in (1.0, factor))
        moved.append(f"over {BASELINES[row]} {after} for {before}")
    return (
        "One H100 has run a rank alone of each program, without network and peers. Described over "
        f"measured steps, in the median: {seen}. Were all prices of these programs as far off, the "
        f"medians with one and with four or more sequences would be {'; '.join(moved)}."
    )


def _points(ratios: Sequence[float]) -> str:
    return f"{len(ratios)} point{'s' * (len(ratios) > 1)}"


def _pair(values: Sequence[float]) -> str:
    return " and ".join(f"{value:.2f}" for value in values)
