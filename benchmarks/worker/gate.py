"""The correctness gate: compares three steps of a configuration with the same steps of one process.

What is compared
    First, steps with plain SGD, without clipping and weight decay. Such a step changes every
    parameter by its gradient times the learning rate, so that ``full_parameters`` before and after
    a step shows every gradient of any contender, and a wrong scale is seen (with Adam it would not
    be, as its first step depends on the sign of the gradient only). In each of three steps, every
    rank compares the loss, the gradient norm and every parameter that it holds. So mistakes that
    begin with the second step (gradients that are not zeroed, an optimizer that does nothing) are
    seen, too.
    Then the same with the run's own optimizer, its learning rate and betas. Its other settings are
    made large enough to be seen, where the run has them (``expected.in_effect``): clipping takes
    half of the first gradient, and weight decay moves parameters half as far as gradients do. A
    learning rate whose updates would be lost in the rounding of fp32 parameters is raised.
    Adam's epsilon is as large as gradients are. With the usual 1e-8 rounding would change the sign
    of an update where a gradient is near zero, and scaled gradients would give the same update.

The initial weights
    They are drawn with standard deviation 1/sqrt(hidden). With GPT-2's 0.02 the attention scores of
    a narrow model are nearly equal, and rounding would hide the gradients of queries and keys.

The learning rate
    It is chosen such that the first step should lower the loss by a tenth: lr * |gradient|^2 =
    loss / 10. So the model changes enough that a stale copy of a parameter is seen in the next
    step.

Limits
    One process is trained twice: with the types of the run, and with the next wider ones (fp64 for
    an fp32 run, fp32 for a bf16 run). The difference of the two is what rounding does to a
    quantity. A contender rounds as much, in another order, and may differ from the wider run by

        gate_tolerance * |quantity| + 8 * max(what rounding does, u * |quantity|)

    where u is the unit roundoff of the run's compute type (2^-24 in fp32, 2^-9 in bf16), and what
    rounding does to a quantity is the largest of the three steps, relative to the quantity. A
    quantity of a parameter is the L2 norm of its update in one step.
    The true gradient of a key's bias is zero, because the softmax does not change if a number is
    added to all scores: rounding is then larger than the update, and nothing can be compared.
    ``not_compared`` names the kinds of parameter whose limit is above half of the update.

Models that are too large for one process are compared at a reduced width, with the same layout,
schedule and microbatches: the gate finds mistakes in parallelism, which do not depend on widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.records.record import GateCheck, GateResult
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import BatchSource
from benchmarks.worker.expected import Expected, expect, gate_optimizers
from benchmarks.worker.observed import Observed, observe
from zeropp.cost import parameter_count
from zeropp.literals import Precision
from zeropp.model import initial_std
from zeropp.shape import ModelShape
from zeropp.tune.contender import Contender

_MAX_PARAMETERS = 100_000_000
_ROUNDINGS = 8
_UNIT_ROUNDOFF: dict[Precision, float] = {"fp32": 2.0**-24, "bf16": 2.0**-9}
_MOST = 1e12  # is written for an infinite error or limit, which JSON cannot express
_BLIND = 0.5  # an update whose limit is a larger share of it counts as not compared


def run_gate(
    spec: RunSpec, contender: Contender[Any], batches: BatchSource, device: torch.device
) -> dict[str, Any]:
    """Train the contender and one process, and return the fields of a GateResult, which are equal
    on all ranks. All ranks must call it."""
    small, source, left_out = gated_spec(spec, contender, batches)
    plan = small.plan()
    pairs = []
    with initial_std(small.model.hidden**-0.5):
        for optimizer in gate_optimizers(small, source, device):
            expected = expect(small, source, device, optimizer)
            trainer = contender.build(plan, optimizer, device, small.seed)
            pairs.append(
                (
                    expected,
                    observe(trainer, plan.layout, batches=source, device=device, expected=expected),
                )
            )
            del trainer
    checks = [check for pair in pairs for check in checks_of(small, *pair)]
    return asdict(gate_result(small, checks, left_out))


def gated_spec(
    spec: RunSpec, contender: Contender[Any], batches: BatchSource
) -> tuple[RunSpec, BatchSource, list[str]]:
    """(the spec that the gate trains, its batches, sentences on what is not compared)."""
    shape, left_out = gate_shape(spec.model), []
    if shape.dropout and not contender.reproduces_dropout:
        shape = replace(shape, dropout=0.0)
        left_out.append(f"dropout: compared without, because {contender.label} draws its own masks")
    return replace(spec, model=shape), replace(batches, seq=shape.seq, vocab=shape.vocab), left_out


def gate_shape(shape: ModelShape) -> ModelShape:
    """The shape itself or, if it is too large, a narrow one with the same family, depth and
    numbers of heads."""
    if parameter_count(shape) <= _MAX_PARAMETERS:
        return shape
    hidden = shape.heads * 8
    return replace(
        shape,
        name=f"{shape.name} (reduced to hidden {hidden}, seq 64)",
        hidden=hidden,
        ffn=2 * hidden,
        seq=64,
    )


def gate_result(spec: RunSpec, checks: Sequence[GateCheck], left_out: Sequence[str]) -> GateResult:
    """The result of all checks, in which those with plain SGD come first."""
    by_name = {check.kind: check for check in reversed(checks)}
    blind = [check.kind for check in checks if check.limit > _BLIND]
    seen = [check.error for check in checks if check.worst and check.kind not in blind]
    return GateResult(
        passed=all(check.error <= check.limit for check in checks),
        tolerance=spec.measure.gate_tolerance,
        loss_error=by_name["loss (sgd)"].error,
        grad_norm_error=by_name["gradient norm (sgd)"].error,
        parameter_error=max(seen, default=0.0),
        shape=spec.model.name,
        checks=list(checks),
        not_compared=[*left_out, *(f"{kind}: rounding hides its update" for kind in blind)],
    )


def checks_of(spec: RunSpec, expected: Expected, observed: Observed) -> list[GateCheck]:
    """The checks of the steps with one optimizer: loss, gradient norm, all parameters together, and
    for each kind of parameter (its name without the piece's number) the worst parameter and
    step."""
    rounding = _Rounding.of(spec)
    kinds: dict[str, list[GateCheck]] = {}
    for index, name in enumerate(expected.shapes):
        limit = rounding.limit(float(expected.update_rounding[index]))
        kind = f"{name.partition('.')[2]} ({expected.optimizer.kind})"
        check = _worst_step(kind, observed.updates[:, index], limit, name)
        kinds.setdefault(kind, []).append(check)
    return [*total_checks(spec, expected, observed), *map(worst_check, kinds.values())]


def total_checks(spec: RunSpec, expected: Expected, observed: Observed) -> Iterator[GateCheck]:
    """Loss, gradient norm and the updates of all parameters together, each in its worst step."""
    rounding, sizes = _Rounding.of(spec), expected.update_norms
    updates = (observed.updates * sizes).nan_to_num(nan=0.0).norm(dim=1) / sizes.norm(dim=1)
    for name, errors, measured in (
        ("loss", observed.losses, expected.loss_rounding),
        ("gradient norm", observed.grad_norms, expected.grad_norm_rounding),
        ("all parameters", updates, expected.total_rounding),
    ):
        kind = f"{name} ({expected.optimizer.kind})"
        yield _worst_step(kind, errors, rounding.limit(measured))


def worst_check(checks: Sequence[GateCheck]) -> GateCheck:
    """The check with the largest error in relation to its limit."""
    return max(checks, key=lambda check: check.error / check.limit)


@dataclass(frozen=True)
class _Rounding:
    """How far apart two numbers may be; the module's docstring has the formula."""

    tolerance: float
    unit: float

    @classmethod
    def of(cls, spec: RunSpec) -> _Rounding:
        return cls(spec.measure.gate_tolerance, _UNIT_ROUNDOFF[spec.precision])

    def limit(self, measured: float) -> float:
        """The relative limit of a number that rounding was seen to change by ``measured``."""
        return self.tolerance + _ROUNDINGS * max(measured, self.unit)


def _worst_step(kind: str, errors: Tensor, limit: float, parameter: str = "") -> GateCheck:
    errors = errors.nan_to_num(nan=math.inf)  # where one process gets no numbers, as it diverges
    step = int(errors.argmax())
    error, limit = (min(number, _MOST) for number in (float(errors[step]), limit))
    return GateCheck(kind=kind, worst=parameter, step=step + 1, error=error, limit=limit)
