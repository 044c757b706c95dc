"""The cluster of a row: its device's preset in ``conf/cluster``, with the numbers of the row.

B200 and GB200 have no preset. They are made from an H100 whose peak, memory and links are replaced
by those of ``results/published/hardware.csv``; the share of them that is reached stays the same.
``device=stated`` is an A100 that is scaled in the same way to the row's peak, memory and memory
bandwidth. ``power_w`` changes the clocks: the rate of products changes with the square root of the
power, because power grows with frequency and voltage.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import lru_cache
from typing import Any

from benchmarks import CHECKOUT
from benchmarks.specification.compose import preset
from benchmarks.studies.validation.rows import POWER_W, PublishedRow, UnpredictableError
from zeropp.cluster import Cluster, Device

_HARDWARE = CHECKOUT / "results" / "published" / "hardware.csv"
_FACTS = ("b200", "gb200")  # devices that have no preset, but are in hardware.csv
_PCIE_GB_S = {
    "v100": 15.5, "a100": 31.0, "a800": 31.0, "h100": 63.0, "h800": 63.0, "h200": 63.0,
    "b200": 63.0, "gb200": 63.0, "stated": 31.0,
}  # fmt: skip


def cluster_of(row: PublishedRow) -> Cluster:
    """The cluster that a row describes."""
    cluster = _base(row.device)
    device = cluster.device
    if row.peak_bf16_tflops:
        device = with_peak(device, row.peak_bf16_tflops)
    if row.power_w:
        device = at_rate(device, (row.power_w / POWER_W[row.device]) ** 0.5)
    stated = {
        "memory_gib": row.memory_gib,
        "memory_bandwidth_gb_s": row.memory_bandwidth_gb_s,
    }
    device = replace(device, **_given(stated))
    intra, inter = cluster.intra, cluster.inter
    if row.intra_link == "pcie":
        intra = replace(intra, bandwidth_gb_s=_PCIE_GB_S[row.device])
    if row.intra_gb_s:
        intra = replace(intra, bandwidth_gb_s=row.intra_gb_s)
    if row.nic_gbit_s:
        inter = replace(inter, bandwidth_gb_s=row.nic_gbit_s / 8)
    gpus = row.gpus_per_node or cluster.gpus_per_node
    nics = row.nics_per_node or min(cluster.nics_per_node, gpus)
    return replace(
        cluster, device=device, intra=intra, inter=inter, gpus_per_node=gpus, nics_per_node=nics
    )


def _given(values: dict[str, float | None]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def at_rate(device: Device, factor: float) -> Device:
    """The device with products that run ``factor`` times as fast."""
    return replace(
        device,
        matmul_bf16_tflops=device.matmul_bf16_tflops * factor,
        matmul_fp32_tflops=device.matmul_fp32_tflops * factor,
    )


def with_peak(device: Device, tflops: float) -> Device:
    """The device with another dense 16-bit peak in TFLOP/s, of which it reaches the same share.
    Raises UnpredictableError where the device's own peak is not known."""
    if device.peak_bf16_tflops is None:
        raise UnpredictableError(f"peak_bf16_tflops={tflops:g}: {device.name}'s own is not known")
    scaled = at_rate(device, tflops / device.peak_bf16_tflops)
    return replace(scaled, peak_bf16_tflops=tflops)


@lru_cache(maxsize=16)
def _base(name: str) -> Cluster:
    """A device's preset, or a cluster made from the most similar preset if it has none."""
    if name in _FACTS:
        return _from_facts(name)
    cluster: Cluster = preset("cluster", "a100" if name == "stated" else name, Cluster)
    if name == "stated":
        cluster = replace(cluster, name=name, device=replace(cluster.device, name=name))
    return cluster


def _from_facts(name: str) -> Cluster:
    """An H100 scaled to another device's numbers in hardware.csv; those that are missing are the
    B200's."""
    with _HARDWARE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def fact(quantity: str) -> float:
        found = [
            float(row["value"])
            for device in (name, "b200")
            for row in rows
            if row["device"].lower().split()[0] == device and row["quantity"] == quantity
        ]
        return found[0]

    base: Cluster = preset("cluster", "h100", Cluster)
    device = replace(
        with_peak(base.device, fact("peak bf16 dense")),
        name=name,
        memory_gib=fact("HBM capacity"),
        memory_bandwidth_gb_s=fact("HBM bandwidth") * 1e3,
    )
    link = fact("NVLink per GPU, one direction")
    return replace(base, name=name, device=device, intra=replace(base.intra, bandwidth_gb_s=link))
