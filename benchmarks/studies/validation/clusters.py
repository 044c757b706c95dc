"""The cluster of a row, from its ``gpu`` text: a preset with the sizes and network that it states.

Rules. The device is the first preset whose name the text has. B200 and GB200 are an H100 whose
peak, memory and links are those of ``hardware.csv``: they keep its shares of them. A text with a
peak ("181 TFLOP/s"), a memory size and a memory bandwidth ("96 GB", "1.6 TB/s") is an A100 with
these. "96GB" sets the memory, "HBM2e" of an H100 its bandwidth, "500W" the clocks (products run at
the root of the power's ratio: power grows with frequency and voltage), "PCIe" the links inside a
node. "4x HDR200", "8 links (100 Gb/s)", "1600Gb/s ... /node" and "400 Gb/s per GPU" set the network
between nodes, "4 GPUs per node" how many share it.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from functools import lru_cache

from benchmarks import CHECKOUT
from benchmarks.specification.compose import preset
from benchmarks.studies.validation.rows import UnpredictableError
from zeropp.cluster import Cluster, Device, Link

_HARDWARE = CHECKOUT / "results" / "published" / "hardware.csv"
_DEVICES = ("h200", "h800", "h100", "a800", "a100", "v100")
_FACTS = ("gb200", "b200")  # devices of hardware.csv without a preset
_POWER_W = {"v100": 300, "a100": 400, "a800": 400, "h100": 700, "h800": 700, "h200": 700}
_PCIE_GB_S = {"v100": 15.5, "a100": 31.0, "a800": 31.0, "h100": 63.0, "h800": 63.0, "h200": 63.0}
_LINKS_A_NODE = re.compile(
    r"\b(\d+)(?:\s*x\s*(?:hdr|ndr|edr|ib)?|\s+(?:omni-?path|ib|infiniband)?\s*(?:links?|nics?))"
    r"\s*\(?(\d+)\s*(?:gb?(?:ps|it|/s)?|/node|\b)"
)
_GPUS_A_NODE = re.compile(
    r"(?<![\w.])([1-9]|1[0-6])\s*(?:x\s*)?(?:gpus?|[avhb]\d00s?)?\s*(?:/|per |a |each )\s*node"
)
LINK_RATES = (25, 50, 100, 200, 400, 800)  # Gb/s; other numbers are memory sizes
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb/s|gbps|gbit/s|gb|tb/s|tbps)")
_MEMORY = re.compile(r"\b(16|24|32|40|48|64|80|94|96|120|128|141|144|180|192)\s*g(?:i?b)?\b")


@lru_cache(maxsize=1024)
def cluster_of(text: str) -> Cluster:
    """The cluster that a ``gpu`` text describes."""
    text = text.lower()
    name = next((device for device in _DEVICES if _names(text, device)), None)
    facts = next((device for device in _FACTS if _names(text, device)), None)
    if facts:
        cluster = _from_facts(facts)
    elif name:
        cluster = _as_stated(preset("cluster", name, Cluster), text)
    else:
        cluster = _from_text(text)
    gpus = _GPUS_A_NODE.search(text)
    if gpus:
        count = int(gpus[1])
        nics = min(cluster.nics_per_node, count)
        cluster = replace(cluster, gpus_per_node=count, nics_per_node=nics)
    return _with_network(cluster, text)


def _names(text: str, device: str) -> bool:
    """Whether a text has the name as a word; a number of them may stand before it (8xH100)."""
    return re.search(rf"(?:(?<![a-z0-9])|(?<=\dx)){device}(?!\d)", text) is not None


def _as_stated(cluster: Cluster, text: str) -> Cluster:
    """A preset's device with the memory and power of the text, and PCIe for NVLink."""
    device, intra = cluster.device, cluster.intra
    memory = _MEMORY.search(text)
    if memory:
        device = replace(device, memory_gib=float(memory[1]))
    if device.name == "a100" and device.memory_gib == 40:
        device = replace(device, memory_bandwidth_gb_s=1555)
    if device.name == "h100" and "hbm2e" in text:
        device = replace(device, memory_bandwidth_gb_s=2400)
    power = re.search(r"\b(\d{3,4})\s*w\b", text)
    if power:
        device = _at_rate(device, (float(power[1]) / _POWER_W[device.name]) ** 0.5)
    if "pcie" in text:
        intra = replace(intra, bandwidth_gb_s=_PCIE_GB_S[device.name])
    return replace(cluster, device=device, intra=intra)


def _at_rate(device: Device, factor: float) -> Device:
    return replace(
        device,
        matmul_bf16_tflops=device.matmul_bf16_tflops * factor,
        matmul_fp32_tflops=device.matmul_fp32_tflops * factor,
    )


@lru_cache(maxsize=2)
def _from_facts(name: str) -> Cluster:
    """An H100 scaled to the facts of another device; what is not listed is the B200's."""
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
    assert base.device.peak_bf16_tflops is not None
    peak = fact("peak bf16 dense")
    device = replace(
        _at_rate(base.device, peak / base.device.peak_bf16_tflops),
        name=name,
        peak_bf16_tflops=peak,
        memory_gib=fact("HBM capacity"),
        memory_bandwidth_gb_s=fact("HBM bandwidth") * 1e3,
    )
    link = fact("NVLink per GPU, one direction")
    return replace(base, name=name, device=device, intra=replace(base.intra, bandwidth_gb_s=link))


def _from_text(text: str) -> Cluster:
    """A device that the text itself describes, with an A100's shares of its peaks."""
    peak = re.search(r"(\d+(?:\.\d+)?)\s*tflop", text)
    bandwidth = re.search(r"(\d+(?:\.\d+)?)\s*tb/s", text)
    memory = _MEMORY.search(text)
    if not (peak and bandwidth and memory):
        raise UnpredictableError(
            f"gpu={text!r}: no device preset (known: {', '.join(_DEVICES + _FACTS)}), and not its "
            "peak (TFLOP/s), memory (GB) and memory bandwidth (TB/s); or give --cluster NAME"
        )
    base: Cluster = preset("cluster", "a100", Cluster)
    assert base.device.peak_bf16_tflops is not None
    device = replace(
        _at_rate(base.device, float(peak[1]) / base.device.peak_bf16_tflops),
        name="stated",
        peak_bf16_tflops=float(peak[1]),
        memory_gib=float(memory[1]),
        memory_bandwidth_gb_s=float(bandwidth[1]) * 1e3,
    )
    intra: Link = base.intra
    if "pcie" in text:
        intra = replace(intra, bandwidth_gb_s=_PCIE_GB_S["a100"])
    return replace(base, name="stated", device=device, intra=intra)


def _with_network(cluster: Cluster, text: str) -> Cluster:
    for links in _LINKS_A_NODE.finditer(text):
        if int(links[2]) in LINK_RATES:
            return _network(cluster, int(links[1]), int(links[2]) / 8)
    for match in _RATE.finditer(text):
        gbit = float(match.group(1)) * (1000 if match.group(2).startswith("t") else 1)
        around = text[match.start() : match.end() + 24]
        if match.group(2) == "gb" or gbit < 10:
            continue  # a memory size
        if "gpu" in around:
            return _network(cluster, cluster.gpus_per_node, gbit / 8)
        if "node" in around or "roce" in around or "ib" in around:
            return _network(cluster, cluster.nics_per_node, gbit / 8 / cluster.nics_per_node)
    return cluster


def _network(cluster: Cluster, nics: int, gigabytes: float) -> Cluster:
    return replace(
        cluster, nics_per_node=nics, inter=replace(cluster.inter, bandwidth_gb_s=gigabytes)
    )
