"""The correctness gate: one step of a configuration against one process on the same batch.

Compared are the loss, the gradient's global norm and what the optimizer's step did to every
parameter of the model.
Models too large for one process are gated at a reduced size with the same layout, schedule and
microbatches: what the gate checks is the wiring, and that does not depend on widths.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import BatchSource
from benchmarks.worker.data.local_batch import local_batch
from zeropp.cost import parameter_count
from zeropp.model import build_model, cross_entropy
from zeropp.optimizer import build_optimizer
from zeropp.shape import ModelShape
from zeropp.training import StepResult
from zeropp.tune.contender import Contender

_MAX_PARAMETERS = 100_000_000
_BF16_TOLERANCE = 2e-2  # a bf16 number has 8 bits of significand: 2**-8 = 4e-3 a rounding
# Adam's first update is the gradient's sign, so a gradient near zero may turn an element round.
# An optimizer that did nothing would be off by 1.
_UPDATE_TOLERANCE = {"fp32": 1e-2, "bf16": 0.5}


def run_gate(
    spec: RunSpec, contender: Contender[Any], batches: BatchSource, device: torch.device
) -> dict[str, Any]:
    """Train one step both ways and return the fields of a GateResult, equal on every rank."""
    shape = replace(gate_shape(spec.model), dropout=0.0)
    small = replace(spec, model=shape)
    plan = small.plan()
    source = replace(batches, seq=shape.seq, vocab=shape.vocab)
    trainer = contender.build(plan, spec.optimizer, device, spec.seed)
    result = trainer.step(*local_batch(source, plan.layout, 0, device))
    before = {n: p.detach().clone() for n, p in _named(build_model(shape, spec.seed, device))}
    after, expected = _reference_step(small, source, device)
    tolerance = spec.measure.gate_tolerance
    if spec.precision == "bf16":
        tolerance = max(tolerance, _BF16_TOLERANCE)
    errors = {
        "loss_error": _relative(result.loss, expected.loss),
        "grad_norm_error": _relative(result.grad_norm, expected.grad_norm),
        "parameter_error": _update_error(dict(trainer.full_parameters()), before, after, device),
    }
    agreed = _largest(list(errors.values()), device)
    limits = (tolerance, tolerance, _UPDATE_TOLERANCE[spec.precision])
    passed = all(error <= limit for error, limit in zip(agreed, limits, strict=True))
    named = dict(zip(errors, agreed, strict=True))
    return {"passed": passed, "tolerance": tolerance, "shape": shape.name, **named}


def gate_shape(shape: ModelShape) -> ModelShape:
    """The shape itself, or a narrow one of the same family, depth and head counts."""
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


def _reference_step(
    spec: RunSpec, batches: BatchSource, device: torch.device
) -> tuple[dict[str, Tensor], StepResult]:
    """Rank 0 trains the whole model alone for one step; the outcome is broadcast.

    Computed in fp32 and microbatch by microbatch, so that its memory does not grow with the batch.
    """
    model = build_model(spec.model, spec.seed, device)
    scalars = torch.zeros(2, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:
        loss, norm = _train_alone(model, spec, batches, device)
        scalars = torch.tensor([loss, norm], dtype=torch.float64, device=device)
    dist.broadcast(scalars, 0)
    parameters = {}
    for name, parameter in _named(model):
        dist.broadcast(parameter.data, 0)
        parameters[name] = parameter.detach()
    return parameters, StepResult(float(scalars[0]), float(scalars[1]))


def _train_alone(
    model: nn.Sequential, spec: RunSpec, batches: BatchSource, device: torch.device
) -> tuple[float, float]:
    optimizer = build_optimizer(model.parameters(), spec.optimizer)
    inputs, targets = (torch.from_numpy(part).to(device) for part in batches.batch(0))
    count = spec.global_batch // spec.candidate.microbatch_size
    total = 0.0
    for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
        loss = cross_entropy(model(x), y) / count
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    limit = spec.optimizer.clip_norm or math.inf
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    return total, float(norm)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


def _update_error(
    parameters: dict[str, Tensor],
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    device: torch.device,
) -> float:
    """Norm of the difference over the norm of the reference's update, over this rank's
    parameters; infinite where the ranks together do not give every parameter of the model."""
    seen = torch.tensor([name in parameters for name in after], dtype=torch.int32, device=device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    if not seen.all():
        return math.inf
    difference = update = 0.0
    for name, parameter in parameters.items():
        wanted, start = after[name].cpu().double(), before[name].cpu().double()
        difference += float((parameter - wanted).square().sum())
        update += float((wanted - start).square().sum())
    return math.sqrt(difference / update)


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def _largest(values: list[float], device: torch.device) -> list[float]:
    """Element-wise maximum over ranks; a NaN anywhere becomes infinity, and so fails."""
    finite = [v if math.isfinite(v) else math.inf for v in values]
    tensor = torch.tensor(finite, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()
