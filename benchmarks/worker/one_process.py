"""One process that trains the whole model of a spec: what every contender is compared with."""

from __future__ import annotations

import hashlib
import math
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baselines.model import build_model, cross_entropy
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import BatchSource
from benchmarks.worker.meters import LOADED
from zeropp.engine.layers.eight_bits import to_8_bits
from zeropp.engine.loss import Loss, Microbatches
from zeropp.engine.update.update_rules import build_optimizer
from zeropp.price import parameter_count
from zeropp.train import one_process
from zeropp.types.literals import Precision
from zeropp.types.training import OptimizerConfig

T = TypeVar("T")

_KEPT_PARAMETERS = 4_000_000  # the updates of three steps take 48 MB


@dataclass(frozen=True)
class NumberTypes:
    """The number types of one training run: of the parameters that the optimizer updates
    (``masters``), of the copies with which the model computes, and of the sums of the gradients of
    microbatches; ``eight_bits``: whether blocks multiply in 8 bits."""

    masters: torch.dtype
    compute: torch.dtype
    sums: torch.dtype
    eight_bits: bool = False


# With the types of the run, one process makes rounding errors like those of any contender.
ROUNDED: dict[Precision, NumberTypes] = {
    "fp32": NumberTypes(torch.float32, torch.float32, torch.float32),
    "bf16": NumberTypes(torch.float32, torch.bfloat16, torch.float32),
    "fp8": NumberTypes(torch.float32, torch.bfloat16, torch.float32, eight_bits=True),
}
# With the next wider types, it makes almost none of these.
EXACT: dict[Precision, NumberTypes] = {
    "fp32": NumberTypes(torch.float64, torch.float64, torch.float64),
    "bf16": NumberTypes(torch.float32, torch.float32, torch.float32),
    "fp8": ROUNDED["bf16"],
}


def types_of(spec: RunSpec) -> NumberTypes:
    """The types of a run, with sums in bf16 where it asks for them."""
    types = ROUNDED[spec.precision]
    return replace(types, sums=torch.bfloat16) if asks_for_narrow_sums(spec) else types


def asks_for_narrow_sums(spec: RunSpec) -> bool:
    """Whether a run asks for gradients of microbatches to be summed in bf16."""
    return spec.plan().sum_dtype == "bf16"


@dataclass(frozen=True)
class Trajectory:
    """Some steps of one process, with one entry per step: mean loss (nats per token), global L2
    norm of the gradient before clipping, and the change of each parameter by name (fp32, on the
    CPU; none where updates were not asked for)."""

    losses: list[float]
    grad_norms: list[float]
    updates: list[dict[str, Tensor]]


class OneProcess:
    """The whole model of a spec on one device, in the given types: ``zeropp.check``'s plain loop
    over its microbatches, and torch's optimizer.

    ``halves``: every matrix product of a linear layer is computed in halves, each of them rounded,
    as two tensor-parallel ranks round what they then add up. It is as right as the whole product,
    and rounds in another way.
    """

    def __init__(
        self,
        spec: RunSpec,
        batches: BatchSource,
        device: torch.device,
        types: NumberTypes,
        *,
        halves: bool = False,
    ) -> None:
        self._spec, self._batches, self._device = spec, batches, device
        self._masters = build_model(spec.model, spec.seed, device).to(types.masters)
        self._working = build_model(spec.model, spec.seed, device).to(types.compute)
        if types.eight_bits:
            for block in list(self._working)[1:-1]:
                to_8_bits(block, device)
        if spec.model.dropout:
            drawn_in = ROUNDED[spec.precision].compute
            for block in list(self._working)[1:-1]:
                block.dropout = _Dropout(spec.model.dropout, drawn_in)
        if halves:
            for module in self._working.modules():
                if type(module) is nn.Linear:  # what is in 8 bits rounds by its casts
                    module.forward = partial(_in_halves, module)  # type: ignore[method-assign]
        self._plain = one_process.OneProcess(
            list(self._working),
            list(self._masters.parameters()),
            Loss(cross_entropy, "mean"),
            sums=types.sums,
            seed=spec.seed if spec.model.dropout else None,
        )

    def first_gradient(self) -> tuple[float, float, float]:
        """(loss, gradient norm, norm of the parameters) in the first batch; no parameter is
        changed."""
        loss = self._accumulate(0)
        weights = _norm(p.detach() for p in self._masters.parameters())
        return loss, float(self._grad_norm()), float(weights)

    def train(
        self,
        config: OptimizerConfig,
        steps: int,
        *,
        updates: bool = True,
        until: float = math.inf,
    ) -> Trajectory:
        """Train for some steps, from the current parameters on; ``updates``: whether the trajectory
        has them. No step but the first begins after the moment ``until`` (``time.monotonic``)."""
        optimizer = build_optimizer(self._masters.parameters(), config)
        trajectory = Trajectory([], [], [])
        for step in range(steps):
            if step and time.monotonic() > until:
                break
            named = dict(self._masters.named_parameters()) if updates else {}
            before = {name: parameter.detach().clone() for name, parameter in named.items()}
            trajectory.losses.append(self._accumulate(step))
            trajectory.grad_norms.append(float(norm := self._grad_norm()))
            if config.clip_norm:
                nn.utils.clip_grads_with_norm_(self._masters.parameters(), config.clip_norm, norm)
            optimizer.step()
            trajectory.updates.append(
                {
                    name: (parameter.detach() - before[name]).float().cpu()
                    for name, parameter in named.items()
                }
            )
        return trajectory

    def _grad_norm(self) -> Tensor:
        return _norm(p.grad for p in self._masters.parameters() if p.grad is not None)

    def _accumulate(self, step: int) -> float:
        """Sum the gradients of all microbatches of a step into the masters; returns the loss. It
        takes one microbatch at a time, so that memory does not grow with the batch."""
        count = self._spec.global_batch // self._spec.candidate.microbatch_size
        inputs, targets = (
            torch.from_numpy(part).to(self._device).chunk(count)
            for part in self._batches.batch(step)
        )
        return float(self._plain.gradients(Microbatches(inputs, targets, []), step))


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all their numbers in fp64, by torch alone: a fault of the engine's is none of
    the gate's."""
    squares = [torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in tensors]
    return torch.stack(squares).sum().sqrt()


def _in_halves(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's output for ``x`` [..., in]: every half of it is a sum over two halves of ``in``,
    so that both the products and those of the input's gradient are rounded in halves."""
    first, second = (
        torch.cat([F.linear(part, rows) for rows in weight.chunk(2)], dim=-1)
        for part, weight in zip(x.chunk(2, dim=-1), layer.weight.chunk(2, dim=1), strict=True)
    )
    total = first + second
    return total if layer.bias is None else total + layer.bias


class _Dropout(nn.Module):
    """Dropout with the masks of ``nn.Dropout`` on an input of type ``drawn_in``.

    From one seed, a GPU draws different masks for different types, but the run with wider types
    must drop the same elements as the run itself.
    """

    def __init__(self, probability: float, drawn_in: torch.dtype) -> None:
        super().__init__()
        self._probability, self._drawn_in = probability, drawn_in

    def forward(self, x: Tensor) -> Tensor:
        """Input and output have the same shape, which may be any."""
        kept = F.dropout(torch.ones_like(x, dtype=self._drawn_in), self._probability) != 0
        return x * kept / (1 - self._probability)


def remembered(
    folder: Path | None, spec: RunSpec, device: torch.device, what: str, make: Callable[[], T]
) -> T:
    """What ``make`` returns, or what it returned to an earlier run of the same training with the
    same files and torch, who left it in the ``folder``. All contenders of a sweep share it. Of
    large models nothing is kept, because the updates of three steps are."""
    if folder is None or parameter_count(spec.model) > _KEPT_PARAMETERS:
        return make()
    trained = [spec.model, spec.data, spec.global_batch, spec.candidate.microbatch_size, spec.seed]
    trained += [spec.precision, types_of(spec)]
    question = f"{LOADED.digest} {torch.__version__} {device} {trained} {what}"
    file = folder / f"{hashlib.sha256(question.encode()).hexdigest()[:24]}.pt"
    # A file that somebody cut short, or that is not there, is made anew.
    with suppress(OSError, RuntimeError, EOFError, pickle.UnpicklingError):
        kept: T = torch.load(file)
        return kept
    made = make()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as fresh:
        torch.save(made, fresh)
    Path(fresh.name).replace(file)
    return made
