"""Refuses numbers that the row's own devices cannot have reached: they are in another unit, of all
GPUs instead of one, or of one GPU instead of all."""

from __future__ import annotations

from benchmarks.studies.validation.clusters import cluster_of
from benchmarks.studies.validation.counted_flops import flops_per_token, peak_flops
from benchmarks.studies.validation.rows import PublishedRow, UnpredictableError
from zeropp.cluster import Device
from zeropp.cost import model_flops_per_token, parameter_count
from zeropp.cost.flops import block_forward_flops

# The slowest of the 2,900 committed rows reaches 0.8 % of its devices' peak.
_LEAST_SHARE = 0.002
_OVER_PRODUCTS = 1.25  # a peak that is not known, over the rate that products were seen to reach
_OVER_MEMORY = {"peak": 1.1, "activation": 10.0, "state": 10.0}  # the latter are also of formulas
_PASSES = {"layer_forward_time": 1, "layer_backward_time": 2, "layer_time": 3}


def check_plausible(row: PublishedRow) -> None:
    """Raise UnpredictableError, in one line, if the row's number cannot be right."""
    device, kind = cluster_of(row).device, row.measure.kind
    if kind == "limit":
        return
    wrong = _memory(row, device) if kind == "memory" else _speed(row, device)
    if wrong:
        raise UnpredictableError(
            f"value={row.value}: {row.metric} in {row.unit} would be {wrong} (another unit, or of "
            "one GPU instead of all?)"
        )


def _speed(row: PublishedRow, device: Device) -> str:
    """What is wrong with a speed: the work that it needs at least, over the devices' peak."""
    peak = max(
        device.peak_bf16_tflops or _OVER_PRODUCTS * device.matmul_bf16_tflops,
        device.peak_fp32_tflops or 0.0,
    )
    share = _least_flops(row) / _seconds(row, device) / (peak * 1e12)
    if share > 1:
        return f"{share:.3g} times the peak of {row.device}"
    return f"{share:.2%} of the peak of {row.device}" if share < _LEAST_SHARE else ""


def _least_flops(row: PublishedRow) -> float:
    """FLOPs of one GPU in a step, or in a block's pass: attention counts its causal half, and
    nothing is recomputed."""
    half = 2 * row.seq * row.hidden  # per token, of one block's forward
    if row.measure.kind == "layer":
        tokens = row.micro_batch * row.seq / row.tp
        return tokens * _PASSES[row.metric] * (block_forward_flops(row.shape) - half)
    each = model_flops_per_token(row.shape) - 3 * row.layers * half
    return row.global_batch * row.seq * each / row.num_gpus


def _seconds(row: PublishedRow, device: Device) -> float:
    """The time of a step, or of a block's pass, that the row's number says."""
    kind, number = row.measure.kind, row.measured / row.measure.units[row.unit]
    if kind in ("time", "layer"):
        return number
    each = row.num_gpus if row.measure.per_gpu else 1
    if kind == "rate":
        counted = {"steps": 1, "samples": row.global_batch, "tokens": row.global_batch * row.seq}
        return counted[row.metric.partition("_")[0]] / (number * each)
    if kind == "utilization":
        number, each = number * peak_flops(row, device), row.num_gpus
    return row.global_batch * row.seq * flops_per_token(row) / (number * each)


def _memory(row: PublishedRow, device: Device) -> str:
    """What is wrong with an amount of memory: it is less than 16-bit parameters or one boundary of
    a stage take, or more than the device has."""
    stated, least = row.measured / row.measure.units[row.unit], 2.0 * parameter_count(row.shape)
    least /= row.num_gpus
    what = "16-bit parameters, spread over all GPUs"
    if row.metric == "activation_memory":
        least = 2.0 * row.micro_batch * row.seq * row.hidden / row.tp
        what = "the input of one block"
    if stated < least:
        return f"{stated / 2**30:.3g} GiB, less than the {least / 2**30:.3g} GiB of {what}"
    most = _OVER_MEMORY[row.metric.partition("_")[0]] * device.memory_gib
    if stated > most * 2**30:
        return f"{stated / 2**30:.4g} GiB, and {row.device} has {device.memory_gib:g} GiB"
    return ""
