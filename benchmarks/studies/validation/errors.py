"""The results of validation: predictions, errors per source and kind, refusals per reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal

import numpy as np

from benchmarks.studies.validation.cases import (
    EIGHT_BIT,
    Case,
    case_of,
    cluster_of,
    flops_per_token,
    peak_flops,
    plan_of,
)
from benchmarks.studies.validation.rows import Line, PublishedRow, UnpredictableError
from zeropp.cost import price_plan
from zeropp.programs import program_named
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


def predict(row: PublishedRow) -> Prediction:
    """Predict one row; raises UnpredictableError, with the reason, if that is impossible."""
    return predict_case(row, case_of(row))


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
        return row.global_batch * row.seq * flops_per_token(row) / step_s / each
    if kind == "utilization":
        flops = row.global_batch * row.seq * flops_per_token(row) / step_s
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


# Pairs of published runs that differ only in schedule or parallelism, or only in the microbatch.
#
# The error of a pair is that of the ratio of its two values: predicted ratio over measured ratio -
# 1.


# The columns of schedule and parallelism.
DIFFER = (
    "tp", "pp", "chunks", "dp", "zero", "zero1_group", "zero3_group", "schedule",
    "sequence_parallel", "cuts",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two rows, by index, and the ratio of the first one's value to the second one's. ``kind`` is
    microbatch where the microbatch alone differs, and ratio where it does not."""

    first: int
    second: int
    kind: Literal["ratio", "microbatch"]
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        """The predicted ratio over the measured ratio, minus 1."""
        return self.predicted / self.measured - 1.0

    @property
    def ordered(self) -> bool | None:
        """Whether the predicted order is the measured one; None where the two runs differ by 2 % or
        less, and no order is known."""
        if abs(np.log(self.measured)) <= np.log(1.02):
            return None
        return (self.measured > 1) is (self.predicted > 1)


def pairs_of(rows: Sequence[PublishedRow], predictions: Sequence[Prediction]) -> list[Pair]:
    """All pairs of predicted throughput rows with the same metric and unit."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, (row, prediction) in enumerate(zip(rows, predictions, strict=True)):
        if prediction.kind == "throughput":
            free = (*DIFFER, "micro_batch", "table")
            equal = tuple(pair for pair in row.run if pair[0] not in free)
            groups[row.metric, row.unit, equal].append(index)
    return [
        Pair(
            first=i,
            second=j,
            kind=kind,
            measured=rows[i].measured / rows[j].measured,
            predicted=predictions[i].value / predictions[j].value,
        )
        for members in groups.values()
        for i, j in combinations(members, 2)
        if (kind := _kind(rows[i], rows[j]))
    ]


def _kind(first: PublishedRow, second: PublishedRow) -> Literal["ratio", "microbatch"] | None:
    other = any(getattr(first, field) != getattr(second, field) for field in DIFFER)
    if first.micro_batch == second.micro_batch:
        return "ratio" if other else None
    return None if other else "microbatch"


KINDS = ("throughput", "memory", "ratio", "microbatch")


@dataclass(frozen=True)
class RowOutcome:
    """A line of a table with its prediction, or with the reason why there is none."""

    line: Line
    prediction: Prediction | None
    reason: str = ""


@dataclass(frozen=True)
class Predicted:
    """A row with its prediction."""

    row: PublishedRow
    prediction: Prediction


def outcome_of(line: Line, cluster: str | None = None) -> RowOutcome:
    """Predict a line, on the preset ``cluster`` if one is given, or say why that is impossible."""
    if line.row is None:
        return RowOutcome(line, None, line.refusal)
    try:
        case = case_of(line.row, cluster)
        prediction = predict_case(line.row, case)
    except UnpredictableError as error:
        return RowOutcome(line, None, str(error))
    wrong = _contradiction(line.row, case, prediction)
    return RowOutcome(line, None, f"set apart: {wrong}") if wrong else RowOutcome(line, prediction)


# A number that is further from its price than this factor, or of a run that would need this many
# times the device's memory, is of something else than its row says.
_SET_APART = 3.0
_MUST_FIT = 1.5


def _contradiction(row: PublishedRow, case: Case, prediction: Prediction) -> str:
    """Why a row's number and its price cannot be of the same run; empty where they can."""
    if row.unit == "yes/no":
        return ""
    factor = prediction.value / row.measured
    if max(factor, 1 / factor) > _SET_APART:
        return (
            f"value={row.value}: the price is {prediction.text} {row.unit}, {factor:.3g} times as "
            "much (another unit, of one GPU, or of another run?)"
        )
    memory = case.cluster.device.memory_gib
    needed = 0.0 if prediction.fits else simulated(case).peak_bytes / 2**30
    if needed > _MUST_FIT * memory:
        return f"num_gpus={row.num_gpus}: a GPU of {memory:g} GiB would need {needed:.4g} GiB"
    return ""


def predicted_rows(outcomes: Iterable[RowOutcome]) -> list[Predicted]:
    """The rows that have a prediction."""
    return [
        Predicted(o.line.row, o.prediction)
        for o in outcomes
        if o.line.row is not None and o.prediction is not None
    ]


def first_of_runs(predicted: Iterable[Predicted]) -> list[Predicted]:
    """One row per run and quantity. A run whose speed is printed in three units counts once, by its
    first row. Equal rows with the same metric are repeated runs, and all of them count."""
    repeats: Counter[tuple[Any, ...]] = Counter()
    seen: set[tuple[Any, ...]] = set()
    first = []
    for one in predicted:
        row, kind = one.row, one.row.measure.kind
        speed = kind in ("time", "rate", "flops", "utilization")
        repeats[row.run, row.metric] += 1
        key = (row.run, "speed" if speed else row.metric, repeats[row.run, row.metric])
        if key not in seen:
            seen.add(key)
            first.append(one)
    return first


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The absolute relative errors of one source and kind (throughput, memory, or the ratio of two
    runs). ``rows`` counts printed numbers; all else is over ``runs``."""

    kind: str
    source: str
    role: str  # fitted, adjusted, held out, computed; of totals: both, or any with computed
    rows: int
    runs: int
    median: float
    p90: float
    bias: float | None = None  # median of time, or memory, over the measured one, minus 1
    signs: float | None = None  # of pairs: the share whose order is right
    ordered: int = 0  # the pairs that differ enough for that

    def cells(self) -> dict[str, Any]:
        """The line of ``errors.csv``."""
        shares = {name: getattr(self, name) for name in ("median", "p90", "bias", "signs")}
        written = {name: "" if of is None else f"{of:.4f}" for name, of in shares.items()}
        return asdict(self) | written

    def line(self) -> str:
        """The line that is printed under ``HEADER``, in 100 columns."""
        source = self.source if len(self.source) <= 30 else f"{self.source[:29]}…"
        bias = "" if self.bias is None else f"{self.bias:+.1%}"
        signs = "" if self.signs is None else f"{self.signs:.0%} of {self.ordered}"
        return (
            f"{self.kind:10}  {source:30}  {self.role:8}  {self.rows:4}  {self.runs:4}  "
            f"{self.median:6.1%}  {self.p90:6.1%}  {bias:>6}  {signs}"
        ).rstrip()


HEADER = f"{'kind':10}  {'source':30}  {'role':8}  rows  runs  median     p90    bias  signs"


def errors_of(predicted: Sequence[Predicted]) -> list[Errors]:
    """Errors per kind and source, per software generation and device, and over all sources; ratios
    come last."""
    rows: Counter[tuple[str, str, str]] = Counter()
    absolute: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    signed: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in predicted:
        rows.update(_groups(one.prediction.kind, one.row))
    runs = first_of_runs(predicted)
    for one in runs:
        for group in _groups(one.prediction.kind, one.row):
            absolute[group].append(abs(one.prediction.relative_error))
            signed[group].append(_slower(one))
    found = [
        _errors(group, rows[group], absolute[group], bias=float(np.median(of)))
        for group, of in signed.items()
        if group[0] in KINDS
    ]
    pairs: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs_of([one.row for one in runs], [one.prediction for one in runs]):
        for group in _groups(pair.kind, runs[pair.first].row):
            pairs[group].append(pair)
    for group, of in pairs.items():
        right = [pair.ordered for pair in of if pair.ordered is not None]
        signs = sum(right) / len(right) if right else None
        errors = [abs(pair.relative_error) for pair in of]
        found.append(_errors(group, len(of), errors, signs=signs, ordered=len(right)))
    return sorted(found, key=lambda e: (KINDS.index(e.kind), e.source.startswith("all"), e.source))


def _slower(one: Predicted) -> float:
    """By which share the predicted time, or memory, is more than the measured one."""
    error, kind = one.prediction.relative_error, one.row.measure.kind
    return error if kind in ("time", "layer", "memory", "limit") else 1 / (1 + error) - 1


def _errors(group: tuple[str, str, str], rows: int, of: Sequence[float], **more: Any) -> Errors:
    kind, source, role = group
    median, p90 = (float(percentile) for percentile in np.percentile(of, (50, 90)))
    return Errors(
        kind=kind, source=source, role=role, rows=rows, runs=len(of), median=median, p90=p90, **more
    )


def _generation(row: PublishedRow) -> str:
    """The generation of the kernels with which a row is priced, and whether products have 8 bits;
    empty for the only one of a device."""
    newer, words = cluster_of(row).device.newer, []
    if newer is not None:
        today = program_named(row.program).kernels >= newer.year
        words.append(f"kernels {'of' if today else 'before'} {newer.year}")
    return ", ".join(words + ["8 bits"] * (row.dtype in EIGHT_BIT))


def _groups(kind: str, row: PublishedRow) -> list[tuple[str, str, str]]:
    """The groups whose errors include the row's. Numbers that their source computed and did not
    measure count for their source, and in one total beside all measured ones."""
    role = row.role.replace("_", " ")
    groups = [(row.source, role), ("all sources, computed numbers too", "any")]
    if row.role != "computed":
        groups += [(f"all {role} sources", role), ("all sources", "both")]
        groups += [(f"all on {row.device}", "both")]
        if kernels := _generation(row):
            groups += [(f"all on {row.device}, {kernels}", "both")]
    return [(kind, *group) for group in groups]


def oom_line(predicted: Sequence[Predicted]) -> str:
    """A line that says how often the model is right on whether a run fits into memory: for runs
    that were out of memory, and for runs that ran, which are all rows with a measured number."""
    runs = [p for p in predicted if p.row.role != "computed"]
    out = [p.prediction for p in runs if p.row.unit == "yes/no" and p.row.value == "yes"]
    ran = [p.prediction for p in runs if p.row.unit != "yes/no" or p.row.value == "no"]
    right, wrong = sum(not p.fits for p in out), sum(not p.fits for p in ran)
    first = f"{right} of {len(out)} such rows predicted" if out else "no such rows"
    return f"out of memory: {first}; {wrong} of {len(ran)} rows that ran predicted not to fit"


def refusals(outcomes: Iterable[RowOutcome]) -> Counter[tuple[str, str]]:
    """The number of rows without a prediction per table and reason."""
    return Counter(
        (o.line.place.rpartition(":")[0], o.reason) for o in outcomes if o.prediction is None
    )
