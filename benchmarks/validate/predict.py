"""A row's quantity, in the row's own unit, from the simulated step of its Plan.

TFLOP/s and MFU follow the source's count: attention in full, ``hw`` and HFU with recomputation
(arXiv 2104.04473, eq. 3; arXiv 2205.05198, appendix).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.validate.cases import Case, case_of, plan_of
from benchmarks.validate.rows import Row, UnpredictableError, measured
from zeropp.cost import model_flops_per_token, price_plan
from zeropp.cost.flops import block_forward_flops
from zeropp.sim.simulate import SimResult, simulate

_TIME = {"ms": 1e3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "us": 1e6, "min": 1 / 60}
_MEMORY = {"gb": 1e9, "gib": 2**30, "mb": 1e6, "mib": 2**20}


@dataclass(frozen=True)
class Prediction:
    """``value`` in the row's unit; text is ``OOM`` or ``fits`` for rows that ran out of memory."""

    kind: str  # throughput, memory or oom
    value: float
    text: str
    relative_error: float


def predict(row: Row, cluster_name: str | None = None) -> Prediction:
    """Predict one row; raises UnpredictableError with the reason."""
    measured(row)
    alone = {**row, "pp": "1"} if _is_layer(row) else row
    return predict_case(row, case_of(alone, cluster_name))


def predict_case(row: Row, case: Case) -> Prediction:
    """Predict a row that has been understood as ``case``."""
    actual = measured(row)
    metric, unit = row.get("metric", "").lower(), row.get("unit", "").strip().lower()
    if _is_layer(row):
        return _compared(_layer(case, metric) * _scale(unit, _TIME), actual, "throughput")
    result = _simulated(case)
    if actual is None:
        fits = result.peak_bytes <= case.cluster.device.usable_bytes
        text = "fits" if fits else "OOM"
        return Prediction("oom", float("nan"), text, 1.0 if fits else 0.0)
    if "mem" in metric:
        return _compared(_memory(case, result, metric) / _scale(unit, _MEMORY), actual, "memory")
    return _compared(_throughput(row, case, result, metric, unit), actual, "throughput")


def _is_layer(row: Row) -> bool:
    """Whether a row is of one layer alone."""
    metric = row.get("metric", "").lower()
    return "one layer" in row.get("schedule", "").lower() or metric.startswith("layer_")


def _compared(value: float, actual: float | None, kind: str) -> Prediction:
    if actual is None or actual == 0:
        raise UnpredictableError("no measured value to compare with")
    return Prediction(kind, value, f"{value:.6g}", value / actual - 1.0)


@lru_cache(maxsize=8192)
def _simulated(case: Case) -> SimResult:
    plan = plan_of(case)
    return simulate(plan, case.cluster, price=price_plan(plan, case.cluster, case.software))


def _throughput(row: Row, case: Case, result: SimResult, metric: str, unit: str) -> float:
    """Times, rates and utilisation."""
    if "time" in metric or unit in _TIME:
        return result.step_s * _scale(unit, _TIME)
    gpus = case.layout.world
    samples = result.plan.global_batch / result.step_s
    each = "gpu" in unit or "gpu" in metric or "device" in unit
    if "sample" in unit or "seq" in unit or "sample" in metric:
        return samples / (gpus if each else 1)
    if "tok" in unit or "tok" in metric:
        scale = 1e-3 if re.search(r"\bk ?tok|ktok", unit) else 1.0
        return samples * case.shape.seq * scale / (gpus if each else 1)
    tflops = samples * case.shape.seq * _flops_per_token(case, metric) / gpus / 1e12
    if "pflop" in unit or "aggregate" in metric:
        return tflops * gpus * (1e-3 if "pflop" in unit else 1.0)
    if "%" in unit or metric in ("mfu", "hfu", "pct_peak"):
        return _utilisation(row, case, tflops)
    if "flop" in unit or "flop" in metric:
        return tflops
    raise UnpredictableError(
        f"metric={row.get('metric')!r} in {row.get('unit')!r} is not understood"
    )


def _utilisation(row: Row, case: Case, tflops: float) -> float:
    stated = re.search(r"of (\d+)", row.get("unit", ""))
    device = case.cluster.device
    half = {"v100": 125.0}.get(device.name, device.peak_bf16_tflops)
    peak = float(stated.group(1)) if stated else half
    if case.precision == "fp32" and not stated:
        peak = device.peak_fp32_tflops
    if peak is None:
        raise UnpredictableError(f"device {device.name}: no peak is known")
    share = tflops / peak
    return share * 100 if "%" in row.get("unit", "") else share


def _flops_per_token(case: Case, metric: str) -> float:
    """``hw`` metrics, HFU, and Megatron's aggregate and percentage count recomputation."""
    model = float(model_flops_per_token(case.shape))
    counts = metric.startswith(("hw", "hfu", "pct", "aggregate", "hardware"))
    if not counts or case.recompute == "none":
        return model
    shape = case.shape
    again = {"full": block_forward_flops(shape), "selective": 4 * shape.seq * shape.hidden}
    return model + shape.layers * again[case.recompute]


def _memory(case: Case, result: SimResult, metric: str) -> float:
    """Bytes of the fullest rank, or of the kind that the metric names (first pipeline rank)."""
    first = result.memory[0]
    if "act" in metric:
        return float(first.activations)
    if "param" in metric or "optim" in metric:
        return float(first.parameters + first.gradients + first.optimizer)
    if case.layout.world == 1 and "total" in metric:
        return float(first.total)
    return float(result.peak_bytes)


def _layer(case: Case, metric: str) -> float:
    """Seconds of one block's forward, backward or both, tensor-parallel collectives included:
    what a model with one more block costs more."""
    if metric not in _LAYER:
        raise UnpredictableError(f"metric={metric!r} of a layer is not understood")
    alone = replace(case, layout=replace(case.layout, pp=1, chunks=1), num_microbatches=1)
    costs = []
    for layers in (1, 2):
        plan = plan_of(replace(alone, shape=replace(case.shape, layers=layers)))
        costs.append(price_plan(plan, case.cluster, case.software).stages[0])
    forward = costs[1].forward - costs[0].forward
    backward = sum(
        sign * (c.backward_input + c.backward_weight)
        for sign, c in zip((-1, 1), costs, strict=True)
    )
    return _LAYER[metric](forward, backward)


_LAYER: dict[str, Callable[[float, float], float]] = {
    "layer_forward": lambda forward, backward: forward,
    "layer_backward": lambda forward, backward: backward,
    "layer_total": lambda forward, backward: forward + backward,
}


def _scale(unit: str, units: dict[str, float]) -> float:
    if unit not in units:
        raise UnpredictableError(f"unit={unit!r} is not understood (known: {', '.join(units)})")
    return units[unit]
