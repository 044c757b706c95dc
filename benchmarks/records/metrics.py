"""Throughput, FLOP/s, MFU and peak memory of a record, each by one function; statistics of repeated
timings; and a step as one line of a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import RecordedDevice, RecordedSpec
from zeropp.cluster import Device
from zeropp.price import model_flops_per_token

Values = NDArray[np.float64]

_RESAMPLES = 2000
_CONFIDENCE = 0.95
MAX_SPREAD = 0.10  # a median of samples that spread more is not relied on, as in pyperf
LEAST_SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The median of a sample with its bootstrap interval from ``low`` to ``high``; ``spread`` is
    the interquartile range divided by the median."""

    median: float
    low: float
    high: float
    spread: float
    count: int

    @property
    def agrees(self) -> bool:
        """Whether there are several samples whose spread rounds to 0 %: nothing is in doubt."""
        return self.count > 1 and self.spread < 0.005

    @property
    def doubt(self) -> str:
        """Why the median cannot be relied on, as in ``spread 12.3 %`` or ``3 steps``; empty if it
        can."""
        if self.count < LEAST_SAMPLES and not self.agrees:
            return f"{self.count} step{'s' * (self.count > 1)}"
        return f"spread {100 * self.spread:.1f} %" if self.spread > MAX_SPREAD else ""


def summarise(samples: Sequence[float]) -> Summary:
    """The median with a 95 % percentile-bootstrap interval (Efron 1979); raises ValueError if there
    are no samples."""
    if not samples:
        raise ValueError("no samples to summarise")
    values = np.asarray(samples, dtype=float)
    low, high = _interval(_medians(values))
    return Summary(
        median=float(np.median(values)),
        low=low,
        high=high,
        spread=_spread(values),
        count=len(values),
    )


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> Summary:
    """The ratio of two medians with a bootstrap interval for which both samples are drawn
    independently; ``spread`` is the larger one of the two samples."""
    return _ratio(tuple(numerator), tuple(denominator))


@lru_cache(maxsize=2**14)  # several tables and figures ask for the same pairs
def _ratio(numerator: tuple[float, ...], denominator: tuple[float, ...]) -> Summary:
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    low, high = _interval(_medians(top, stream=0) / _medians(bottom, stream=1))
    return Summary(
        median=float(np.median(top) / np.median(bottom)),
        low=low,
        high=high,
        spread=max(_spread(top), _spread(bottom)),
        count=min(len(top), len(bottom)),
    )


@lru_cache(maxsize=64)
def _draws(count: int, stream: int) -> NDArray[np.int64]:
    """The indices of all resamples. The seed is fixed, so that a report that is made again is the
    same."""
    random = np.random.default_rng((count, stream))
    return random.integers(0, count, size=(_RESAMPLES, count))


@lru_cache(maxsize=64)
def _middles(count: int, stream: int) -> NDArray[np.int64]:
    """The positions [resamples, 2], in the sorted sample, of the two middle values of every
    resample. They do not depend on the values, so they are computed once per sample size."""
    ranks = np.sort(_draws(count, stream), axis=1)
    return ranks[:, [(count - 1) // 2, count // 2]]


def _spread(values: Values) -> float:
    """Interquartile range over the median."""
    return float(np.ptp(np.percentile(values, [25, 75])) / np.median(values))


def _medians(values: Values, stream: int = 0) -> Values:
    """The median of each resample."""
    medians: Values = np.sort(values)[_middles(len(values), stream)].mean(axis=1)
    return medians


def _interval(estimates: Values) -> tuple[float, float]:
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(estimates, [tail, 100 - tail])
    return float(low), float(high)


def tokens_per_step(spec: RecordedSpec) -> int:
    """Tokens trained on in one step, over all ranks."""
    return spec.global_batch * spec.model.seq


def tokens_per_s_per_gpu(spec: RecordedSpec, step_s: float) -> float:
    """Tokens per second and rank."""
    return tokens_per_step(spec) / step_s / spec.num_gpus


def model_tflops_per_gpu(spec: RecordedSpec, step_s: float) -> float | None:
    """Model TFLOP/s per rank: of one forward and backward without recomputation, with attention
    counted as not causal (``zeropp.price.model_flops_per_token``). None if a size of the model is
    not known."""
    shape = spec.model.shape
    if shape is None:
        return None
    return tokens_per_s_per_gpu(spec, step_s) * model_flops_per_token(shape) / 1e12


def mfu(spec: RecordedSpec, step_s: float) -> float | None:
    """Model FLOP/s divided by the device's dense peak at the run's precision (arXiv 2204.02311,
    appendix B); None if either is not known."""
    reached = model_tflops_per_gpu(spec, step_s)
    if reached is None:
        return None
    return share_of_peak(spec.cluster.device, spec.precision, reached)


def share_of_peak(device: Device | RecordedDevice, precision: str, tflops: float) -> float | None:
    """TFLOP/s divided by the device's dense peak at a precision; None if that is not known."""
    peak = device.peak_bf16_tflops if precision == "bf16" else device.peak_fp32_tflops
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
        known = [value for value in values if value is not None]
        if known:
            return max(known) / 2**30, kind
    return None


def memory_text(gib: float) -> str:
    """A size in GiB as text, in MiB if it is below 1 GiB."""
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.0f} MiB"


def step_line(spec: RecordedSpec, event: Mapping[str, Any]) -> str:
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
