"""From the times of all ranks to a preset of ``conf/cluster``, and what looks wrong about them.

A constant is the median over the ranks. What was not measured (memory, peaks, nominal rates of
links) is that of the preset of the machine's kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np
import yaml

from benchmarks.calibrate.measure import Times
from benchmarks.specification.reading import validated
from zeropp.price.cluster import Cluster, Link

_SLOW_RANK = 1.05  # times the median of the ranks: a device that clocks lower, or is shared
_SLOW_LINK = 1.2
_LESS = 0.8  # of the preset's rate
_UNSTEADY = 0.15  # a spread beyond which a constant is not to be relied on
MEASURED = "# Measured on"  # how the files of this command begin
_LARGE = 2**20  # bytes from which on a collective's time tells its rate


@dataclass(frozen=True)
class MeasuredConstant:
    """A measured constant by its place in the preset's file, its spread, and the preset's value."""

    place: str  # device.kernel_us, intra.latency_us ...
    value: float
    spread: float
    preset: float


def constants_of(ranks: Sequence[Times], preset: Cluster, *, half: bool) -> list[MeasuredConstant]:
    """The constants that the times of all ranks say; ``half``: products had 16 bits."""
    of_ranks = [of_rank(times, preset, half=half) for times in ranks]
    constants = []
    for place in of_ranks[0]:
        values = [constants[place][0] for constants in of_ranks]
        middle = median(values)
        apart = max(abs(value - middle) for value in values) / middle if middle else 0.0
        spread = max(apart, median(constants[place][1] for constants in of_ranks))
        constants.append(MeasuredConstant(place, middle, spread, attrgetter(place)(preset)))
    return constants


def of_rank(times: Times, preset: Cluster, *, half: bool) -> dict[str, tuple[float, float]]:
    """(value, spread over repetitions) of every constant that one rank has measured, by its
    place."""
    device, rate = preset.device, _product_rate(times, preset)
    found = {
        f"device.matmul_{'bf16' if half else 'fp32'}_tflops": (rate / 1e12, 0.0),
        "device.launch_us": (times.launch.seconds * 1e6, times.launch.spread),
        "device.kernel_us": (0.0, 0.0),  # on a CPU all of it is the host's
    }
    if times.tiny is not None:
        found["device.kernel_us"] = times.tiny.seconds * 1e6, times.tiny.spread
    attention = times.attention_flops / times.attention.seconds
    found["device.attention_efficiency"] = min(1.0, attention / rate), times.attention.spread
    stream = times.stream_bytes / times.stream.seconds / 1e9
    if device.is_cpu:
        unknown, known = "memory_bandwidth_gb_s", device.memory_efficiency
    else:
        unknown, known = "memory_efficiency", device.memory_bandwidth_gb_s
    found[f"device.{unknown}"] = stream / known, times.stream.spread
    if times.beside is not None:
        # The share by which products took longer while the gather ran.
        longer_s = times.beside.seconds - times.alone.seconds
        slowdown = min(1.0, max(0.0, longer_s / min(times.alone.seconds, times.gather.seconds)))
        found["device.overlap_slowdown"] = slowdown, times.beside.spread
    for part, group in (("intra", "within a node"), ("inter", "across nodes")):
        if group in times.group_sizes:
            link, nominal_gb_s = getattr(preset, part), _nominal_gb_s(times, preset, part)
            start_us, gb_s = _line(times, group, link)
            spread = median(of.spread for key, of in times.collectives.items() if key[1] == group)
            found[f"{part}.latency_us"] = start_us, spread
            found[f"{part}.efficiency"] = gb_s / nominal_gb_s, spread
            if part == "intra":
                # How much faster the largest all-reduce is than two passes at the gathers' rate.
                size = times.group_sizes[group]
                count = max(count for _, name, count in times.collectives if name == group)
                reduced_s = times.collectives["all_reduce", group, count].seconds - 1e-6 * start_us
                passes_s = 2 * (size - 1) / size * count / (1e9 * gb_s)
                found["reduction_gain"] = passes_s / max(reduced_s, 1e-9), spread
    return found


def _product_rate(times: Times, preset: Cluster) -> float:
    """FLOP/s of a model's products: on a GPU, whose tiles and alignment are priced apart, the
    fastest; on a CPU all of them together."""
    flops = {sizes: 2.0 * math.prod(sizes) for sizes in times.products}
    if preset.device.units > 1:
        return max(flops[sizes] / of.seconds for sizes, of in times.products.items())
    return sum(flops.values()) / sum(of.seconds for of in times.products.values())


def _nominal_gb_s(times: Times, preset: Cluster, part: str) -> float:
    """The nominal rate of a rank's collectives; across nodes all ranks of a node, which measure at
    the same time, share its NICs, as in ``zeropp.price.network.group``."""
    if part == "intra":
        return preset.intra.bandwidth_gb_s
    of_node = times.group_sizes.get("within a node", 1)
    return preset.nics_per_node * preset.inter.bandwidth_gb_s / of_node


def _line(times: Times, group: str, link: Link) -> tuple[float, float]:
    """(microseconds until bytes move, GB/s) of gathers and reduce-scatters: the line through their
    times, weighted by 1 / time squared; the steps of the ring are the preset's."""
    size = times.group_sizes[group]
    points = [
        ((size - 1) / size * count, of.seconds)
        for (kind, name, count), of in times.collectives.items()
        if kind in ("all_gather", "reduce_scatter") and name == group
    ]
    moved, seconds = (np.array(column) for column in zip(*points, strict=True))
    per_byte, start_s = np.polyfit(moved, seconds, 1, w=1 / seconds)
    start_us = 1e6 * start_s - (size - 1) * link.hop_us
    return max(1.0, float(start_us)), 1e-9 / max(float(per_byte), 1e-15)


def calibrated(preset: Cluster, name: str, constants: Sequence[MeasuredConstant]) -> Cluster:
    """The preset under another name, with the measured constants, of one
    generation of software."""
    tree = asdict(preset) | {"name": name}
    for constant in constants:
        part, _, field = constant.place.rpartition(".")
        (tree[part] if part else tree)[field] = float(f"{constant.value:.4g}")
        if constant.place == "inter.efficiency":  # now it is measured, and no prior's
            gb_s = preset.nics_per_node * preset.inter.bandwidth_gb_s * constant.value
            tree["busbw_gb_s"] = float(f"{gb_s:.4g}")
    device = tree["device"]
    device["newer"] = None
    if preset.device.is_cpu:  # its peak is not known: what its products reach stands for it
        device["peak_fp32_tflops"] = device["matmul_fp32_tflops"]
    return validated(Cluster, tree)


def preset_text(cluster: Cluster, constants: Sequence[MeasuredConstant], machine: str) -> str:
    """The file of ``conf/cluster``: every constant with its spread, and the date."""
    tree: dict[str, Any] = asdict(cluster) | {"group_shares": list(cluster.group_shares)}
    del tree["device"]["newer"]
    spreads = {constant.place: constant.spread for constant in constants}
    lines = [
        f"{MEASURED} {date.today()} by python -m benchmarks.calibrate on {machine}. Lines with",
        "# a spread were measured: that of repetitions (quartiles), or of the farthest rank. Other",
        "# lines are those of the preset of the machine's kind.",
    ]
    for line in yaml.safe_dump(tree, sort_keys=False).splitlines():
        if not line.startswith(" "):
            part = line.rstrip(":")
        field = line.strip().partition(":")[0]
        place = f"{part}.{field}" if line.startswith(" ") else field
        lines.append(f"{line}  # spread {spreads[place]:.0%}" if place in spreads else line)
    return "\n".join(lines) + "\n"


def wrong(
    ranks: Sequence[Times], constants: Sequence[MeasuredConstant], preset: Cluster
) -> list[str]:
    """What looks wrong, in sentences; empty if nothing does."""
    lines = []
    products = [sum(of.seconds for of in times.products.values()) for times in ranks]
    for rank, seconds in enumerate(products):
        if seconds > _SLOW_RANK * median(products):
            slower = seconds / median(products) - 1
            lines.append(
                f"Rank {rank} on {ranks[rank].host}: products take {slower:.0%} longer than on the "
                "other ranks (a lower clock, a power limit, or another process on the device?)"
            )
    lines += _slow_links(ranks)
    if unsteady := [f"{c.place} ({c.spread:.0%})" for c in constants if c.spread > _UNSTEADY]:
        lines.append(
            f"not steady, by their spread: {', '.join(unsteady)}; measure again with nothing else "
            "running"
        )
    for constant in constants:
        rates = constant.place.endswith(("tflops", "efficiency", "gb_s"))
        if rates and constant.value < _LESS * constant.preset and not preset.device.is_cpu:
            nics = " (is every NIC used?)" if constant.place.startswith("inter") else ""
            share = constant.value / constant.preset
            lines.append(f"{constant.place}: {share:.0%} of what machines of this kind reach{nics}")
    return lines


def _slow_links(ranks: Sequence[Times]) -> list[str]:
    """Pairs of neighbours whose large messages take longer than those of the others."""
    lines: list[str] = []
    if len(ranks) < 4:  # one pair of neighbours
        return lines
    for group in {name for times in ranks for name in times.group_sizes}:
        sent = {
            rank: sum(
                of.seconds
                for (kind, name, count), of in times.collectives.items()
                if (kind, name) == ("send", group) and count >= _LARGE
            )
            for rank, times in enumerate(ranks)
        }
        middle = median(sent.values())
        lines += [
            f"Rank {rank} on {ranks[rank].host}: messages {group} take {seconds / middle:.1f} "
            "times as long as between the other neighbours (one slow link?)"
            for rank, seconds in sent.items()
            if middle and seconds > _SLOW_LINK * middle
        ]
    return lines
