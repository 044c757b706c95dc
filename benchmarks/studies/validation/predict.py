"""A row's quantity, in the row's own unit, from the simulated step of its Plan.

TFLOP/s and MFU follow the source's count: attention in full, ``hw`` and HFU with recomputation
(arXiv 2104.04473, eq. 3; arXiv 2205.05198, appendix).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.studies.validation.cases import Case, case_of, plan_of
from benchmarks.studies.validation.programs import counts_recomputation, prints_gib, reserved_share
from benchmarks.studies.validation.quantities import Reading, reading_of
from benchmarks.studies.validation.rows import Row, UnpredictableError
from zeropp.cost import model_flops_per_token, price_plan
from zeropp.cost.flops import block_forward_flops
from zeropp.sim.simulator import SimResult, simulate

_TIME = {"ms": 1e3, "s": 1.0, "us": 1e6, "µs": 1e6, "min": 1 / 60, "h": 1 / 3600}
_PART = re.compile(r"act(?:iv|_|\b)|param|optim")
_MEMORY = {"gb": 1e9, "gib": 2**30, "mb": 1e6, "mib": 2**20}


@dataclass(frozen=True)
class Prediction:
    """``value`` in the row's unit; text is ``OOM`` or ``fits`` for rows of memory's limit alone."""

    kind: str  # throughput, memory or oom
    value: float
    text: str
    relative_error: float  # of ``oom``: 0 where the row agrees, else 1
    fits: bool = True  # whether the model says that the run fits into memory


def predict(row: Row, cluster_name: str | None = None) -> Prediction:
    """Predict one row; raises UnpredictableError with the reason."""
    reading_of(row)
    alone = {**row, "pp": "1"} if _is_layer(row) else row
    return predict_case(row, case_of(alone, cluster_name))


def predict_case(row: Row, case: Case) -> Prediction:
    """Predict a row that has been understood as ``case``."""
    reading, metric = reading_of(row), row.get("metric", "").lower()
    if _is_layer(row):
        return _compared(_layer(case, metric) * _scale(reading.unit, _TIME), reading, "throughput")
    result = _simulated(case)
    fits = result.peak_bytes <= case.cluster.device.usable_bytes
    if reading.ran_out is not None:
        return Prediction(
            "oom", float("nan"), "fits" if fits else "OOM", float(fits is reading.ran_out), fits
        )
    if "mem" in metric or reading.unit.partition("/")[0] in _MEMORY:
        part = _PART.search(metric) is not None  # of what a formula gives, not of a run
        value = _memory(row, case, result, reading.unit)
        return _compared(value, reading, "memory", fits or part)
    return _compared(_throughput(row, case, result, reading), reading, "throughput", fits)


def _is_layer(row: Row) -> bool:
    """Whether a row is of one layer alone."""
    metric = row.get("metric", "").lower()
    return "one layer" in row.get("schedule", "").lower() or metric.startswith("layer_")


def _compared(value: float, reading: Reading, kind: str, fits: bool = True) -> Prediction:
    if not reading.value:
        raise UnpredictableError("no measured value to compare with")
    return Prediction(kind, value, f"{value:.6g}", value / reading.value - 1.0, fits)


@lru_cache(maxsize=8192)
def _simulated(case: Case) -> SimResult:
    plan = plan_of(case)
    return simulate(plan, case.cluster, price=price_plan(plan, case.cluster, case.program))


def _throughput(row: Row, case: Case, result: SimResult, reading: Reading) -> float:
    """Times, rates and utilisation."""
    metric, unit = row.get("metric", "").lower(), reading.unit
    step = unit.removesuffix("/it")
    if step in _TIME:
        return result.step_s * _TIME[step]
    rate = re.fullmatch(r"it/(s|min)", unit)
    if rate:
        return 1 / (result.step_s * _TIME[rate[1]])
    gpus = case.layout.world
    samples = result.plan.global_batch / result.step_s
    each = gpus if re.search("gpu|device", f"{unit} {metric}") else 1
    tokens = re.search(r"\b([kmb]?) ?tok", unit)
    if tokens or "tok" in metric:
        scale = {"": 1.0, "k": 1e-3, "m": 1e-6, "b": 1e-9}[tokens[1] if tokens else ""]
        scale *= 86400 if "day" in unit else 1.0
        return samples * case.shape.seq * scale / each
    if re.search(r"sample|seq|sentence", f"{unit} {metric}"):
        return samples / each
    tflops = samples * case.shape.seq * _flops_per_token(row, case) / gpus / 1e12
    if re.search("mfu|hfu|pct_peak|utili[sz]ation", metric):
        return _utilisation(case, tflops, reading)
    if "flop" not in f"{unit} {metric}":
        raise UnpredictableError(
            f"metric={row.get('metric')!r} in {row.get('unit')!r} is not understood (known: "
            "iteration time, samples, tokens or FLOP per second, MFU, HFU, memory, OOM)"
        )
    if unit.startswith("%"):
        return _utilisation(case, tflops, reading)
    peta = re.search("pflop|peta", f"{unit} {metric}")
    whole = "aggregate" in metric or "total" in metric or (peta and "gpu" not in unit)
    return tflops * (gpus if whole else 1) * (1e-3 if peta else 1.0)


def _utilisation(case: Case, tflops: float, reading: Reading) -> float:
    stated = re.search(r"of (\d+)", reading.unit)
    device = case.cluster.device
    half = {"v100": 125.0}.get(device.name, device.peak_bf16_tflops)
    peak = float(stated.group(1)) if stated else half
    if case.precision == "fp32" and not stated:
        peak = device.peak_fp32_tflops
    if peak is None:
        raise UnpredictableError(f"device {device.name}: no peak is known")
    blank = reading.unit in ("", "mfu", "hfu") and (reading.value or 0.0) > 1.5
    return tflops / peak * (100 if blank or reading.unit.startswith(("%", "pct", "perc")) else 1)


def _flops_per_token(row: Row, case: Case) -> float:
    """FLOPs as the row's source counts them."""
    model = float(model_flops_per_token(case.shape))
    if case.recompute == "none" or not counts_recomputation(row):
        return model
    shape = case.shape
    again = {"full": block_forward_flops(shape), "selective": 4 * shape.seq * shape.hidden}
    return model + shape.layers * again[case.recompute]


def _memory(row: Row, case: Case, result: SimResult, unit: str) -> float:
    """Memory of the fullest rank, or of the kind that the metric names (first pipeline rank)."""
    metric, first = row.get("metric", "").lower(), result.memory[0]
    found = reserved_share(row) * result.peak_bytes
    if re.search(r"act(?:iv|_|\b)", metric):
        found = float(first.activations)
    elif "param" in metric or "optim" in metric:
        found = float(first.parameters + first.gradients + first.optimizer)
    elif case.layout.world == 1 and "total" in metric:
        found = float(first.total)
    if unit.startswith("%"):
        return 100 * found / (case.cluster.device.memory_gib * 2**30)
    unit = unit.removesuffix("/gpu")
    return found / _scale("gib" if unit == "gb" and prints_gib(row) else unit, _MEMORY)


def _layer(case: Case, metric: str) -> float:
    """Seconds of one block's forward, backward or both, tensor-parallel collectives included:
    what a model with one more block costs more."""
    if metric not in _LAYER:
        raise UnpredictableError(f"metric={metric!r} of a layer is not understood")
    alone = replace(case, layout=replace(case.layout, pp=1, chunks=1), num_microbatches=1)
    costs = []
    for layers in (1, 2):
        plan = plan_of(replace(alone, shape=replace(case.shape, layers=layers)))
        costs.append(price_plan(plan, case.cluster, case.program).stages[0])
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
