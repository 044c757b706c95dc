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

A run in 16 or 8 bits has parts
    What bf16 rounds hides a few percent of a gradient. So the same configuration is compared in
    fp32 first, where nothing is hidden, and then in bf16, for mistakes that only bf16 has: weights,
    sums or losses in too narrow a type, copies in bf16 that are not those of the masters. What 8
    bits round hides more. So a run in 8 bits is compared in these two and then as it is. Two right
    runs in 8 bits are as far from each other as from one in bf16, but all are equally far from it:
    where nothing is converted, or not the first block, this distance is smaller. A single later
    block that is not converted is not found. A configuration that cannot run in fp32 is compared
    without, and the record says so.
    In bf16 and in 8 bits the first step is also taken with each rank's microbatches in another
    order (``order_checks``). Each microbatch is rounded as before, so that only the rounding of
    their sum can differ: by 1e-6 if it is summed in fp32, by 1e-3 if in bf16. In which type
    replicas send each other their sums is the contender's choice, as in DeepSpeed, which sends
    bf16.

The initial weights
    They are drawn with standard deviation 1/sqrt(hidden). With GPT-2's 0.02 the attention scores of
    a narrow model are nearly equal, and rounding would hide the gradients of queries and keys.

The learning rate
    It is chosen such that the first step should lower the loss by a tenth: lr * |gradient|^2 =
    loss / 10. So the model changes enough that a stale copy of a parameter is seen in the next
    step.

Limits
    One process is trained with the next wider types (fp64 for an fp32 run, fp32 for a bf16 run,
    bf16 for one in 8 bits), and with the types of the run; in bf16 a second time with every matrix
    product in halves, as tensor parallelism rounds it. The larger distance from the wider run is
    what rounding does to a quantity. A contender rounds as much, in yet another order, and may
    differ from the wider run by

        gate_tolerance * |quantity| + factor * (what rounding does)

    where what rounding does is the largest of the three steps, relative to the quantity. The
    quantities are the loss, the gradient norm, and for each parameter and all of them together the
    update of one step: the L2 norm of its difference, and its scale, the part of the difference
    that points along the update. Rounding points anywhere, so that a scale of 1.01 is seen in
    updates that bf16 rounds by 1 %. ``zeropp/types/tolerances.py`` has the factors, and says why
    (docs/metrics.md has what was measured).
    After the first step, two runs in bf16 that round differently are as far from each other as
    from the run in fp32. So the distance to a reference in bf16 shows no more than that to the one
    in fp32; the references in bf16 say how far is too far.
    The true gradient of a key's bias is zero, because the softmax does not change if a number is
    added to all scores: rounding is then larger than the update, and nothing can be compared.
    ``not_compared`` names the kinds of parameter whose limit is above half of the update.

Models that are too large for one process are compared at a reduced width, with the same layout,
schedule and microbatches: the gate finds mistakes in parallelism, which do not depend on widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from baselines.model import build_model, initial_std
from benchmarks.records.record import BLIND, GateCheck, GateResult
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import BatchSource, local_batch
from benchmarks.worker.one_process import (
    EXACT,
    OneProcess,
    asks_for_narrow_sums,
    remembered,
    types_of,
)
from zeropp.choose.contender import Contender
from zeropp.engine.ranks.errors import gathered
from zeropp.price import parameter_count
from zeropp.train.one_process import Distances, apart, distances, wide
from zeropp.types.layout import InfeasibleError, Layout
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape
from zeropp.types.tolerances import TOLERANCES
from zeropp.types.training import OptimizerConfig, Trainer

STEPS = 3
_FIRST_DECREASE = 0.1  # the share of the loss that the first SGD step removes, to first order
_LEAST_UPDATE = 1e-5  # of a parameter; near 1, as norms' weights are, fp32 resolves 1e-7
MAX_PARAMETERS = 100_000_000
MAX_STEPS = 50  # of a run whose losses are compared with one process's
_SEQ = 64  # of a reduced model
# Of what 8 bits change in the first step's update. Right programs changed at most 4 % less than one
# process, with sequences on two ranks 10 %; with the first block of four in bf16 it was 28 %, with
# the last 6 %.
_CHANGE = 0.125
_SAME = 2  # how often the distance of two runs of the same step may lie between two orders
_NARROW = 2.0**-10  # of the update: what sums in bf16 do
_HEADS = (64, 32, 16, 8)  # widths of a head in a reduced model: the largest that fits
_ORDERED = "all parameters, microbatches in another order"
_NUMBERS = ("loss", "gradient norm")
_MOST = 1e12  # is written for an infinite error or limit, which JSON cannot express


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one process does with an optimizer; equal on all ranks except for ``updates``.

    ``sizes``: of each step the loss, the gradient norm and the norms of all parameters' updates, by
    name. ``rounding``: how far from these one process with the types of the run is at most.
    ``updates``: those of every parameter by name (fp32, on the CPU), on rank 0 only.
    """

    optimizer: OptimizerConfig
    shapes: dict[str, torch.Size]
    sizes: Sequence[dict[str, float]]
    rounding: Sequence[Distances]
    updates: Sequence[dict[str, Tensor]]


def gate_optimizers(
    spec: RunSpec, batches: BatchSource, device: torch.device, known: Path | None = None
) -> tuple[OptimizerConfig, OptimizerConfig]:
    """(plain SGD with a learning rate whose first step should lower the loss by a tenth, the run's
    own optimizer with settings that all count). All ranks must call it."""
    first = torch.zeros(3, dtype=torch.float64)  # on the CPU, or waiting would keep the GPU busy
    if dist.get_rank() == 0:
        alone = partial(OneProcess, spec, batches, device, types_of(spec))
        sizes = remembered(known, spec, device, "first", lambda: alone().first_gradient())
        first = torch.tensor(sizes, dtype=torch.float64)
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
    spec: RunSpec,
    batches: BatchSource,
    device: torch.device,
    optimizer: OptimizerConfig,
    known: Path | None = None,
) -> Expected:
    """Let rank 0 train the whole model alone, with wider types and with those of the run, and
    broadcast the results. All ranks must call it."""
    shapes = {name: p.shape for name, p in build_model(spec.model, 0, "meta").named_parameters()}
    numbers: Any = None
    updates: Sequence[dict[str, Tensor]] = [{}] * STEPS
    if dist.get_rank() == 0:

        def train() -> tuple[Any, Any, Sequence[dict[str, Tensor]]]:
            exact = OneProcess(spec, batches, device, EXACT[spec.precision]).train(optimizer, STEPS)
            steps = [*map(_step, exact.losses, exact.grad_norms, exact.updates)]
            sizes = [{name: float(wide(x).norm()) for name, x in step.items()} for step in steps]
            ways = []  # of rounding
            for halves in (False, True) if spec.precision != "fp32" else (False,):
                alone = OneProcess(spec, batches, device, types_of(spec), halves=halves)
                narrow = alone.train(optimizer, STEPS)
                found = map(_step, narrow.losses, narrow.grad_norms, narrow.updates)
                ways.append(map(distances, found, steps))
            return sizes, [_largest(step) for step in zip(*ways, strict=True)], exact.updates

        *numbers, updates = remembered(known, spec, device, f"gate {optimizer} {STEPS}", train)
    sizes, rounding = gathered(numbers)[0]
    return Expected(
        optimizer=optimizer, shapes=shapes, sizes=sizes, rounding=rounding, updates=updates
    )


def observe(
    trainer: Trainer,
    layout: Layout,
    *,
    batches: BatchSource,
    device: torch.device,
    expected: Expected,
) -> list[Distances]:
    """Train as many steps as the reference and compare after each; the distances are the largest of
    all ranks. All ranks must call it."""
    before = _copies(trainer)
    found = []
    for step, sizes in enumerate(expected.sizes):
        result = trainer.step(*local_batch(batches, layout, step, device))
        after = _copies(trainer)
        updates = {name: after[name] - before[name] for name in after}
        wanted = _from_rank_0(expected.updates[step], expected.shapes, device)
        found.append(
            distances(
                _step(float(result.loss), float(result.grad_norm), updates),
                _step(sizes[_NUMBERS[0]], sizes[_NUMBERS[1]], wanted),
            )
        )
        before = after
    return [_largest(of_ranks) for of_ranks in zip(*gathered(found), strict=True)]


def _copies(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the parameters; on a CPU a trainer may yield the tensors that it updates."""
    return {name: parameter.clone() for name, parameter in trainer.full_parameters()}


def _from_rank_0(
    updates: dict[str, Tensor], shapes: dict[str, torch.Size], device: torch.device
) -> dict[str, Tensor]:
    """What rank 0 has of every parameter, on the CPU; all in one message."""
    sizes = [shape.numel() for shape in shapes.values()]
    values = torch.empty(sum(sizes), device=device)
    if updates:
        values = torch.cat([updates[name].flatten() for name in shapes]).to(device)
    dist.broadcast(values, 0)
    parts = torch.split(values.cpu(), sizes)
    return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def _step(loss: float, norm: float, updates: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All that is compared of a step, by name."""
    return dict(zip(_NUMBERS, map(torch.tensor, (loss, norm)), strict=True)) | dict(updates)


def _far(one: Tensor, expected: Tensor) -> float:
    """Their distance over what was expected, infinite where that is not of numbers."""
    return apart(one, expected) if bool(expected.isfinite().all()) else math.inf


def _largest(every: Iterable[Distances]) -> Distances:
    """The largest distances of several ranks, or of several ways to round."""
    found: Distances = {}
    for name, (far, along) in (pair for one in every for pair in one.items()):
        most = found.get(name, (0.0, 0.0))
        found[name] = max(far, most[0]), max(along, most[1])
    return found


def run_gate(
    spec: RunSpec,
    contender: Contender[Any],
    batches: BatchSource,
    device: torch.device,
    known: Path | None = None,
) -> dict[str, Any]:
    """Train the contender and one process, and return the fields of a GateResult, which are equal
    on all ranks. What one process did is looked up in the folder ``known`` and left there. All
    ranks must call it."""
    small, source, left_out = gated_spec(spec, contender, batches)
    checks: list[GateCheck] = []
    with initial_std(small.model.hidden**-0.5):
        for part in gate_parts(small):
            sgd, own = gate_optimizers(part, source, device, known)
            for optimizer in (sgd, own):
                expected = expect(part, source, device, optimizer, known)
                plan = part.plan()
                trainer = contender.build(plan, optimizer, device, part.seed)
                seen = observe(
                    trainer, plan.layout, batches=source, device=device, expected=expected
                )
                checks += checks_of(part, expected, seen)
                del trainer
            checks += order_checks(part, contender, source, device, sgd)
    if spec.precision != "fp32":
        if "loss (sgd, fp32)" not in {check.kind for check in checks}:
            left_out.append("fp32: this configuration has no plan in fp32")
        ordered = [check for check in checks if check.kind.startswith(_ORDERED)]
        if not ordered:
            left_out.append("the type of sums: fewer than 3 microbatches, or bf16 as asked")
        elif ordered[0].limit > _NARROW:
            left_out.append("the type of sums: two runs of the same step differ as much")
    return asdict(gate_result(small, checks, left_out))


def gate_parts(spec: RunSpec) -> list[RunSpec]:
    """The specs that are compared one after another: first the run's twins with more bits that have
    a plan, from fp32 on."""
    parts = []
    for precision in takewhile(lambda one: one != spec.precision, get_args(Precision)):
        narrow = [n for n, value in vars(spec.contender).items() if value == "bf16"]
        wider = dict.fromkeys(narrow if precision == "fp32" else (), "fp32")
        knobs: Any = replace(spec.contender, **wider)  # type: ignore[type-var]
        twin = replace(spec, precision=precision, contender=knobs)
        with suppress(InfeasibleError):
            twin.plan()
            parts.append(twin)
    return [*parts, spec]


def order_checks(
    spec: RunSpec,
    contender: Contender[Any],
    batches: BatchSource,
    device: torch.device,
    sgd: OptimizerConfig,
) -> list[GateCheck]:
    """Of a run in 16 or 8 bits, the first step's update of all parameters of a rank against that
    with every rank's microbatches in another order, at its largest on any rank; none where sums of
    two are the same in any order, or are asked for in bf16. On a GPU attention may add with
    atomics, so that two runs of one step differ: where the orders differ more than sums in fp32 do,
    the step runs once more in the first order, and the limit is raised by how far apart those two
    are. All ranks must call it."""
    if spec.model.dropout:  # masks have an order
        spec = replace(spec, model=replace(spec.model, dropout=0.0))
    plan = spec.plan()
    if spec.precision == "fp32" or asks_for_narrow_sums(spec) or plan.num_microbatches < 3:
        return []
    rows = local_batch(batches, plan.layout, 0, device)

    def update(first: int) -> Tensor:
        trainer = contender.build(plan, sgd, device, spec.seed)
        before = _copies(trainer)
        trainer.step(*(part.roll(-first, dims=0) for part in rows))
        return torch.cat([(p - before[n]).flatten() for n, p in trainer.full_parameters()])

    in_order, limit = update(0), spec.measure.gate_tolerance + TOLERANCES[spec.precision].order
    error = max(gathered(_far(update(plan.microbatch_size), in_order)))
    if limit < error < math.inf:
        again = max(gathered(_far(update(0), in_order)))
        limit += _SAME * again if again < math.inf else 0.0
    kind = f"{_ORDERED} (sgd, {spec.precision})"
    return [GateCheck(kind=kind, worst="", step=1, error=min(error, _MOST), limit=limit)]


def losses_of_one_process(
    spec: RunSpec,
    contender: Contender[Any],
    batches: BatchSource,
    device: torch.device,
    known: Path,
    *,
    until: float,
) -> list[float]:
    """The losses that the steps of a run should have, warm-up included; none where the model or
    the run is too long for one process, or where a contender draws masks of its own. Rank 0 trains
    one process for it, or reads what such a process has left in the folder ``known``. The last
    steps are left out for which there is no time ``until`` then (``time.monotonic``). All ranks
    must call it."""
    steps = spec.measure.warmup_steps + spec.measure.steps
    drawn = spec.model.dropout and not contender.reproduces_dropout
    too_long = steps > MAX_STEPS or parameter_count(spec.model) > MAX_PARAMETERS
    if not spec.measure.gate or drawn or too_long:
        return []
    losses = torch.zeros(1 + steps, dtype=torch.float64)  # after their number
    if dist.get_rank() == 0:

        def train() -> list[float]:
            alone = OneProcess(spec, batches, device, types_of(spec))
            return alone.train(spec.optimizer, steps, updates=False, until=until).losses

        values = remembered(known, spec, device, f"losses {spec.optimizer} {steps}", train)
        losses[: 1 + len(values)] = losses.new_tensor([len(values), *values])
    dist.broadcast(losses, 0)
    number, *values = losses.tolist()
    return values[: int(number)]


def gated_spec(
    spec: RunSpec, contender: Contender[Any], batches: BatchSource
) -> tuple[RunSpec, BatchSource, list[str]]:
    """(the spec that the gate trains, its batches, sentences on what is not compared)."""
    shape, left_out = gate_shape(spec.model), []
    if shape.dropout and not contender.reproduces_dropout:
        shape = replace(shape, dropout=0.0)
        left_out.append(f"dropout: compared without, because {contender.label} draws its own masks")
    small = spec if shape is spec.model else replace(spec, model=shape)
    return small, replace(batches, seq=shape.seq, vocab=shape.vocab), left_out


def gate_shape(shape: ModelShape) -> ModelShape:
    """The shape itself or, if it is too large, a narrow one with the same family, depth and
    numbers of heads: as wide as fits, as wider updates are rounded less."""
    if parameter_count(shape) <= MAX_PARAMETERS:
        return shape
    shapes = [
        replace(
            shape,
            name=f"{shape.name} (reduced to hidden {hidden}, seq {_SEQ})",
            hidden=hidden,
            ffn=2 * hidden,
            seq=_SEQ,
        )
        for hidden in (shape.heads * width for width in _HEADS)
    ]
    return next((s for s in shapes if parameter_count(s) <= MAX_PARAMETERS), shapes[-1])


def gate_result(spec: RunSpec, checks: Sequence[GateCheck], left_out: Sequence[str]) -> GateResult:
    """The result of all checks, in which those with plain SGD come first."""
    by_name = {check.kind: check for check in checks}
    blind = [check.kind for check in checks if check.limit > BLIND]
    seen = [check.error for check in checks if check.worst and check.kind not in blind]
    return GateResult(
        passed=all(check.error <= check.limit for check in checks),
        tolerance=spec.measure.gate_tolerance,
        loss_error=by_name[f"loss (sgd, {spec.precision})"].error,
        grad_norm_error=by_name[f"gradient norm (sgd, {spec.precision})"].error,
        parameter_error=max(seen, default=0.0),
        shape=spec.model.name,
        checks=list(checks),
        not_compared=[*left_out, *(f"{kind}: rounding hides its update" for kind in blind)],
    )


def checks_of(spec: RunSpec, expected: Expected, observed: Sequence[Distances]) -> list[GateCheck]:
    """The checks of the steps with one optimizer: loss, gradient norm, all parameters together, and
    for each kind of parameter (its name without the piece's number) the worst parameter and step;
    in bf16 also their scales, and in 8 bits how much these change."""
    words = f"({expected.optimizer.kind}, {spec.precision})"
    is_exact = spec.precision == "fp32"  # nothing is hidden there
    allowed = TOLERANCES[spec.precision]
    seen, rounds = ([*map(_with_all, expected.sizes, of)] for of in (observed, expected.rounding))
    kinds: dict[str, list[GateCheck]] = {}
    for name, place in product(seen[0], (0, 1)):
        is_number = name in _NUMBERS
        if place and (is_exact or is_number):
            continue
        rounding = [one[name][place] for one in rounds]
        rounding = [one if one < math.inf else 0.0 for one in rounding]
        limits = [spec.measure.gate_tolerance + allowed.later * max(rounding)] * len(seen)
        if not (is_exact or is_number or place):
            limits[0] = spec.measure.gate_tolerance + allowed.first * rounding[0]
        errors = [one[name][place] for one in seen]
        errors = [one if one < _MOST else _MOST for one in errors]
        step = max(range(len(seen)), key=lambda i: errors[i] / limits[i])
        kind = " ".join((name.partition(".")[2] or name, *["scale"] * place, words))
        kinds.setdefault(kind, []).append(
            GateCheck(
                kind=kind,
                worst=name if name in expected.shapes else "",
                step=step + 1,
                error=errors[step],
                limit=min(limits[step], _MOST),
            )
        )
    if spec.precision == "fp8":
        check = _change(spec, f"what 8 bits change {words}", seen[0], rounds[0])
        kinds[check.kind] = [check]
    return [max(checks, key=lambda check: check.error / check.limit) for checks in kinds.values()]


def _change(spec: RunSpec, kind: str, seen: Distances, alone: Distances) -> GateCheck:
    """The check of how far the first step is from one in bf16, against that of one process."""
    change = abs(seen["all parameters"][0] / alone["all parameters"][0] - 1)
    # Ranks that divide sequences have scales of their own tokens.
    limit = _CHANGE * (1 if spec.plan().layout.context == 1 else 2)
    error = change if change < _MOST else _MOST
    return GateCheck(kind=kind, worst="", step=1, error=error, limit=limit)


def _with_all(sizes: Mapping[str, float], known: Distances) -> Distances:
    """The distances of every quantity that has a size, with those of all parameters together."""
    nowhere = math.inf, math.inf
    found = {
        name: known.get(name, nowhere) if math.isfinite(size) else nowhere
        for name, size in sizes.items()
    }
    norms = {name: size for name, size in sizes.items() if name not in _NUMBERS}
    whole = math.hypot(*norms.values()) or 1.0
    far = math.hypot(*(size * found[name][0] for name, size in norms.items())) / whole
    along = sum(size**2 * found[name][1] for name, size in norms.items()) / whole**2
    return found | {"all parameters": (far, along)}
