"""The cluster of a row: a preset named in its ``gpu`` text, with the memory and network it states.

Rules: the device is the first preset whose name the text has; "40GB" of an A100 lowers memory and
bandwidth; "4x HDR200", "1600Gb/s ... /node" and "400 Gb/s per GPU" set the network between nodes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from benchmarks.compose import preset
from benchmarks.validate.rows import UnpredictableError
from zeropp.cost.cluster import Cluster

_DEVICES = ("h200", "h800", "h100", "a800", "a100", "v100")
_LINKS_A_NODE = re.compile(
    r"(\d+)\s*x\s*(?:hdr|ndr|edr|ib)?\s*(\d+)\s*(?:gb?(?:ps|it|/s)?|/node|\b)"
)
LINK_RATES = (25, 50, 100, 200, 400, 800)  # Gb/s; other numbers are memory sizes
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb/s|gbps|gbit/s|gb|tb/s|tbps)")


@lru_cache(maxsize=1024)
def cluster_of(text: str) -> Cluster:
    """The cluster that a ``gpu`` text describes."""
    text = text.lower()
    name = next((device for device in _DEVICES if device in text), None)
    if name is None:
        raise UnpredictableError(f"gpu={text!r}: no device preset (known: {', '.join(_DEVICES)})")
    cluster: Cluster = preset("cluster", name, Cluster)
    if re.search(r"\b40\s*g", text) and name == "a100":
        device = replace(cluster.device, memory_gib=40, memory_bandwidth_gb_s=1555)
        cluster = replace(cluster, device=device)
    if re.search(r"\b16\s*g", text) and name == "v100":
        cluster = replace(cluster, device=replace(cluster.device, memory_gib=16))
    return _with_network(cluster, text)


def _with_network(cluster: Cluster, text: str) -> Cluster:
    links = _LINKS_A_NODE.search(text)
    if links and int(links.group(2)) in LINK_RATES:
        rate = int(links.group(2)) / 8
        return _network(cluster, int(links.group(1)), rate)
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
