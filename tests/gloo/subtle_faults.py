"""What faults are made of; and small ones, most of them within what bf16 rounds: a percent of a
gradient, another epsilon, sums or weights in a narrower type, copies of weights that are late. They
count the gate's score on runs in bf16.

A fault is a context manager; while it is open, trainers are built and run with it. It gives what
has still to be done to a trainer after it was built."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from zeropp.engine import sharding
from zeropp.engine.parameters import flat
from zeropp.engine.update.hooks import allowed
from zeropp.engine.update.update_rules import build_optimizer
from zeropp.schedule.plan import Plan
from zeropp.types.training import OptimizerConfig

_BUILDERS = (
    "zeropp.engine.update.update_rules",
    "baselines.torch_pp.trainer",
    "baselines.fsdp.trainer",
    "baselines.deepspeed_3d.trainer",
    "baselines.megatron_core.trainer",
)


@dataclass(frozen=True)
class Place:
    """Where this rank stands, and in which plan."""

    plan: Plan
    dp_index: int
    pp: int
    tp: int


Prepare = Callable[[Any], Any]  # a trainer, made faulty
Fault = Callable[[Place], AbstractContextManager[Prepare]]
Edit = Callable[[Place, list[Tensor], int], None]  # gradients about to be applied, step from 1
# Beside a step, which is counted from 1.
Hook = Callable[[Place, OptimizerConfig, torch.optim.Optimizer, int], None]
Feed = Callable[[Place, Tensor, Tensor], tuple[Tensor, Tensor]]  # inputs, targets


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [parameter for parameter in every if parameter.grad is not None]


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's gradients, as they are about to be applied."""
    return [local(p.grad) for p in parameters_of(optimizer) if p.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unchanged(trainer: Any) -> Any:
    return trainer


def _building(make: Callable[[Place, OptimizerConfig, Any], torch.optim.Optimizer]) -> Fault:
    """Every contender builds its optimizer otherwise."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        def build(parameters: Any, asked: OptimizerConfig) -> torch.optim.Optimizer:
            return make(place, asked, parameters)

        with ExitStack() as stack:
            for module in _BUILDERS:
                stack.enter_context(mock.patch(f"{module}.build_optimizer", build))
            yield unchanged

    return fault


def with_settings(**changes: Callable[[OptimizerConfig], float]) -> Fault:
    """The optimizer has other settings than those that were asked for."""

    def make(place: Place, asked: OptimizerConfig, parameters: Any) -> torch.optim.Optimizer:
        other: dict[str, Any] = {name: change(asked) for name, change in changes.items()}
        return build_optimizer(parameters, replace(asked, **other))

    return _building(make)


def beside_steps(hook: Hook, *, after: bool = False) -> Fault:
    """Something is done to the optimizer of this rank right before, or after, each of its steps."""

    def make(place: Place, asked: OptimizerConfig, parameters: Any) -> torch.optim.Optimizer:
        optimizer, steps = build_optimizer(parameters, asked), [0]

        def run(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps[0] += 1
            with allowed():  # as if it were no hook, which may not take norms of shards
                hook(place, asked, optimizer, steps[0])

        if after:
            optimizer.register_step_post_hook(run)
        else:
            optimizer.register_step_pre_hook(run)
        return optimizer

    return _building(make)


def editing(edit: Edit) -> Fault:
    """Edit this rank's gradients right before its optimizer applies them."""
    return beside_steps(
        lambda place, _, optimizer, step: edit(place, gradients_of(optimizer), step)
    )


def scaled_part(begin: float, end: float, factor: float) -> Fault:
    """Scale a part of the gradients: from ``begin`` to ``end`` of all elements on this rank."""

    def apply(place: Place, gradients: list[Tensor], step: int) -> None:
        for piece in pieces(gradients, begin, end):
            piece *= factor

    return editing(apply)


def pieces(tensors: list[Tensor], begin: float, end: float) -> Iterator[Tensor]:
    """Views of the elements from ``begin`` to ``end`` of all that this rank holds, as shares."""
    total, start = sum(each.numel() for each in tensors), 0
    for each in tensors:
        first, last = (max(int(share * total) - start, 0) for share in (begin, end))
        yield each.view(-1)[first:last]
        start += each.numel()


def prepared(change: Callable[[Place, Any], None]) -> Fault:
    """Something is changed in a trainer that was built."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        def prepare(trainer: Any) -> Any:
            change(place, trainer)
            return trainer

        yield prepare

    return fault


def feeding(feed: Feed) -> Fault:
    """What a rank is given is changed."""

    def change(place: Place, trainer: Any) -> None:
        step = trainer.step
        trainer.step = lambda inputs, targets: step(*feed(place, inputs, targets))

    return prepared(change)


def patched(owner: Any, name: str, make: Callable[[Place, Any], Any]) -> Fault:
    """An attribute is replaced by what ``make`` makes of the place and of the original."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        with mock.patch.object(owner, name, make(place, getattr(owner, name))):
            yield unchanged

    return fault


NARROW = torch.bfloat16


def _in_bf16(fault: Fault) -> Fault:
    """A fault of runs in bf16 and in 8 bits, which those in fp32 do not have."""
    return lambda place: nullcontext(unchanged) if place.plan.precision == "fp32" else fault(place)


def _rounded(tensor: Tensor) -> None:
    """Leave in a tensor what bf16 would keep of it."""
    tensor.copy_(tensor.to(NARROW))


def _after_steps(act: Callable[[torch.optim.Optimizer], None]) -> Fault:
    """Something is done to a bf16 run's optimizer right after each of its steps."""
    return _in_bf16(beside_steps(lambda _, asked, optimizer, step: act(optimizer), after=True))


@torch.no_grad()
def _narrow_masters(optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        _rounded(local(parameter))


def _narrow_moments(*names: str) -> Callable[[torch.optim.Optimizer], None]:
    def act(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for name in names:
                _rounded(local(state[name]))

    return act


def _narrow_gradients(place: Place, gradients: list[Tensor], step: int) -> None:
    for gradient in gradients:
        _rounded(gradient)


@contextmanager
def _narrow_sums(place: Place) -> Iterator[Prepare]:
    """The gradients of microbatches are summed in bf16."""
    zeros, take = flat.zeros, flat.FlatParameters._take_sums

    def narrow(size: int, _: torch.dtype, device: torch.device) -> Tensor:
        return zeros(size, NARROW, device)

    def widened(self: flat.FlatParameters) -> Tensor:
        return take(self).float()

    both = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=NARROW, reduce_dtype=NARROW)
    with (
        mock.patch.object(flat, "zeros", narrow),
        mock.patch.object(flat.FlatParameters, "_take_sums", widened),
        mock.patch("baselines.fsdp2.MixedPrecisionPolicy", return_value=both),
    ):
        yield unchanged


def _narrow_wire(place: Place, types: Any) -> Any:
    """Reductions are sent in bf16."""
    return lambda master, compute, wire: types(master, compute, NARROW)


def _copies(late: int, *, part: float = 1.0) -> Fault:
    """Gathers send the masters of some updates before (0: the first ones, for ever), in the last
    ``part`` of a flat buffer."""

    def make(place: Place, original: Callable[[flat.FlatParameters], None]) -> Any:
        seen: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()

        def gather(self: flat.FlatParameters) -> None:
            values = seen.setdefault(self, [])
            if not values or not torch.equal(values[-1], self.master):
                values.append(self.master.clone())
            stale = values[0] if late == 0 else values[max(0, len(values) - 1 - late)]
            begin = int((1 - part) * len(stale))
            true, self.master = self.master, torch.cat([self.master[:begin], stale[begin:]])
            try:
                original(self)
            finally:
                self.master = true

        return gather

    return patched(flat.FlatParameters, "_gather", make)


def _norm_eps(eps: float) -> Fault:
    def make(place: Place, original: Any) -> Any:
        return lambda norm, x: F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, eps)

    return patched(nn.LayerNorm, "forward", make)


def _other_gelu(place: Place, original: Any) -> Any:
    return lambda x, approximate="none": original(x)


def _attention(factor: float) -> Fault:
    """The scale of the scores is multiplied."""

    def make(place: Place, original: Any) -> Any:
        return lambda q, k, v, **more: original(q, k, v, scale=factor * q.shape[-1] ** -0.5, **more)

    return patched(F, "scaled_dot_product_attention", make)


def _whole_attention(place: Place, original: Any) -> Any:
    """Every token sees the tokens after it."""
    return lambda q, k, v, is_causal, **more: original(q, k, v, is_causal=False, **more)


def _narrow_softmax(place: Place, original: Any) -> Any:
    """Scores and their softmax are rounded to bf16."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v  # type: ignore[no-any-return]

    return attention


def _narrow_loss(place: Place, original: Any) -> Any:
    """The loss is computed in bf16."""
    return lambda logits, *given, **more: original(logits.to(NARROW), *given, **more).float()


def _scaled_loss(factor: float) -> Fault:
    def make(place: Place, original: Any) -> Any:
        return lambda *arguments, **more: factor * original(*arguments, **more)

    return patched(F, "cross_entropy", make)


def _token(place: Place, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    inputs = inputs.clone()
    inputs[0, 0] = (inputs[0, 0] + (place.dp_index == 0)) % place.plan.shape.vocab
    return inputs, targets


def _target(place: Place, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    targets = targets.clone()
    targets[-1] = targets[-1].roll(1) if place.dp_index == 0 else targets[-1]
    return inputs, targets


def _dropped(place: Place, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The last microbatch is that before it again."""
    size = place.plan.microbatch_size
    pair = (torch.cat([x[:-size], x[-2 * size : -size]]) for x in (inputs, targets))
    return next(pair), next(pair)


def _coupled_decay(
    place: Place, asked: OptimizerConfig, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Weight decay is added to the gradient, as in Adam's first form (L2)."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for parameter, gradient in zip(parameters_of(optimizer), gradients_of(optimizer), strict=True):
        gradient.add_(local(parameter.detach()), alpha=asked.weight_decay)


def _without_second_correction(
    place: Place, asked: OptimizerConfig, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """The second moment is not corrected for its bias."""
    root = (1 - asked.beta2**step) ** 0.5
    for group in optimizer.param_groups:
        group["eps"], group["lr"] = asked.eps / root, asked.lr / root
        group["weight_decay"] = asked.weight_decay * root


SUBTLE_OPTIMIZER_FAULTS: dict[str, Fault] = {
    "beta1 0.89": with_settings(beta1=lambda asked: 0.89),
    "beta2 0.99": with_settings(beta2=lambda asked: 0.99),
    "beta2 0.999": with_settings(beta2=lambda asked: 0.999),
    "epsilon a tenth larger": with_settings(eps=lambda asked: 1.1 * asked.eps),
    "learning rate 2 % high": with_settings(lr=lambda asked: 1.02 * asked.lr),
    "weight decay a tenth low": with_settings(weight_decay=lambda asked: 0.9 * asked.weight_decay),
    "weight decay coupled": beside_steps(_coupled_decay),
    "clipped to 2 % more": scaled_part(0.0, 1.0, 1.02),
    "second moment not corrected": beside_steps(_without_second_correction),
    "moments in bf16": _after_steps(_narrow_moments("exp_avg", "exp_avg_sq")),
}
SUBTLE_FAULTS: dict[str, Fault] = {
    "gradients 1 % too large": scaled_part(0.0, 1.0, 1.01),
    "gradients 1 % too small": scaled_part(0.0, 1.0, 0.99),
    "the last tenth of the gradients 3 % too large": scaled_part(0.9, 1.0, 1.03),
    "a hundredth of the gradients halved": scaled_part(0.5, 0.51, 0.5),
    "a thousandth of the parameters never updated": scaled_part(0.5, 0.501, 0.0),
    "gradients in bf16": _in_bf16(editing(_narrow_gradients)),
    "sums in bf16": _in_bf16(_narrow_sums),
    "reductions sent in bf16": _in_bf16(patched(sharding, "Types", _narrow_wire)),
    "masters in bf16": _after_steps(_narrow_masters),
    "norm epsilon 1e-4": _norm_eps(1e-4),
    "norm epsilon 1e-3": _norm_eps(1e-3),
    "GELU's other formula": patched(F, "gelu", _other_gelu),
    "scores 1 % larger": _attention(1.01),
    "scores 5 % larger": _attention(1.05),
    "tokens see the next ones": patched(F, "scaled_dot_product_attention", _whole_attention),
    "softmax in bf16": _in_bf16(patched(F, "scaled_dot_product_attention", _narrow_softmax)),
    "loss in bf16": _in_bf16(patched(F, "cross_entropy", _narrow_loss)),
    "loss half a percent low": _scaled_loss(0.995),
    "one token wrong": feeding(_token),
    "targets of one sequence shifted": feeding(_target),
    "a microbatch dropped": feeding(_dropped),
    "updated parameters never gathered": _copies(0),
    "copies in bf16 never refreshed": _in_bf16(_copies(0)),
    "copies late by a step": _copies(1),
    "a tenth of the copies never refreshed": _in_bf16(_copies(0, part=0.1)),
    "a tenth of the copies late by a step": _copies(1, part=0.1),
}
# What shows in the second step or later.
SUBTLE_LATER = {
    *("beta1 0.89", "beta2 0.99", "beta2 0.999", "moments in bf16", "second moment not corrected"),
    *("updated parameters never gathered", "copies in bf16 never refreshed"),
    *("copies late by a step", "a tenth of the copies never refreshed"),
    "a tenth of the copies late by a step",
}
