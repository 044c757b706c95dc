"""Throughput, FLOP/s, MFU and peak memory of a record, each by one function."""

from __future__ import annotations

from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import RecordedSpec
from zeropp.cost import model_flops_per_token


def tokens_per_step(spec: RecordedSpec) -> int:
    """Tokens trained on in one step, over all ranks."""
    return spec.global_batch * spec.model.seq


def tokens_per_s_per_gpu(spec: RecordedSpec, step_s: float) -> float:
    """Tokens per second and rank."""
    return tokens_per_step(spec) / step_s / spec.num_gpus


def model_tflops_per_gpu(spec: RecordedSpec, step_s: float) -> float | None:
    """Model TFLOP/s per rank: of one forward and backward without recomputation, with attention
    counted as not causal (``zeropp.cost.model_flops_per_token``). None if a size of the model is
    not known."""
    shape = spec.model.shape
    if shape is None:
        return None
    return tokens_per_s_per_gpu(spec, step_s) * model_flops_per_token(shape) / 1e12


def mfu(spec: RecordedSpec, step_s: float) -> float | None:
    """Model FLOP/s divided by the device's dense peak at the run's precision (arXiv 2204.02311,
    appendix B); None if either is not known."""
    device = spec.cluster.device
    peak = device.peak_bf16_tflops if spec.precision == "bf16" else device.peak_fp32_tflops
    reached = model_tflops_per_gpu(spec, step_s)
    return None if peak is None or reached is None else reached / peak


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
        known = [value for value in values if value is not None]
        if known:
            return max(known) / 2**30, kind
    return None
