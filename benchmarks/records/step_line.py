"""What one training step did, in one line, as torchtitan's metrics logger prints it.

Fed by a rank's ``warmup`` or ``step`` event and by the run's specification. Every rank prints the
line into its log; ``launcher.steps=true`` shows those of rank 0 on the screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.records.metrics import mfu, model_tflops_per_gpu, tokens_per_s_per_gpu
from benchmarks.records.recorded_spec import RecordedSpec


def step_line(spec: RecordedSpec, event: Mapping[str, Any]) -> str:
    """Step (counted from 1, warm-up included), loss (nats per token), gradient norm before
    clipping, tokens/s, model TFLOP/s and MFU per rank, and the rank's peak memory so far in GiB
    and as a share of its device's. What the event or the specification does not say is left out."""
    warmup = " (warm-up)" if event["event"] == "warmup" else ""
    parts = [f"step {event['index'] + 1:4}{warmup}"]
    if "loss" in event:
        parts.append(f"loss {event['loss']:8.4f}")
    if "grad_norm" in event:
        parts.append(f"grad norm {event['grad_norm']:8.4f}")
    parts += [*_speed(spec, float(event["seconds"])), *_memory(spec, event.get("peak_bytes"))]
    return "  ".join(parts)


def _speed(spec: RecordedSpec, step_s: float) -> list[str]:
    """Time and what follows from it, per rank."""
    parts = [f"{step_s:.3f} s", f"{tokens_per_s_per_gpu(spec, step_s):,.0f} tokens/s"]
    tflops, share = model_tflops_per_gpu(spec, step_s), mfu(spec, step_s)
    if tflops is not None:
        parts.append(f"{tflops:.4g} TFLOP/s")
    if share is not None:
        parts.append(f"MFU {share:.1%}")
    return parts


def _memory(spec: RecordedSpec, peak_bytes: int | None) -> list[str]:
    if peak_bytes is None:
        return []
    gib, device = peak_bytes / 2**30, spec.cluster.device.memory_gib
    share = "" if device is None else f" ({gib / device:.1%})"
    return [f"memory {gib:.2f} GiB{share}"]
