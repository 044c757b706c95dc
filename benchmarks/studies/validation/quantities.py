"""The closed list of metrics that a published row may report, with units and definitions.

A metric's name is its definition. ``model_`` and ``mfu`` count the model's FLOPs only;
``hardware_`` and ``hfu`` also count recomputation (arXiv 2205.05198, appendix). ``allocated`` is
the memory of tensors, ``reserved`` what torch's allocator holds. The unit says the rest: GB is 10^9
bytes, GiB is 2^30.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["time", "rate", "flops", "utilization", "layer", "memory", "limit"]
Unit = Literal[
    "us", "ms", "s", "min", "1/s", "samples/s", "samples/s/GPU", "tok/s", "tok/s/GPU",
    "TFLOP/s/GPU", "PFLOP/s", "%", "fraction", "GB", "GiB", "MB", "MiB", "yes/no",
]  # fmt: skip

_TIMES = {"us": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60}
_BYTES = {"GB": 1e-9, "GiB": 2.0**-30, "MB": 1e-6, "MiB": 2.0**-20}
_SHARES = {"%": 100.0, "fraction": 1.0}


@dataclass(frozen=True)
class Metric:
    """A metric's kind and units. ``units`` gives the scale of each unit: a value in the unit is the
    value in SI units (seconds, 1/second, FLOP/s, a fraction, bytes) times the scale. ``per_gpu``
    means divided by the GPUs of the run."""

    kind: Kind
    units: Mapping[str, float]
    hardware: bool = False  # counts the FLOPs that recomputation runs again
    per_gpu: bool = False


METRICS: Mapping[str, Metric] = {
    "step_time": Metric("time", _TIMES),
    "steps_per_s": Metric("rate", {"1/s": 1.0}),
    "samples_per_s": Metric("rate", {"samples/s": 1.0}),
    "samples_per_s_per_gpu": Metric("rate", {"samples/s/GPU": 1.0}, per_gpu=True),
    "tokens_per_s": Metric("rate", {"tok/s": 1.0}),
    "tokens_per_s_per_gpu": Metric("rate", {"tok/s/GPU": 1.0}, per_gpu=True),
    "model_tflops_per_gpu": Metric("flops", {"TFLOP/s/GPU": 1e-12}, per_gpu=True),
    "hardware_tflops_per_gpu": Metric("flops", {"TFLOP/s/GPU": 1e-12}, True, per_gpu=True),
    "model_pflops": Metric("flops", {"PFLOP/s": 1e-15}),
    "hardware_pflops": Metric("flops", {"PFLOP/s": 1e-15}, True),
    "mfu": Metric("utilization", _SHARES),
    "hfu": Metric("utilization", _SHARES, True),
    "layer_forward_time": Metric("layer", _TIMES),
    "layer_backward_time": Metric("layer", _TIMES),
    "layer_time": Metric("layer", _TIMES),
    "peak_memory_allocated": Metric("memory", _BYTES),
    "peak_memory_reserved": Metric("memory", _BYTES),
    "activation_memory": Metric("memory", _BYTES),  # of the first pipeline rank
    "state_memory": Metric("memory", _BYTES),  # parameters, gradients and optimizer, same rank
    "ran_out_of_memory": Metric("limit", {"yes/no": 1.0}),
}
