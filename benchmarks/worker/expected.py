"""What the gate expects: the results of one process, and how much rounding changes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import BatchSource
from benchmarks.worker.reference import EXACT, ROUNDED, OneProcess, Trajectory
from zeropp.cost import parameter_count
from zeropp.model import build_model
from zeropp.training import OptimizerConfig

STEPS = 3
_FIRST_DECREASE = 0.1  # the share of the loss that the first SGD step removes, to first order
_LEAST_UPDATE = 1e-5  # of a parameter; near 1, as norms' weights are, fp32 resolves 1e-7


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one process does with an optimizer. It is equal on all ranks except for ``updates``.

    ``losses`` and ``grad_norms``: fp64 [steps]. ``update_norms``: fp64 [steps, parameters], in the
    order of ``shapes``. ``loss_rounding``, ``grad_norm_rounding`` (numbers) and ``update_rounding``
    (fp64 [parameters]): the largest relative change of them by rounding in any step.
    ``total_rounding``: that of the update of all parameters together. ``updates``: the update of
    every parameter by name, one mapping per step, on rank 0 only.
    """

    optimizer: OptimizerConfig
    shapes: dict[str, torch.Size]
    losses: Tensor
    grad_norms: Tensor
    update_norms: Tensor
    loss_rounding: float
    grad_norm_rounding: float
    update_rounding: Tensor
    total_rounding: float
    updates: Sequence[dict[str, Tensor]]


def gate_optimizers(
    spec: RunSpec, batches: BatchSource, device: torch.device
) -> tuple[OptimizerConfig, OptimizerConfig]:
    """(plain SGD with a learning rate whose first step should lower the loss by a tenth, the run's
    own optimizer with settings that all count). All ranks must call it."""
    first = torch.zeros(3, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:
        alone = OneProcess(spec, batches, device, ROUNDED[spec.precision])
        first = torch.tensor(alone.first_gradient(), dtype=torch.float64, device=device)
    dist.broadcast(first, 0)
    loss, grad_norm, weight_norm = first.tolist()
    sgd = OptimizerConfig(kind="sgd", lr=_FIRST_DECREASE * loss / grad_norm**2)
    root = parameter_count(spec.model) ** 0.5
    return sgd, in_effect(spec.optimizer, grad_norm / root, weight_norm / root, root)


def in_effect(
    asked: OptimizerConfig, gradient: float, weight: float, root: float
) -> OptimizerConfig:
    """The optimizer with settings that change three steps enough to be seen.

    ``gradient`` and ``weight`` are the root mean squares of the first gradient and of the
    parameters; ``root`` is the square root of the number of parameters. Where the run clips, the
    limit is half of the first gradient's norm, so that every step is clipped. Adam's epsilon is the
    size of the gradient that remains. So an update depends smoothly on its gradient, and rounding
    changes no signs; nor does it stay the same if all gradients are scaled. Where the run has
    weight decay, it moves the parameters half as far as their gradients do. A learning rate with
    which fp32 parameters would hardly change, or not at all, is raised.
    """
    limit = gradient * root / 2 if asked.clip_norm else 0.0
    left = gradient / 2 if limit else gradient
    pull = left if asked.kind == "sgd" else 0.5  # Adam divides by the size of the gradient
    decay = pull / (2 * weight) if asked.weight_decay else 0.0
    rate = max(asked.lr, _LEAST_UPDATE / pull)
    return replace(asked, lr=rate, eps=left, clip_norm=limit, weight_decay=decay)


def expect(
    spec: RunSpec, batches: BatchSource, device: torch.device, optimizer: OptimizerConfig
) -> Expected:
    """Let rank 0 train the whole model alone, with the types of the run and with wider ones, and
    broadcast the results. All ranks must call it."""
    named = build_model(spec.model, 0, "meta").named_parameters()
    shapes = {name: parameter.shape for name, parameter in named}
    table = torch.zeros(STEPS, 6 + 2 * len(shapes), dtype=torch.float64, device=device)
    updates: Sequence[dict[str, Tensor]] = [{} for _ in range(STEPS)]
    if dist.get_rank() == 0:
        exact, rounded = (
            OneProcess(spec, batches, device, types[spec.precision]).train(optimizer, STEPS)
            for types in (EXACT, ROUNDED)
        )
        updates = exact.updates
        table = _tabulate(exact, rounded, list(shapes)).to(device)
    dist.broadcast(table, 0)
    sizes, roundings = table.cpu().chunk(2, dim=1)
    relative = (roundings / sizes).nan_to_num(nan=0.0).max(dim=0).values
    return Expected(
        optimizer=optimizer,
        shapes=shapes,
        losses=sizes[:, 0],
        grad_norms=sizes[:, 1],
        update_norms=sizes[:, 3:],
        loss_rounding=float(relative[0]),
        grad_norm_rounding=float(relative[1]),
        update_rounding=relative[3:],
        total_rounding=float(relative[2]),
        updates=updates,
    )


def _tabulate(exact: Trajectory, rounded: Trajectory, names: Sequence[str]) -> Tensor:
    """One row per step: loss, gradient norm, norm of the whole update and of each parameter's
    update, and then the difference of the rounded run in each of these."""
    rows = []
    for step in range(STEPS):
        wide, narrow = exact.updates[step], rounded.updates[step]
        norms = [norm_of(wide[name]) for name in names]
        differences = [norm_of(narrow[name].double() - wide[name]) for name in names]
        loss, norm = exact.losses[step], exact.grad_norms[step]
        sizes = [loss, norm, math.hypot(*norms), *norms]
        off = [rounded.losses[step] - loss, rounded.grad_norms[step] - norm]
        rows.append([*sizes, *map(abs, off), math.hypot(*differences), *differences])
    return torch.tensor(rows, dtype=torch.float64)


def norm_of(values: Tensor) -> float:
    """The L2 norm, summed in fp64."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
