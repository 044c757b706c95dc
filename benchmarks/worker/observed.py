"""How far a contender's steps in the gate differ from those of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.worker.data import BatchSource
from benchmarks.worker.data.local_batch import local_batch
from benchmarks.worker.expected import Expected, norm_of
from zeropp.layout import Layout
from zeropp.training import Trainer

_BROADCAST_ELEMENTS = 2**22  # 16 MiB in fp32


@dataclass(frozen=True)
class Observed:
    """The differences from one process, relative to its values and the largest of all ranks.

    ``losses`` and ``grad_norms``: fp64 [steps]; ``updates``: fp64 [steps, parameters]. A value that
    is missing or not a number is infinite.
    """

    losses: Tensor
    grad_norms: Tensor
    updates: Tensor


def observe(
    trainer: Trainer,
    layout: Layout,
    *,
    batches: BatchSource,
    device: torch.device,
    expected: Expected,
) -> Observed:
    """Train as many steps as the reference and compare after each. All ranks must call it."""
    before = _copies(trainer)
    rows = []
    for step, updates in enumerate(expected.updates):
        result = trainer.step(*local_batch(batches, layout, step, device))
        after = _copies(trainer)
        loss, norm = float(expected.losses[step]), float(expected.grad_norms[step])
        scalars = [abs(result.loss - loss) / loss, abs(result.grad_norm - norm) / norm]
        distances = _distances(
            before, after, updates=updates, shapes=expected.shapes, device=device
        )
        sizes = expected.update_norms[step].tolist()
        rows.append([*scalars, *map(_ratio, distances, sizes)])
        before = after
    table = torch.tensor(rows, dtype=torch.float64).nan_to_num(nan=math.inf).to(device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    table = torch.where(table < 0, math.inf, table).cpu()  # a parameter that no rank gave
    return Observed(table[:, 0], table[:, 1], table[:, 2:])


def _copies(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the parameters; on a CPU a trainer may yield the tensors that it updates."""
    return {name: parameter.clone() for name, parameter in trainer.full_parameters()}


def _distances(
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    *,
    updates: dict[str, Tensor],
    shapes: dict[str, torch.Size],
    device: torch.device,
) -> Iterator[float]:
    """Per parameter, the L2 norm of the difference between this rank's update and that of rank 0's
    one process; -1 for parameters that this rank does not hold."""
    for names in _batches(shapes):
        sizes = [shapes[name].numel() for name in names]
        wanted = torch.empty(sum(sizes), device=device)
        if updates:
            wanted = torch.cat([updates[name].flatten() for name in names]).to(device)
        dist.broadcast(wanted, 0)
        for name, update in zip(names, torch.split(wanted.cpu(), sizes), strict=True):
            if name in after:
                seen = after[name].double() - before[name]
                yield norm_of(seen.flatten() - update)
            else:
                yield -1.0


def _batches(shapes: dict[str, torch.Size]) -> Iterator[list[str]]:
    """The names of the parameters in their order, in groups that are broadcast together, so that
    small parameters do not cost one broadcast each."""
    names: list[str] = []
    elements = 0
    for name, shape in shapes.items():
        names.append(name)
        elements += shape.numel()
        if elements >= _BROADCAST_ELEMENTS:
            yield names
            names, elements = [], 0
    if names:
        yield names


def _ratio(distance: float, size: float) -> float:
    """A distance relative to the expected update's norm; -1 stays -1."""
    if distance <= 0:
        return distance
    return distance / size if size else math.inf
