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
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.records.record import GateCheck, GateResult
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import BatchSource, local_batch
from zeropp.choose.contender import Contender
from zeropp.engine.chunk import seed_piece
from zeropp.engine.optimizer import build_optimizer
from zeropp.layout import Layout
from zeropp.literals import Precision
from zeropp.model import build_model, cross_entropy, initial_std
from zeropp.price import parameter_count
from zeropp.shape import ModelShape
from zeropp.training import OptimizerConfig, Trainer

STEPS = 3
_FIRST_DECREASE = 0.1  # the share of the loss that the first SGD step removes, to first order
_LEAST_UPDATE = 1e-5  # of a parameter; near 1, as norms' weights are, fp32 resolves 1e-7
_BROADCAST_ELEMENTS = 2**22  # 16 MiB in fp32
_MAX_PARAMETERS = 100_000_000
_ROUNDINGS = 8
_UNIT_ROUNDOFF: dict[Precision, float] = {"fp32": 2.0**-24, "bf16": 2.0**-9}
_MOST = 1e12  # is written for an infinite error or limit, which JSON cannot express
_BLIND = 0.5  # an update whose limit is a larger share of it counts as not compared


@dataclass(frozen=True)
class NumberTypes:
    """The number types of one training run: of the parameters that the optimizer updates
    (``masters``), and of the copies with which the model computes. Gradients are summed in the type
    of ``masters``."""

    masters: torch.dtype
    compute: torch.dtype


# With the types of the run, one process makes rounding errors like those of any contender.
ROUNDED: dict[Precision, NumberTypes] = {
    "fp32": NumberTypes(torch.float32, torch.float32),
    "bf16": NumberTypes(torch.float32, torch.bfloat16),
}
# With the next wider types, it makes almost none.
EXACT: dict[Precision, NumberTypes] = {
    "fp32": NumberTypes(torch.float64, torch.float64),
    "bf16": NumberTypes(torch.float32, torch.float32),
}


@dataclass(frozen=True)
class Trajectory:
    """Some steps of one process, with one entry per step: mean loss (nats per token), global L2
    norm of the gradient before clipping, and the change of each parameter by name (fp32, on the
    CPU)."""

    losses: list[float]
    grad_norms: list[float]
    updates: list[dict[str, Tensor]]


class OneProcess:
    """The whole model of a spec on one device, in the given types: what every contender is compared
    with. Nothing in it is distributed; gradients come from one backward per microbatch, and the
    optimizer is torch's."""

    def __init__(
        self, spec: RunSpec, batches: BatchSource, device: torch.device, types: NumberTypes
    ) -> None:
        self._spec, self._batches, self._device = spec, batches, device
        self._masters = build_model(spec.model, spec.seed, device).to(types.masters)
        self._working = build_model(spec.model, spec.seed, device).to(types.compute)
        if spec.model.dropout:
            drawn_in = ROUNDED[spec.precision].compute
            for block in list(self._working)[1:-1]:
                block.dropout = _Dropout(spec.model.dropout, drawn_in)

    def first_gradient(self) -> tuple[float, float, float]:
        """(loss, gradient norm, norm of the parameters) in the first batch; no parameter is
        changed."""
        loss = self._accumulate(0)
        norm = nn.utils.clip_grad_norm_(self._masters.parameters(), math.inf)
        weights = nn.utils.get_total_norm(list(self._masters.parameters()))
        return loss, float(norm), float(weights)

    def train(self, config: OptimizerConfig, steps: int) -> Trajectory:
        """Train for some steps, from the current parameters on."""
        optimizer = build_optimizer(self._masters.parameters(), config)
        trajectory = Trajectory([], [], [])
        for step in range(steps):
            before = {name: p.detach().clone() for name, p in self._masters.named_parameters()}
            trajectory.losses.append(self._accumulate(step))
            limit = config.clip_norm or math.inf
            norm = nn.utils.clip_grad_norm_(self._masters.parameters(), limit)
            trajectory.grad_norms.append(float(norm))
            optimizer.step()
            trajectory.updates.append(
                {
                    name: (parameter.detach() - before[name]).float().cpu()
                    for name, parameter in self._masters.named_parameters()
                }
            )
        return trajectory

    def _accumulate(self, step: int) -> float:
        """Sum the gradients of all microbatches of a step into the masters; returns the loss. It
        takes one microbatch at a time, so that memory does not grow with the batch."""
        self._masters.zero_grad()
        pairs = list(zip(self._masters.parameters(), self._working.parameters(), strict=True))
        for master, working in pairs:
            working.data.copy_(master.data)
        inputs, targets = (torch.from_numpy(p).to(self._device) for p in self._batches.batch(step))
        count = self._spec.global_batch // self._spec.candidate.microbatch_size
        total = 0.0
        for number, (x, y) in enumerate(
            zip(inputs.chunk(count), targets.chunk(count), strict=True)
        ):
            loss = cross_entropy(self._forward(x, step, number), y) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            for master, working in pairs:
                if working.grad is not None:
                    fresh = working.grad.to(master.dtype)
                    master.grad = fresh if master.grad is None else master.grad + fresh
                    working.grad = None
        return total

    def _forward(self, tokens: Tensor, step: int, microbatch: int) -> Tensor:
        hidden = tokens
        for index, piece in enumerate(self._working):
            if self._spec.model.dropout:
                seed_piece(self._spec.seed, step, microbatch, index)
            hidden = piece(hidden)
        return hidden


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
        ratios = (  # -1 stays -1
            distance if distance <= 0 else distance / size if size else math.inf
            for distance, size in zip(distances, sizes, strict=True)
        )
        rows.append([*scalars, *ratios])
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


def run_gate(
    spec: RunSpec, contender: Contender[Any], batches: BatchSource, device: torch.device
) -> dict[str, Any]:
    """Train the contender and one process, and return the fields of a GateResult, which are equal
    on all ranks. All ranks must call it."""
    small, source, left_out = gated_spec(spec, contender, batches)
    plan = small.plan()
    checks: list[GateCheck] = []
    with initial_std(small.model.hidden**-0.5):
        for optimizer in gate_optimizers(small, source, device):
            expected = expect(small, source, device, optimizer)
            trainer = contender.build(plan, optimizer, device, small.seed)
            observed = observe(
                trainer, plan.layout, batches=source, device=device, expected=expected
            )
            checks += checks_of(small, expected, observed)
            del trainer
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
    kinds: dict[str, list[GateCheck]] = {}
    for index, name in enumerate(expected.shapes):
        limit = _limit(spec, float(expected.update_rounding[index]))
        kind = f"{name.partition('.')[2]} ({expected.optimizer.kind})"
        check = _worst_step(kind, observed.updates[:, index], limit, name)
        kinds.setdefault(kind, []).append(check)
    return [*total_checks(spec, expected, observed), *map(worst_check, kinds.values())]


def total_checks(spec: RunSpec, expected: Expected, observed: Observed) -> Iterator[GateCheck]:
    """Loss, gradient norm and the updates of all parameters together, each in its worst step."""
    sizes = expected.update_norms
    updates = (observed.updates * sizes).nan_to_num(nan=0.0).norm(dim=1) / sizes.norm(dim=1)
    for name, errors, measured in (
        ("loss", observed.losses, expected.loss_rounding),
        ("gradient norm", observed.grad_norms, expected.grad_norm_rounding),
        ("all parameters", updates, expected.total_rounding),
    ):
        kind = f"{name} ({expected.optimizer.kind})"
        yield _worst_step(kind, errors, _limit(spec, measured))


def worst_check(checks: Sequence[GateCheck]) -> GateCheck:
    """The check with the largest error in relation to its limit."""
    return max(checks, key=lambda check: check.error / check.limit)


def _limit(spec: RunSpec, measured: float) -> float:
    """The relative limit of a number that rounding was seen to change by ``measured``; the module's
    docstring has the formula."""
    unit = _UNIT_ROUNDOFF[spec.precision]
    return spec.measure.gate_tolerance + _ROUNDINGS * max(measured, unit)


def _worst_step(kind: str, errors: Tensor, limit: float, parameter: str = "") -> GateCheck:
    errors = errors.nan_to_num(nan=math.inf)  # where one process gets no numbers, as it diverges
    step = int(errors.argmax())
    error, limit = (min(number, _MOST) for number in (float(errors[step]), limit))
    return GateCheck(kind=kind, worst=parameter, step=step + 1, error=error, limit=limit)
