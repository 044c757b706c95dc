"""The loss of a microbatch, and the rows that a rank was given for a step or an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from zeropp.engine.layers.values import Value, alike, chosen, keywords_of, takes_all, tensors_of
from zeropp.engine.walk import Layer, OperationWatch, Stages, owners_of
from zeropp.types.layout import InfeasibleError
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

    def keywords_of(self, microbatch: int) -> Mapping[str, Tensor]:
        """The keyword inputs of one microbatch."""
        return self.keywords[microbatch] if self.keywords else {}

    def first(self) -> Microbatches:
        """The first microbatches, two where a trial may need two, as copies that it may change."""
        count = 1 if len(self.inputs) and len(self.inputs[0]) > 1 else 2
        rows = sum(len(part) for part in self.inputs[:count])
        copied = {name: part[:rows].clone() for name, part in self.whole.items()}
        return Microbatches(
            [part.clone() for part in self.inputs[:count]],
            [part.clone() for part in self.targets[:count]],
            [{n: x.clone() for n, x in part.items()} for part in self.keywords[:count]],
            copied,
        )

    def one(self, make: Callable[[Sequence[Tensor]], Tensor]) -> Microbatches:
        """One microbatch: what ``make`` gives for those of the inputs, of the targets and of every
        keyword input."""
        named = {name: make([x[name] for x in self.keywords]) for name in self.keywords_of(0)}
        return Microbatches([make(self.inputs)], [make(self.targets)], [named])

    def digest(self) -> int:
        """A number that tells shapes and types of a microbatch's inputs and keyword inputs."""
        parts = {"": self.inputs[0], **self.keywords_of(0)} if self.inputs else {}
        kinds = sorted((name, tuple(part.shape), str(part.dtype)) for name, part in parts.items())
        return crc32(repr(kinds).encode())


class Loss:
    """The user's loss function, which is called with the keyword inputs that it names, or with all
    that are ``given`` if it takes ``**kwargs`` and can be called with them. In its first
    call it is refused if it reads a parameter of one of the ``layers``: no rank would
    add up that part of the gradient; or calls collectives beyond one of the ``stages``."""

    def __init__(
        self,
        function: LossFunction,
        reduction: LossReduction,
        layers: Sequence[Layer] = (),
        given: Iterable[str] = (),
        stages: Stages = (),
    ) -> None:
        self.function, self._named = function, keywords_of(function)
        self.keywords = self._named.union(given if takes_all(function) else ())
        self.reduction, self._unread, self._stages = reduction, owners_of(layers), stages
        self._is_compared = False

    def __call__(
        self, output: object, batch: Microbatches, microbatch: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of one microbatch, and its count if the reduction is ``tokens``, both without
        dimensions; raises TypeError if the function gives something else."""
        targets = batch.targets[microbatch]
        keywords = chosen(batch.keywords_of(microbatch), self.keywords)
        watched, self._unread = self._unread, {}
        given = (id(output), id(targets))
        owners = {key: owner for key, owner in watched.items() if key not in given}
        with OperationWatch(owners, "loss_fn", stages=self._stages) if owners else nullcontext():
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

    def compare_halves(self, output: Value, batch: Microbatches) -> None:
        """Raise InfeasibleError if the loss of the first microbatch, for which the model gives
        ``output``, is not what its halves make it, so that it would depend on how a batch is cut.

        Only the first call compares, and only where the output has rows; a single row is taken with
        the next microbatch's. Losses that draw random numbers, or take no halves, are not compared.
        """
        if check := getattr(self.function, "check_targets", None):
            check(batch.inputs[0], batch.targets[0])
        try:
            whole = self._values(output, batch)
        except TypeError:
            if self.keywords == self._named:
                raise
            self.keywords = self._named  # ``**kwargs`` are handed on to what names some of them
            whole = self._values(output, batch)
        outputs = tensors_of(output)
        rows = len(batch.inputs[0])
        is_single = rows == 1 < len(batch.inputs)
        has_rows = (rows > 1 or is_single) and all(x.dim() and len(x) == rows for x in outputs)
        if self._is_compared or not has_rows or not all(map(math.isfinite, whole)):
            return
        self._is_compared = True
        try:
            if is_single:  # the rows of two microbatches, both with the first one's output
                outputs = tuple(torch.cat([x, x]) for x in outputs)
                batch = batch.one(lambda parts: torch.cat([*parts[:2]]))
                output, rows = alike(output, outputs), 2
                whole = self._values(output, batch)
            again = self._values(output, batch)
            first, second = (
                self._values(
                    alike(output, [x[part] for x in outputs]),
                    batch.one(lambda parts, part=part: parts[0][part]),  # type: ignore[misc]
                )
                for part in (slice(0, rows // 2), slice(rows // 2, rows))
            )
        except Exception:  # the loss of a whole microbatch is all that is asked of it
            return
        floats = [x.dtype for x in outputs if x.is_floating_point()]
        tolerance = max([1e-3, *(torch.finfo(dtype).eps ** 0.5 for dtype in floats)])
        share = (rows // 2) / rows if self.reduction == "mean" else 1.0
        other = 1.0 - share if self.reduction == "mean" else 1.0
        for ours, repeated, a, b in zip(whole, again, first, second, strict=True):
            bound = tolerance * max(abs(ours), abs(a), abs(b))
            if abs(ours - repeated) > bound or (is_single and ours == a):  # of the first row alone
                return
            if not abs(ours - (share * a + other * b)) <= bound:  # also where a half is NaN
                raise InfeasibleError(
                    f"loss_fn: is not what loss_reduction={self.reduction!r} says of rows: the "
                    f"first rows give {ours:.6g}, and their halves {a:.6g} and {b:.6g} (where "
                    "tokens are ignored, give (sum, count) with loss_reduction='tokens'; a loss "
                    "between rows would change with the size of microbatches)"
                )

    def compare_slices(self, output: Value, batch: Microbatches, count: int) -> list[str]:
        """What is wrong with the loss of ``count`` slices of the first microbatch's tokens, for
        which the model gives ``output``, by the loss of all of them; empty if nothing is."""
        length = batch.inputs[0].shape[1]

        def cut(x: Tensor) -> Sequence[Tensor]:
            return x.chunk(count, 1) if x.dim() > 1 and x.shape[1] == length else [x] * count

        outputs = [x.float() if x.itemsize < 4 else x for x in tensors_of(output)]
        share = count if self.reduction == "mean" else 1
        try:
            whole = self._values(alike(output, outputs), batch)
            slices = [
                self._values(
                    alike(output, part),
                    batch.one(lambda parts, index=index: cut(parts[0])[index]),  # type: ignore[misc]
                )
                for index, part in enumerate(zip(*map(cut, outputs), strict=True))
            ]
        except Exception as error:
            return [f"loss_fn: raises {type(error).__name__} for a slice of a sequence: {error}"]
        for ours, *parts in zip(whole, *slices, strict=True):
            if not abs(ours - sum(parts) / share) <= 1e-4 * max(map(abs, (ours, *parts))):
                shown = ", ".join(f"{part:.6g}" for part in parts)
                return [
                    f"loss_fn: gives {ours:.6g} for sequences, and {shown} for slices of them, of "
                    f"which that is not the {'mean' if share > 1 else 'sum'} (targets [rows, "
                    "tokens] must be those of the inputs' own tokens, shifted beforehand; where "
                    "tokens are ignored, give (sum, count) with loss_reduction='tokens')"
                ]
        return []

    def _values(self, output: Value, batch: Microbatches) -> list[float]:
        """The first microbatch's loss and count, of copies; refuses a backward."""
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors_of(output)]
        with torch.enable_grad():
            values = self(alike(output, [x.clone() for x in leaves]), batch.first(), 0)
        if any(x.grad is not None for x in leaves):
            raise InfeasibleError("loss_fn: calls backward, as train_step does (leave it out)")
        return [float(value) for value in values if value is not None]


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
        ctx.is_spent = False
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.is_spent or torch.is_grad_enabled():
            raise RuntimeError(
                "loss_fn: in slices of the tokens a loss has one backward, without create_graph "
                "(compute it again, or take F.cross_entropy)"
            )
        ctx.is_spent = True
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad), None, None
