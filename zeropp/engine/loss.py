"""The loss of a microbatch, and the rows that a rank was given for a step or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor

from zeropp.engine.layers.values import chosen, keywords_of, takes_all
from zeropp.engine.walk import Layer, OperationWatch, owners_of
from zeropp.types.literals import LossReduction

# From the output of the last layer, targets and the keyword inputs that it names to a loss, or to
# a sum and a count.
LossFunction = Callable[..., Tensor | tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class Microbatches:
    """One rank's part of a batch, cut into microbatches. ``keywords`` are the keyword inputs of
    each microbatch by name; empty if there are none. ``whole``: all of them by name, uncut, to be
    compared with those of other ranks."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    keywords: Sequence[Mapping[str, Tensor]] = ()
    whole: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def cut(cls, parts: Mapping[str, Tensor], size: int, whole: Mapping[str, Tensor]) -> Self:
        """The ``parts`` of a batch, by name, in microbatches of ``size`` rows, in the same memory.
        Each has a version counter of its own, so that a layer may change one in place while the
        backward of another is still to come."""
        cut = {n: [x.data for x in torch.split(part, size)] for n, part in parts.items()}
        inputs, targets = cut.pop("inputs"), cut.pop("targets")
        keywords = [dict(zip(cut, each, strict=True)) for each in zip(*cut.values(), strict=False)]
        return cls(inputs, targets, keywords, whole)

    def keywords_of(self, microbatch: int) -> Mapping[str, Tensor]:
        """The keyword inputs of one microbatch."""
        return self.keywords[microbatch] if self.keywords else {}

    def first(self) -> Microbatches:
        """The first microbatch, as copies that may be changed."""
        return Microbatches(
            [part.clone() for part in self.inputs[:1]],
            [part.clone() for part in self.targets[:1]],
            [{n: x.clone() for n, x in part.items()} for part in self.keywords[:1]],
        )

    def digest(self) -> int:
        """A number that tells shapes and types of a microbatch's inputs and keyword inputs."""
        parts = {"": self.inputs[0], **self.keywords_of(0)} if self.inputs else {}
        kinds = sorted((name, tuple(part.shape), str(part.dtype)) for name, part in parts.items())
        return crc32(repr(kinds).encode())


class Loss:
    """The user's loss function, which is called with the keyword inputs that it names, or with all
    that are ``given`` if it takes ``**kwargs``. In its first call it is refused if it reads a
    parameter of one of the ``layers``: no rank would add up that part of the gradient."""

    def __init__(
        self,
        function: LossFunction,
        reduction: LossReduction,
        layers: Sequence[Layer] = (),
        given: Iterable[str] = (),
    ) -> None:
        self.function, self.reduction, self._unread = function, reduction, owners_of(layers)
        self.keywords = keywords_of(function).union(given if takes_all(function) else ())

    def __call__(
        self, output: object, batch: Microbatches, microbatch: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of one microbatch, and its count if the reduction is ``tokens``, both without
        dimensions; raises TypeError if the function gives something else."""
        targets = batch.targets[microbatch]
        keywords = chosen(batch.keywords_of(microbatch), self.keywords)
        watched, self._unread = self._unread, {}
        owners = {k: one for k, one in watched.items() if k not in (id(output), id(targets))}
        with OperationWatch(owners, "loss_fn") if owners else nullcontext():
            loss: Any = self.function(output, targets, **keywords)
        if self.reduction != "tokens":
            return _number(loss), None
        if not isinstance(loss, tuple | list) or len(loss) != 2:
            raise TypeError(
                f"loss_fn: gives {_kind(loss)}, but (sum, count) of a microbatch is needed with "
                "loss_reduction='tokens'"
            )
        total, count = loss
        if isinstance(count, int | float):  # a kernel fills it in, so that the host does not wait
            count = torch.full((), count, dtype=torch.float64, device=_number(total).device)
        return _number(total), _number(count).detach().double()


def _number(value: object) -> Tensor:
    """A tensor of one number, without dimensions; raises TypeError for anything else."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TypeError(
            f"loss_fn: gives {_kind(value)}, but a tensor of one number is needed (the mean over a "
            "microbatch; or with loss_reduction='sum' the sum, with 'tokens' a sum and a count)"
        )
    return value.squeeze()


def _kind(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


_SLICE = 2**27  # logits of a slice; half a GiB in fp32


def in_slices(
    function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor
) -> Tensor:
    """``function(logits, targets)``, a sum over tokens, slice after slice of the tokens. A slice's
    gradient is computed with its loss, in the type of the logits, and is all that is kept: no
    tensor of all logits is in fp32 (arXiv 2506.13996, section 3.1; Liger, arXiv 2410.10989).

    ``logits`` [tokens, vocabulary]; ``targets`` [tokens]. The one backward writes into what is
    kept: a second one, and one that is to be differentiated, raise RuntimeError.
    """
    return _InSlices.apply(logits, targets, function)  # type: ignore[no-any-return, no-untyped-call]


class _InSlices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, function: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else logits
        rows, losses = max(1, _SLICE // logits.shape[-1]), []
        parts = (torch.split(tensor, rows) for tensor in (logits, targets, gradient))
        for part, goals, made in zip(*parts, strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_(ctx.needs_input_grad[0])
                loss = function(part, goals)
            if ctx.needs_input_grad[0]:
                made.copy_(torch.autograd.grad(loss, part)[0])
            losses.append(loss.detach())
        ctx.save_for_backward(gradient)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "loss_fn: in slices of the tokens a loss has no gradient of its gradient (take "
                "F.cross_entropy)"
            )
        (gradient,) = ctx.saved_tensors  # which torch refuses to give again, once it has changed
        return gradient.mul_(grad), None, None
