"""Predicts the quantity of a row, in the row's unit, from the simulated step of its Plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from benchmarks.studies.validation.cases import Case, case_of, plan_of
from benchmarks.studies.validation.counted_flops import flops_per_token, peak_flops
from benchmarks.studies.validation.rows import PublishedRow
from zeropp.cost import price_plan
from zeropp.sim.simulator import SimResult, simulate

# The share of the memory reserved by torch's allocator that is lost to fragmentation: 15 % on
# average over eight language models on A100 (GMLake, arXiv 2401.08156). With expandable segments it
# is nearly 0.
_FRAGMENTS = 0.15
Kind = Literal["throughput", "memory", "oom"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted ``value`` in the row's unit. For ``ran_out_of_memory`` the ``text`` is ``OOM`` or
    ``fits``."""

    kind: Kind
    value: float
    text: str
    relative_error: float  # for kind ``oom``: 0 if the row agrees, else 1
    fits: bool = True  # whether the model says that the run fits into memory


def predict(row: PublishedRow, cluster_name: str | None = None) -> Prediction:
    """Predict one row; raises UnpredictableError, with the reason, if that is impossible."""
    return predict_case(row, case_of(row, cluster_name))


def predict_case(row: PublishedRow, case: Case) -> Prediction:
    """Predict a row that is priced as ``case``."""
    kind = row.measure.kind
    if kind == "layer":
        return _compared(row, _layer_s(row, case), "throughput")
    result = simulated(case)
    fits = result.peak_bytes <= case.cluster.device.usable_bytes
    if kind == "limit":
        agrees = fits is (row.value == "no")
        return Prediction(
            kind="oom",
            value=float("nan"),
            text="fits" if fits else "OOM",
            relative_error=float(not agrees),
            fits=fits,
        )
    if kind == "memory":
        whole = row.metric.startswith("peak")  # the other metrics are formulas' and not a run's
        return _compared(row, _memory_bytes(row, case, result), "memory", fits or not whole)
    return _compared(row, _speed(row, case, result), "throughput", fits)


def _compared(row: PublishedRow, value: float, kind: Kind, fits: bool = True) -> Prediction:
    """The prediction of ``value`` (in SI units) for a row's number."""
    scaled = value * row.measure.units[row.unit]
    return Prediction(
        kind=kind,
        value=scaled,
        text=f"{scaled:.6g}",
        relative_error=scaled / row.measured - 1.0,
        fits=fits,
    )


@lru_cache(maxsize=8192)
def simulated(case: Case) -> SimResult:
    """Simulate one step of a case."""
    plan = plan_of(case)
    return simulate(plan, case.cluster, price=price_plan(plan, case.cluster, case.program))


def _speed(row: PublishedRow, case: Case, result: SimResult) -> float:
    """Times, rates, FLOP/s and utilisation, in SI units."""
    kind, step_s = row.measure.kind, result.step_s
    if kind == "time":
        return step_s
    each = row.num_gpus if row.measure.per_gpu else 1
    if kind == "flops":
        return row.global_batch * case.shape.seq * flops_per_token(row) / step_s / each
    if kind == "utilization":
        flops = row.global_batch * case.shape.seq * flops_per_token(row) / step_s
        return flops / row.num_gpus / peak_flops(row, case.cluster.device)
    counted = {"steps": 1, "samples": row.global_batch, "tokens": row.global_batch * row.seq}
    return counted[row.metric.partition("_")[0]] / step_s / each


def _memory_bytes(row: PublishedRow, case: Case, result: SimResult) -> float:
    """The memory of the fullest rank, or of the first pipeline rank if the metric names a kind."""
    first = result.memory[0]
    if row.metric == "activation_memory":
        return float(first.activations)
    if row.metric == "state_memory":
        return float(first.parameters + first.gradients + first.optimizer)
    if row.metric == "peak_memory_reserved" and not case.program.expandable_segments:
        return result.peak_bytes / (1 - _FRAGMENTS)
    return float(result.peak_bytes)


def _layer_s(row: PublishedRow, case: Case) -> float:
    """Seconds of one block's forward, backward or both, with tensor-parallel collectives: the
    difference between the model and one with one more block."""
    one_stage = replace(case.layout, pp=1, chunks=1)
    alone = replace(case, layout=one_stage, num_microbatches=1, cuts=None)
    costs = []
    for layers in (1, 2):
        plan = plan_of(replace(alone, shape=replace(case.shape, layers=layers)))
        costs.append(price_plan(plan, case.cluster, case.program).stages[0])
    forward = costs[1].forward - costs[0].forward
    backward = sum(
        sign * (c.backward_input + c.backward_weight)
        for sign, c in zip((-1, 1), costs, strict=True)
    )
    return _LAYER[row.metric](forward, backward)


_LAYER: dict[str, Callable[[float, float], float]] = {
    "layer_forward_time": lambda forward, backward: forward,
    "layer_backward_time": lambda forward, backward: backward,
    "layer_time": lambda forward, backward: forward + backward,
}
