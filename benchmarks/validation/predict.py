"""What the simulator says for a line of a published table: a prediction, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from benchmarks.validation.cases import Case, case_of, plan_of
from benchmarks.validation.rows import Line, PublishedRow, UnpredictableError
from benchmarks.validation.stated import speed
from zeropp.price import price_plan
from zeropp.price.memory import reserved_bytes
from zeropp.price.simulator import SimResult, simulate

# A number that is further from its price than this factor, or of a run that would need this many
# times the device's memory, is of something else than its row says.
_SET_APART = 3.0
_MUST_FIT = 1.5
Kind = Literal["throughput", "memory", "oom"]


@dataclass(frozen=True)
class Prediction:
    """A published row and the simulator's number for it.

    ``value`` is in the row's unit; for ``ran_out_of_memory`` it is 1 where the run does not fit,
    and else 0. ``fits`` says whether the whole run fits into memory by the simulator.
    """

    row: PublishedRow
    value: float
    fits: bool = True

    @property
    def kind(self) -> Kind:
        """What was predicted; ``throughput`` are times, rates, FLOP/s and utilisations."""
        kind = self.row.measure.kind
        return "oom" if kind == "limit" else "memory" if kind == "memory" else "throughput"

    @property
    def text(self) -> str:
        """The value with six digits; for ``ran_out_of_memory`` ``OOM`` or ``fits``."""
        return f"{self.value:.6g}" if self.kind != "oom" else "OOM" if self.value else "fits"

    @property
    def relative_error(self) -> float:
        """Predicted over measured, minus 1; for ``ran_out_of_memory`` 0 if the row agrees, else
        1."""
        if self.kind == "oom":
            return float(self.value != self.row.measured)
        return self.value / self.row.measured - 1.0

    @property
    def error_of_speed(self) -> float:
        """Predicted over measured speed, minus 1, also where the row states a time; of other
        quantities the same of them."""
        error = self.relative_error
        return 1 / (1 + error) - 1 if self.row.measure.kind in ("time", "layer") else error


@dataclass(frozen=True)
class RowOutcome:
    """A line of a table with its prediction, or with the reason why there is none."""

    line: Line
    prediction: Prediction | None
    reason: str = ""


def outcome_of(line: Line, cluster: str | None = None) -> RowOutcome:
    """Predict a line, on the preset ``cluster`` if one is given, or say why that is impossible."""
    if line.row is None:
        return RowOutcome(line, None, line.refusal)
    try:
        case = case_of(line.row, cluster)
        prediction = predict_case(line.row, case)
    except UnpredictableError as error:
        return RowOutcome(line, None, str(error))
    wrong = _contradiction(case, prediction)
    return RowOutcome(line, None, f"set apart: {wrong}") if wrong else RowOutcome(line, prediction)


def _contradiction(case: Case, prediction: Prediction) -> str:
    """Why a row's number and its price cannot be of the same run; empty where they can."""
    row = prediction.row
    if prediction.kind == "oom":
        return ""
    factor = prediction.value / row.measured
    if max(factor, 1 / factor) > _SET_APART:
        return (
            f"value={row.value}: simulated as {prediction.text} {row.unit}, {factor:.3g} times as "
            "much (another unit, of one GPU, or of another run?)"
        )
    memory = case.cluster.device.memory_gib
    needed = 0.0 if prediction.fits else simulated(case).peak_bytes / 2**30
    if needed > _MUST_FIT * memory:
        return f"num_gpus={row.num_gpus}: a GPU of {memory:g} GiB would need {needed:.4g} GiB"
    return ""


def predict(row: PublishedRow) -> Prediction:
    """Predict one row; raises UnpredictableError, with the reason, if that is impossible."""
    return predict_case(row, case_of(row))


def predict_case(row: PublishedRow, case: Case) -> Prediction:
    """Predict a row that is priced as ``case``."""
    kind, scale = row.measure.kind, row.measure.units[row.unit]
    if kind == "layer":
        return Prediction(row, scale * _layer_s(row, case))
    result = simulated(case)
    fits = result.peak_bytes <= case.cluster.device.usable_bytes
    if kind == "limit":
        return Prediction(row, float(not fits), fits)
    if kind == "memory":
        whole = row.metric.startswith("peak")  # the other metrics are of a part of the memory
        return Prediction(row, scale * _memory_bytes(row, case, result), fits or not whole)
    return Prediction(row, scale * speed(row, case.cluster.device, result.step_s), fits)


@lru_cache(maxsize=8192)
def simulated(case: Case) -> SimResult:
    """Simulate one step of a case."""
    plan = plan_of(case)
    return simulate(plan, case.cluster, price=price_plan(plan, case.cluster, case.program))


def _memory_bytes(row: PublishedRow, case: Case, result: SimResult) -> float:
    """The memory of the fullest rank, or of the first pipeline rank if the metric names a kind."""
    first = result.memory[0]
    if row.metric == "activation_memory":
        return float(first.activations)
    if row.metric == "state_memory":
        return float(first.parameters + first.gradients + first.optimizer)
    if row.metric == "peak_memory_reserved":
        return reserved_bytes(result.peak_bytes, case.program)
    return float(result.peak_bytes)


def _layer_s(row: PublishedRow, case: Case) -> float:
    """Seconds of one block's forward, backward or both, with tensor-parallel collectives: the
    difference between the model and one with one more block."""
    alone = replace(
        case,
        layout=replace(case.layout, pp=1, chunks=1),
        num_microbatches=1,
        cuts=None,
        recompute_blocks="auto",  # the block is one of those that are recomputed
    )
    plans = [plan_of(replace(alone, shape=replace(case.shape, layers=n))) for n in (1, 2)]
    one, two = (price_plan(plan, case.cluster, case.program).stages[0] for plan in plans)
    forward = two.forward - one.forward
    backward = two.backward_input + two.backward_weight
    backward -= one.backward_input + one.backward_weight
    return {
        "layer_forward_time": forward,
        "layer_backward_time": backward,
        "layer_time": forward + backward,
    }[row.metric]
