"""Some real steps against the uncut layers in one process, before a long run.

What no look at layers can tell (what they say to each other beside their outputs, what they compute
between tokens, what they keep, a loss that is no mean) shows as other numbers. So a few steps are
trained on every rank's own copy of the whole model, too, and compared: after every step the plain
loop goes on from the trained parameters, and its optimizer gets the trained gradients, so that
rounding does not add up.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import starmap
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_rank

from zeropp.engine.layers.eight_bits import to_8_bits
from zeropp.engine.layers.values import (
    POSITIONS,
    may_have_gradient,
    tensors_of,
    without_scalars,
)
from zeropp.engine.loss import Loss, LossFunction, Microbatches
from zeropp.engine.ranks.errors import LostRankError, T, gathered, refusal
from zeropp.engine.settings import Settings, read
from zeropp.engine.update.optimizer import Updater
from zeropp.engine.update.update_rules import clip_factor, made_optimizer, parts_of
from zeropp.engine.walk import Layer, made_layer
from zeropp.train.api import meet, parallelize
from zeropp.train.one_process import OneProcess, apart, distances, parameters_of, wide
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.tolerances import BEGIN, EXACT, TOLERANCES
from zeropp.types.training import difference

Outputs = dict[int, list[tuple[Tensor, ...]]]  # of layers, by their index, for every microbatch
Batch = Sequence[Any]  # inputs and targets [global_batch, ...], and keyword inputs by name
_NOISE = 0.05  # of weights that are moved off their initial values, over 1 and their size
_FLOOR = 0.02  # a tensor's share of a mean tensor's gradient below which rounding is all of it


class DifferenceError(RuntimeError):
    """Training in parallel gives something else than one process."""


@dataclass(frozen=True)
class Checked:
    """What was the same: the number of ``steps``, and of ``tensors`` in each; ``largest``: the
    largest difference found, over the one that is allowed."""

    steps: int
    tensors: int
    largest: float


def check(
    layers: Sequence[Layer], loss_fn: LossFunction, batches: Iterable[Batch], /, **keywords: Any
) -> Checked:
    """Train and evaluate copies of the layers on some ``batches``, once as
    ``parallelize(layers, loss_fn, **keywords)`` does and once in a plain loop on every rank, from
    weights that are moved off their initial values. All ranks must call it, with the same batches
    ``(inputs, targets)`` or ``(inputs, targets, keyword inputs by name)``, of ``global_batch`` rows
    each; three are enough. Layers stay as they were. What they reach through a closure or a global
    variable is not copied: give functions that make such layers. Each rank needs
    memory for the whole model: take one with few layers. ``timeout`` is two minutes unless given.

    Compared are every layer's outputs, losses, gradients and the updates that the optimizer makes
    of them, in training and in evaluation, and without data parallelism the buffers and numbers
    that layers keep.

    Raises DifferenceError, the same on all ranks, with the first layer and tensor that differ and
    what is likely to be the cause, and what ``parallelize`` and its model raise.
    """
    meet(keywords)
    asked = {"timeout": timedelta(minutes=2)} | keywords
    settings, _ = read(asked, layers, loss_fn)
    asked["tied"] = settings.tied  # which the layers themselves may know
    seed = gathered(torch.initial_seed())[0]
    with torch.random.fork_rng(), refusal("layers: cannot be copied, to be compared"):
        ours: Sequence[Layer] = copy.deepcopy([*layers])
        plain = [made_layer(x, i, seed) for i, x in enumerate(copy.deepcopy([*layers]))]
    with torch.random.fork_rng():
        model = parallelize(ours, loss_fn, **asked)
        try:
            comparison = _Comparison(model, settings, loss_fn, plain)
            for inputs, targets, *named in batches:
                batch = _microbatches(model, {"inputs": inputs, "targets": targets}, *named)
                comparison.step(batch)
                comparison.evaluation(batch)
            if not comparison.steps:
                raise ValueError(
                    "check: batches has none, so that nothing is compared (give three)"
                )
        except (DifferenceError, ValueError):  # which all ranks raise
            model.close()
            raise
        model.close()
    return Checked(comparison.steps, len(comparison.masters), max(gathered(comparison.largest)))


def _microbatches(
    model: ParallelModel,
    given: Mapping[str, Tensor],
    named: Mapping[str, Tensor] = MappingProxyType({}),
) -> Microbatches:
    """All of a batch, inputs and targets and keyword inputs by name, on the model's device; in
    ``whole`` this rank's rows."""
    device = model.engine.lanes.device
    given = {**given, **named}
    for name, one in given.items():
        if len(one) != model.plan.global_batch:
            raise ValueError(
                f"check: {name} have {len(one)} rows, but global_batch="
                f"{model.plan.global_batch} are needed, the same on all ranks"
            )
    every = {name: one.to(device, copy=True) for name, one in given.items()}
    own = {name: one[model.rows].to(device) for name, one in given.items()}
    return Microbatches.cut(every, model.plan.microbatch_size, own)


class _Comparison:
    """A model, and the same layers in one process. All ranks call its methods together."""

    def __init__(
        self,
        model: ParallelModel,
        settings: Settings,
        loss_fn: LossFunction,
        plain: Sequence[nn.Module],
    ) -> None:
        self._model, self._settings, self._plain = model, settings, plain
        self.largest, self.steps = 0.0, 0
        self._found: list[tuple[int, int, str]] = []  # phase of a step, place in it, what
        if settings.tied is not None:
            (first, name), (last, other) = settings.tied
            path, _, attribute = other.rpartition(".")
            shared = plain[first].get_parameter(name)
            setattr(plain[last].get_submodule(path), attribute, shared)
        nn.ModuleList(plain).to(model.engine.lanes.device)
        self._working = parameters_of(plain)
        for name, one in model.full_parameters():
            self._compare(
                0,
                name,
                apart(one, self._working[name]),
                BEGIN,
                "begins with other values",
                "a function must make the same layer at every call",
            )
        self._raise_first()
        self._move()
        self.masters = {
            name: nn.Parameter(
                one.detach().float() if one.itemsize < 4 else one.detach().clone(),
                one.requires_grad,
            )
            for name, one in self._working.items()
        }
        compute = None if settings.precision == "fp32" else torch.bfloat16
        self._tolerance = TOLERANCES[settings.precision].step
        for one in self._working.values() if compute else ():
            one.data = one.data.to(compute)
        if settings.precision == "fp8":
            blocks = [to_8_bits(block, model.engine.lanes.device) for block in plain[1:-1]]
            self._plain = plain = [plain[0], *blocks, *plain[1:][-1:]]
        loss = Loss(loss_fn, settings.loss_reduction, given=settings.sample_keywords)
        self._alone = OneProcess(
            plain,
            [*self.masters.values()],
            loss,
            compute=compute,
            seed=settings.dropout_seed,
            names=[layer.names for layer in model.engine.sizes],
        )
        groups = defaultdict[str, list[nn.Parameter]](list)
        for name, one in self.masters.items():
            vars(one).update(vars(self._working[name]))
            index, _, own = name.partition(".")
            if one.requires_grad:
                groups[settings.group_of((int(index), own), one)].append(one)
        optimizer = made_optimizer(settings.optimizer, groups)
        # Of the user's before a step, which the trained gradients show; but not of gathered ones.
        self._hooks: list[Callable[[], object]] = []
        is_gathered = model.plan.step_end.gathers_whole
        for part in () if is_gathered else parts_of(optimizer):
            hooks = part._optimizer_step_pre_hooks
            self._hooks += [partial(hook, part, (), {}) for hook in hooks.values()]
            hooks.clear()
        self._updater = Updater(optimizer, {}, lr_schedule=settings.lr_schedule)

    def _move(self) -> None:
        """Move trained parameters off their initial values, which are often zero."""
        draw = torch.Generator().manual_seed(0)
        for one in self._working.values():
            if may_have_gradient(one.dtype) and one.numel() and one.requires_grad:
                least = 0.2 if one.dim() > 1 else 1.0  # a matrix adds up as many as it is wide
                size = one.detach().double().abs().square().mean().sqrt().clamp(least, 1.0)
                noise = torch.randn(one.shape, generator=draw, dtype=torch.float64)
                one.data.add_((_NOISE * float(size) * noise).to(one))
        state = nn.ModuleList(self._plain).state_dict()
        self._model.load_state_dict({name: one.cpu() for name, one in state.items()})

    def step(self, batch: Microbatches) -> None:
        """Train a step here and there, and compare."""
        self.steps += 1
        engine, given = self._model.engine, partial(self._model.training_batch, **batch.whole)
        # Which runs layers, to learn what passes between stages.
        ready = self._run(partial(engine.agree, "train_step", given))
        with _outputs({} if self._model.plan.compile else engine.layers) as outputs:
            result = self._run(lambda: engine.step(ready))
        gradients = _of_all(self._model.gradients())
        trained = _of_all(self._model.full_parameters())
        with _outputs(dict(enumerate(self._plain))) as expected:
            loss = self._alone.gradients(batch, self.steps - 1)
        if (plan := self._model.plan).logits_slices > 1:
            calls, last = outputs.pop(len(self._plain) - 1, []), len(self._plain) - 1
            of_one = min(plan.logits_slices, batch.inputs[0].shape[1] // plan.layout.context)
            outputs[last] = [
                tuple(torch.cat(parts, 1) for parts in zip(*calls[i : i + of_one], strict=True))
                for i in range(0, len(calls), of_one)
            ]
        self._compare_outputs(outputs, expected)
        self._compare_losses(result.loss, loss)
        self._compare_gradients(gradients)
        self._raise_first()
        self._compare_update(gradients, trained, torch.isfinite(result.grad_norm))
        self._compare_kept()
        self._raise_first()
        with torch.no_grad():
            for name, one in self.masters.items():
                one.copy_(trained.get(name, one))

    def evaluation(self, batch: Microbatches) -> None:
        """Evaluate here and there, and compare."""
        evaluate: Callable[..., float] = self._model.eval_step
        ours = self._run(partial(evaluate, **batch.whole))
        self._compare_losses(ours, self._alone.evaluate(batch), "of an evaluation ")
        self._compare_kept()
        self._raise_first()

    def _run(self, work: Callable[[], T]) -> T:
        """What ``work`` of the model gives; where it fails on a rank, all raise DifferenceError.
        What the model refuses on all ranks is raised as it is."""
        failed = None
        try:
            done = work()
        except Exception as error:
            if not self._model.engine.unusable and not isinstance(error, LostRankError):
                raise
            lost, line = isinstance(error, LostRankError), str(error).partition("\n")[0]
            text = f"raises {type(error).__name__} on rank {get_rank()}: {line}"
            failed = lost, "has ranks that wait for others in vain" if lost else text
            with suppress(Exception):  # so that ranks that wait for this one see that it has gone
                self._model.close()
        if found := [one for one in gathered(failed) if one is not None]:
            raise DifferenceError(
                f"check: step {self.steps} in parallel {min(found)[1]} (likely: {self._cause()})"
            )
        return done

    def _compare_losses(self, ours: Tensor | float, alone: Tensor, of: str = "") -> None:
        far = apart(torch.tensor(float(ours)), torch.tensor(float(alone)))
        cause = (
            "loss_reduction must say what loss_fn does over a microbatch's rows and tokens (where "
            "tokens are ignored, give (sum, count) with loss_reduction='tokens'); targets are "
            "those of the inputs' own tokens; loss_fn reads nothing beside its arguments; with "
            "logits_slices it is a sum over tokens, and a keyword input that is as long as "
            "sequences is cut with them (give another one as [rows, 1, ...])"
        )
        what = f"the loss {of}is {float(ours):.7g}, and {float(alone):.7g} in one process"
        self._compare(2, "loss_fn", far, self._tolerance, what, cause)

    def _compare_outputs(self, outputs: Outputs, expected: Outputs) -> None:
        """Compare what a layer has given with what it gives for the microbatch that is nearest."""
        context = self._model.engine.context

        def own(given: Tensor, whole: Tensor) -> Tensor:
            if context is None or given.shape == whole.shape:
                return whole
            return context.part(whole, whole.shape[1])

        for index, calls in outputs.items():
            for call in calls:
                alike = (one for one in expected[index] if len(one) == len(call))
                pairs = (zip(call, map(own, call, one), strict=True) for one in alike)
                far = min((max(starmap(apart, pair)) for pair in pairs), default=math.inf)
                self._compare(
                    1,
                    f"{index}",
                    far,
                    self._tolerance,
                    "gives another output for a microbatch",
                    self._cause(),
                )

    def _cause(self, *, of_gradient: bool = False) -> str:
        """What may make a layer, or its gradient, something else with these settings."""
        plan, named = self._model.plan, self._settings.sample_keywords
        cut = sorted(named.keys() - self._settings.without_tokens - {POSITIONS})
        causes = {
            f"context={plan.layout.context} gives it a slice of the tokens: what it computes "
            "between tokens must be F.scaled_dot_product_attention, called alike on all ranks "
            "whatever their tokens are, and positions an input 'position_ids'": (
                plan.layout.context > 1 and not of_gradient
            ),
            f"logits_slices={plan.logits_slices} gives the last layer and the loss a slice of the "
            "tokens, between which they may compute nothing": plan.logits_slices > 1,
            f"a keyword input that is as long as sequences is cut with them ({', '.join(cut)}): "
            "give one without a number per token as [rows, 1, ...]": (
                bool(cut) and max(plan.layout.context, plan.logits_slices) > 1
            ),
            "what layers tell each other beside their outputs does not reach another stage, or is "
            "another microbatch's: return it, or give it as a keyword input": (
                plan.schedule.num_stages > 1 and not of_gradient
            ),
            f"recompute={plan.recompute!r} runs its forward a second time, so that what it counts, "
            "draws by a generator of its own, or changes through .data or numpy is not as in the "
            "first": plan.recompute != "none",
            "a hook or function acts on a gradient, or a hook of the optimizer sees the shards of "
            "one rank; a layer changes in place what others read": of_gradient,
            "what it keeps from one microbatch to the next (a parameter that it changes), or draws "
            "by another generator than torch's, depends on which it has seen before": (
                not of_gradient
            ),
        }
        return "; or ".join(text for text, may_be in causes.items() if may_be)

    def _compare_gradients(self, ours: Mapping[str, Tensor]) -> None:
        """Compare gradients after clipping, and after what hooks of the optimizer do to them."""
        trained = {name: one for name, one in self.masters.items() if one.requires_grad}
        own = [wide(one.grad) for one in trained.values() if one.grad is not None]
        norm = math.hypot(*(float(x.norm()) for x in own))
        if clip := self._settings.clipped_to:
            for one in trained.values():
                if one.grad is not None:
                    one.grad *= float(clip_factor(torch.tensor(norm), clip))
        if math.isfinite(norm):  # else no update is made
            for hook in self._hooks:
                hook()
        grads = {
            name: wide(torch.zeros_like(one) if one.grad is None else one.grad)
            for name, one in trained.items()
        }
        norm = math.hypot(*(float(x.norm()) for x in grads.values()))
        typical = norm / max(1, sum(g.numel() for g in grads.values())) ** 0.5
        floors = {name: _FLOOR * typical * one.numel() ** 0.5 for name, one in grads.items()}
        found = distances(ours, grads, floors if math.isfinite(norm) else {})
        for name in grads:
            far, _ = found.get(name, (math.inf, 0.0))
            cause = self._cause(of_gradient=True)
            self._compare(3, name, far, self._tolerance, "has another gradient", cause)

    def _compare_update(
        self, grads: Mapping[str, Tensor], ours: Mapping[str, Tensor], finite: Tensor
    ) -> None:
        """Compare what the optimizer makes of the trained gradients, if they are ``finite``."""
        before = {name: one.detach().clone() for name, one in self.masters.items()}
        for name, one in self.masters.items():
            one.grad = grads[name].to(one) if name in grads else None
            # What a layer's forward has changed.
            one.data.add_(
                self._working[name].data.to(one) - one.data.to(self._working[name]).to(one)
            )
        self._updater.set_rates(self.steps - 1)
        self._updater.update(finite)
        cause = (
            "the optimizer, or its hook, looks at other parameters or at the shards of one rank, "
            "or keeps what depends on them; elementwise= is not so; a layer's forward changes it"
        )
        after, eps = {**self.masters}, torch.finfo(torch.float32).eps
        floors = {name: 4 * eps / EXACT * float(wide(one).norm()) for name, one in after.items()}
        theirs, expected = (
            {name: wide(made[name]) - wide(old) for name, old in before.items()}
            for made in (ours, after)
        )
        what = "is updated otherwise by the same gradient"
        for name, (far, _) in distances(theirs, expected, floors).items():
            self._compare(4, name, far, EXACT, what, cause)

    def _compare_kept(self) -> None:
        """Compare buffers and numbers that layers keep, where each rank has all rows."""
        if (layout := self._model.plan.layout).dp * layout.context > 1:
            return
        for index, layer in self._model.engine.layers.items():
            own, expected = _numbers(layer), _numbers(self._plain[index])
            what = "that the layer keeps is another number"
            for name, one in expected.items():
                far = apart(own[name], one) if name in own else math.inf
                cause = self._cause()
                self._compare(5, f"{index}.{name}", far, self._tolerance, what, cause)

    def _compare(
        self, phase: int, name: str, far: float, allowed: float, what: str, cause: str
    ) -> None:
        """Note a difference that is larger than what is allowed, or not a number."""
        if far <= allowed:
            self.largest = max(self.largest, far / allowed)
            return
        layer, _, own = name.partition(".")
        index = int(layer) if layer.isdigit() else 0
        where = f"layers[{index}]: {own and repr(own) + ' '}" if layer.isdigit() else f"{name}: "
        place = -index if phase == 3 else index  # a backward begins with the last layer
        said = difference(far, self.steps, allowed)
        self._found.append((phase, place, f"check: {where}{what}: {said} (likely: {cause})"))

    def _raise_first(self) -> None:
        """Raise, on all ranks, what differs first on any."""
        if found := [one for one in gathered(min(self._found, default=None)) if one is not None]:
            raise DifferenceError(min(found)[2])


@contextmanager
def _outputs(layers: Mapping[int, nn.Module]) -> Iterator[Outputs]:
    """What layers give inside of it."""
    kept: Outputs = {}

    def keep(index: int, _: object, __: object, output: Any) -> None:
        tensors = tensors_of(without_scalars(output)[0])
        kept.setdefault(index, []).append(tuple(x.detach().clone() for x in tensors))

    with ExitStack() as hooks:
        for index, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(keep, index)))
        yield kept


def _of_all(own: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The named tensors of all ranks."""
    return {name: one for part in gathered(dict(own)) for name, one in part.items()}


def _numbers(layer: nn.Module) -> dict[str, Tensor]:
    """The buffers of a layer and the numbers that it keeps, by name."""
    numbers = {
        f"{path}.{name}".lstrip("."): torch.tensor(value, dtype=torch.float64)
        for path, part in layer.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float)
        and not name.startswith("_")
        and name not in ("training", "early")
    }
    return {**numbers, **{name: one.detach() for name, one in layer.named_buffers()}}
