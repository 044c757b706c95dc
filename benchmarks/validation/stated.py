"""What a published row states, in SI units: its cluster, the FLOPs of its step, its seconds.

The FLOPs are counted as the row's source counts them, by the formulas of arXiv 2104.04473 (eq. 3)
and 2205.05198 (appendix). Attention counts in full, or half if the source counts only the causal
half.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from benchmarks.specification.reading import preset
from benchmarks.validation.rows import PublishedRow, UnpredictableError
from zeropp.price import model_flops_per_token
from zeropp.price.cluster import Cluster, Device
from zeropp.price.flops import block_forward_flops

# One direction of 16 PCIe lanes: generation 3 and 4 in these devices, 5 in all later ones.
_PCIE_GB_S = {"v100": 15.5, "a100": 31.0, "a100_40gb": 31.0, "a800": 31.0, "stated": 31.0}
_PCIE_5_GB_S = 63.0


def cluster_of(row: PublishedRow) -> Cluster:
    """The cluster that a row describes: its device's preset in ``conf/cluster``, with the numbers
    of the row.

    ``device=stated`` is an A100 that is scaled to the row's numbers. ``power_w`` changes the
    clocks: the rate of products changes with the square root of the power, because power grows
    with frequency and voltage. Raises UnpredictableError where the nominal power is not known.
    """
    cluster = preset_of(row.device)
    device = cluster.device
    if row.peak_bf16_tflops:
        device = with_peak(device, row.peak_bf16_tflops)
    if row.power_w:
        if device.power_w is None or row.device == "stated":
            raise UnpredictableError(f"power_w: no nominal power of device={row.device} is known")
        device = at_rate(device, (row.power_w / device.power_w) ** 0.5)
    if row.products_tflops:
        device = at_rate(device, row.products_tflops / device.matmul_bf16_tflops)
    stated = {"memory_gib": row.memory_gib, "memory_bandwidth_gb_s": row.memory_bandwidth_gb_s}
    given = {name: number for name, number in stated.items() if number is not None}
    device = replace(device, **given)  # type: ignore[arg-type]
    intra, inter, shares = cluster.intra, cluster.inter, cluster.group_shares
    if row.intra_link == "pcie":
        card = preset("cluster", "a100_pcie", Cluster)
        lanes, shares = _PCIE_GB_S.get(row.device, _PCIE_5_GB_S), card.group_shares
        intra = replace(card.intra, bandwidth_gb_s=lanes)
    if row.intra_gb_s:
        intra = replace(intra, bandwidth_gb_s=row.intra_gb_s)
    if row.nic_gbit_s:
        inter = replace(inter, bandwidth_gb_s=row.nic_gbit_s / 8)
    gpus = row.gpus_per_node or cluster.gpus_per_node
    nics = row.nics_per_node or min(cluster.nics_per_node, gpus)
    return replace(
        cluster, device=device, intra=intra, inter=inter, group_shares=shares, gpus_per_node=gpus,
        nics_per_node=nics, busbw_gb_s=row.busbw_gb_s,
    )  # fmt: skip


def at_rate(device: Device, factor: float) -> Device:
    """The device with products that run ``factor`` times as fast, those of its newer kernels
    included."""
    newer = device.newer
    if newer is not None:
        newer = replace(newer, matmul_bf16_tflops=factor * newer.matmul_bf16_tflops)
    return replace(
        device,
        newer=newer,
        matmul_bf16_tflops=factor * device.matmul_bf16_tflops,
        matmul_fp32_tflops=factor * device.matmul_fp32_tflops,
    )


def with_peak(device: Device, tflops: float) -> Device:
    """The device with another dense 16-bit peak in TFLOP/s. It reaches the same share of it.
    Raises UnpredictableError where the device's own peak is not known."""
    if device.peak_bf16_tflops is None:
        raise UnpredictableError(f"peak_bf16_tflops={tflops:g}: {device.name}'s own is not known")
    scaled = at_rate(device, tflops / device.peak_bf16_tflops)
    return replace(scaled, peak_bf16_tflops=tflops)


@lru_cache(maxsize=16)
def preset_of(name: str) -> Cluster:
    """A device's preset; of a stated device, the A100's."""
    cluster: Cluster = preset("cluster", "a100" if name == "stated" else name, Cluster)
    if name == "stated":
        cluster = replace(cluster, name=name, device=replace(cluster.device, name=name))
    return cluster


def flops_per_token(row: PublishedRow) -> float:
    """FLOPs per token of one step, with those of recomputation if the row's metric has them."""
    shape = row.shape
    attention = 4 * shape.seq * shape.attended  # of one block's forward
    left_out = attention / 2 if row.attention_flops == "causal" else 0.0
    again = {"none": 0.0, "full": block_forward_flops(shape) - left_out, "selective": attention}
    again["mlp"] = 2 * shape.gates * shape.hidden * shape.ffn
    counted = model_flops_per_token(shape) - 3 * shape.layers * left_out
    blocks = row.recompute_blocks or shape.layers
    return counted + (blocks * again[row.recompute] if row.measure.hardware else 0.0)


def peak_flops(row: PublishedRow, device: Device) -> float:
    """The FLOP/s of one GPU that the row's utilisation is a share of: those that the row states,
    or the dense peak of ``device``. Raises UnpredictableError if neither is known."""
    known = device.peak_fp32_tflops if row.dtype == "fp32" else device.peak_bf16_tflops
    peak = row.utilization_peak_tflops or known
    if peak is None:
        raise UnpredictableError(
            f"utilization_peak_tflops='': no peak of device={row.device} is known"
        )
    return peak * 1e12


def measured_s(row: PublishedRow, device: Device) -> float:
    """The seconds of a step, or of a block's pass, that the row's number says."""
    number = row.measured / row.measure.units[row.unit]
    if row.measure.kind in ("time", "layer"):
        return number
    return _work(row, device) / number


def speed(row: PublishedRow, device: Device, step_s: float) -> float:
    """The row's metric, in SI units, of a step that takes ``step_s`` seconds: seconds, a rate per
    second, FLOP/s, or a fraction of the peak. The inverse of ``measured_s``."""
    return step_s if row.measure.kind == "time" else _work(row, device) / step_s


def _work(row: PublishedRow, device: Device) -> float:
    """What the row's metric counts per second, of one step: steps, samples, tokens or FLOPs, of all
    GPUs or of one; of a utilisation, the seconds that the step's FLOPs take at the peak."""
    gpus = row.num_gpus if row.measure.per_gpu else 1
    if row.measure.kind == "rate":
        counted = {"steps": 1, "samples": row.global_batch, "tokens": row.global_batch * row.seq}
        return counted[row.metric.partition("_")[0]] / gpus
    flops = row.global_batch * row.seq * flops_per_token(row)
    if row.measure.kind == "utilization":
        return flops / row.num_gpus / peak_flops(row, device)
    return flops / gpus
