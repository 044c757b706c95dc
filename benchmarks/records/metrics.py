"""Throughput, FLOP/s, MFU and peak memory of a record, each by one function; and a step as one line
of a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import RecordedDevice, RecordedSpec
from zeropp.price import model_flops_per_token
from zeropp.price.cluster import Device
from zeropp.types.shape import ModelShape

if TYPE_CHECKING:  # reports need no contenders
    from benchmarks.specification.run_spec import RunSpec


def tokens_per_s_per_gpu(spec: RecordedSpec | RunSpec, step_s: float) -> float:
    """Tokens per second and rank."""
    return spec.global_batch * spec.model.seq / step_s / spec.num_gpus


def model_tflops_per_gpu(spec: RecordedSpec | RunSpec, step_s: float) -> float | None:
    """Model TFLOP/s per rank: of one forward and backward without recomputation, with attention
    counted as not causal (``zeropp.price.model_flops_per_token``). None if a size of the model is
    not known."""
    shape = spec.model if isinstance(spec.model, ModelShape) else spec.model.shape
    rate = tokens_per_s_per_gpu(spec, step_s)
    return None if shape is None else rate * model_flops_per_token(shape) / 1e12


def mfu(spec: RecordedSpec | RunSpec, step_s: float) -> float | None:
    """Model FLOP/s divided by the device's dense peak at the run's precision (arXiv 2204.02311,
    appendix B); None if either is not known."""
    reached = model_tflops_per_gpu(spec, step_s)
    device, precision = spec.cluster.device, spec.precision
    return None if reached is None else share_of_peak(device, precision, reached)


def share_of_peak(device: Device | RecordedDevice, precision: str, tflops: float) -> float | None:
    """TFLOP/s divided by the device's dense peak at a precision; None if that is not known."""
    peak = device.peak_bf16_tflops if precision != "fp32" else device.peak_fp32_tflops
    return None if peak is None else tflops / peak


def peak_memory_gib(record: RunRecord) -> tuple[float, str] | None:
    """(the largest peak of any rank in GiB, its kind); None if no peak is known.

    Kinds: ``allocated`` (CUDA allocator), ``resident`` (on CPUs, the resident set above that at the
    start), ``predicted`` (simulated or traced bytes).
    """
    kinds = {
        "allocated": [rank.peak_allocated_bytes for rank in record.ranks],
        "resident": [rank.peak_rss_bytes for rank in record.ranks],
        "predicted": [record.predicted.get("peak_bytes")],
    }
    for kind, values in kinds.items():
        if known := [value for value in values if value is not None]:
            return max(known) / 2**30, kind
    return None


def memory_text(gib: float) -> str:
    """A size in GiB as text, in MiB if it is below 1 GiB."""
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.0f} MiB"


def step_line(spec: RecordedSpec | RunSpec, event: Mapping[str, Any]) -> str:
    """What a step did, in one line of a log: step (counted from 1, warm-up included), loss (nats
    per token), gradient norm before clipping, tokens/s, model TFLOP/s and MFU per rank, and the
    rank's peak memory so far, also as a share of its device's. What the ``warmup`` or ``step``
    event or the specification does not say is left out."""
    warmup = " (warm-up)" if event["event"] == "warmup" else ""
    parts = [f"step {event['index'] + 1:4}{warmup}"]
    if "loss" in event:
        parts.append(f"loss {event['loss']:8.4f}")
    if "grad_norm" in event:
        parts.append(f"grad norm {event['grad_norm']:8.4f}")
    step_s, peak, device = float(event["seconds"]), event.get("peak_bytes"), spec.cluster.device
    parts += [f"{step_s:.3f} s", f"{tokens_per_s_per_gpu(spec, step_s):,.0f} tokens/s"]
    if (tflops := model_tflops_per_gpu(spec, step_s)) is not None:
        parts.append(f"{tflops:.4g} TFLOP/s" if tflops >= 1 else f"{1000 * tflops:.4g} GFLOP/s")
    if (share := mfu(spec, step_s)) is not None:
        parts.append(f"MFU {share:.1%}")
    if peak is not None:
        gib = peak / 2**30
        of_device = "" if device.memory_gib is None else f" ({gib / device.memory_gib:.1%})"
        parts.append(f"memory {memory_text(gib)}{of_device}")
    return "  ".join(parts)
