"""Refuses rows that cannot be right: a machine that was not sold, degrees that its program does not
have, or a number that its devices cannot have reached, which is in another unit, of all GPUs
instead of one, or of one GPU instead of all.
"""

from __future__ import annotations

from benchmarks.validation.rows import PublishedRow, UnpredictableError
from benchmarks.validation.stated import cluster_of, measured_s, preset_of
from zeropp.price import model_flops_per_token, parameter_count
from zeropp.price.cluster import Device
from zeropp.price.flops import block_forward_flops

# The slowest of the committed rows reaches 4.8 % of its devices' peak.
_LEAST_SHARE = 0.002
_OVER_PRODUCTS = 1.25  # a peak that is not known, over the rate that products were seen to reach
_OVER_MEMORY = {"peak": 1.1, "activation": 10.0, "state": 10.0}  # the latter are also of formulas
# Dense peaks of narrower types over that of 16 bits: 8 bits on H100 and B200, 4 bits on B300.
_OVER_16_BIT = {"fp8": 2, "mxfp8": 2, "int8": 2, "fp4": 6, "nvfp4": 6, "mxfp4": 6}
_PASSES = {"layer_forward_time": 1, "layer_backward_time": 2, "layer_time": 3}
# A board of a device may differ by these factors from the preset: A100 of 40 GB, H100 on PCIe.
_OF_PRESET = (0.4, 1.25)
_OF_THE_BOARD = ("memory_gib", "memory_bandwidth_gb_s", "peak_bf16_tflops", "power_w")
# Programs that shard parameters and divide nothing else.
SHARD_ALONE = ("fsdp", "fms_fsdp", "fms_fsdp_eager", "llm_foundry")


def check_plausible(row: PublishedRow) -> None:
    """Raise UnpredictableError, in one line, if the row's machine, its program's degrees or its
    number cannot be right."""
    impossible = _machine(row)
    if impossible:
        raise UnpredictableError(impossible)
    device, kind = cluster_of(row).device, row.measure.kind
    if kind == "limit":
        return
    wrong = _memory(row, device) if kind == "memory" else _speed(row, device)
    if wrong:
        raise UnpredictableError(
            f"value={row.value}: {row.metric} in {row.unit} would be {wrong} (another unit, or of "
            "one GPU instead of all?)"
        )


def _machine(row: PublishedRow) -> str:
    """What is wrong with the devices, the nodes, or the degrees for this program."""
    cluster = preset_of(row.device)
    nominal = {name: getattr(cluster.device, name) for name in _OF_THE_BOARD}
    for name, whole in nominal.items():
        stated = getattr(row, name)
        if stated and whole and row.device != "stated":
            low, high = (whole * factor for factor in _OF_PRESET)
            if not low <= stated <= high:
                return f"{name}={stated:g}: a {row.device} has {whole:g} (from {low:g} to {high:g})"
    gpus = row.gpus_per_node or cluster.gpus_per_node
    if gpus % row.tp and row.tp % gpus:
        return f"gpus_per_node={gpus}: neither divides tp={row.tp} nor is divided by it"
    if row.program in SHARD_ALONE and row.tp * row.pp > 1:
        return f"program={row.program}: shards parameters alone, not tp={row.tp} or pp={row.pp}"
    return ""


def _speed(row: PublishedRow, device: Device) -> str:
    """What is wrong with a speed: the work that it needs at least, over the devices' peak."""
    peak = max(
        device.peak_bf16_tflops or _OVER_PRODUCTS * device.matmul_bf16_tflops,
        device.peak_fp32_tflops or 0.0,
    )
    peak *= _OVER_16_BIT.get(row.dtype, 1)
    share = _least_flops(row) / measured_s(row, device) / (peak * 1e12)
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
    per_token = model_flops_per_token(row.shape) - 3 * row.layers * half
    return row.global_batch * row.seq * per_token / row.num_gpus


def _memory(row: PublishedRow, device: Device) -> str:
    """What is wrong with an amount of memory: it is less than 16-bit parameters or one boundary of
    a stage take, or more than the device has."""
    stated, least = row.measured / row.measure.units[row.unit], 2.0 * parameter_count(row.shape)
    least /= row.num_gpus
    contents = "16-bit parameters, spread over all GPUs"
    if row.metric == "activation_memory":
        least = 2.0 * row.micro_batch * row.seq * row.hidden / row.tp
        contents = "the input of one block"
    if stated < least:
        return f"{stated / 2**30:.3g} GiB, less than the {least / 2**30:.3g} GiB of {contents}"
    most = _OVER_MEMORY[row.metric.partition("_")[0]] * device.memory_gib
    if stated > most * 2**30:
        return f"{stated / 2**30:.4g} GiB, and {row.device} has {device.memory_gib:g} GiB"
    return ""
