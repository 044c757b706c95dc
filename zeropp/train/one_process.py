"""One process that trains uncut layers in a plain loop: what all else is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.engine.layers.chunk import seed_piece
from zeropp.engine.layers.values import (
    Value,
    cast,
    chosen,
    keywords_of,
    takes_all,
    tensors_of,
    without_scalars,
)
from zeropp.engine.loss import Loss, Microbatches


@dataclass
class OneProcess:
    """``layers`` that are called one after another, and whose ``masters``, which are as many
    parameters in their order, an optimizer updates. Gradients come from one backward per
    microbatch and are added up in ``sums``, by default the masters' type. ``compute``: the type to
    which a layer's floating-point inputs are cast. ``seed``: of what layers draw."""

    layers: Sequence[nn.Module]
    masters: Sequence[nn.Parameter]
    loss: Loss
    sums: torch.dtype | None = None
    compute: torch.dtype | None = None
    seed: int | None = None
    outputs: list[list[tuple[Tensor, ...]]] = field(default_factory=list)
    """Of every layer for every microbatch of the last step, where a caller wants ``outputs``."""

    def gradients(self, batch: Microbatches, step: int, *, outputs: bool = False) -> Tensor:
        """Set the masters' ``grad`` to that of a whole batch; returns its loss."""
        pairs = self._filled()
        losses, counts, self.outputs = [], [], [[] for _ in self.layers] if outputs else []
        sums: dict[int, Tensor] = {}
        for number in range(len(batch.inputs)):
            loss, count = self.forward(batch, number, step)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            counts += [] if count is None else [count]
            for index, (_, working) in enumerate(pairs):
                if working.grad is not None:
                    fresh, working.grad = working.grad, None
                    fresh = fresh.to(self.sums or pairs[index][0].dtype)
                    sums[index] = sums[index] + fresh if index in sums else fresh
        divisor = self._divisor(batch, counts)
        for index, (master, _) in enumerate(pairs):
            total = sums.get(index)
            master.grad = None if total is None else total.to(master.dtype) / divisor
        mean: Tensor = torch.stack(losses).double().sum() / divisor
        return mean

    @torch.no_grad()
    def evaluate(self, batch: Microbatches) -> Tensor:
        """The loss of a batch in evaluation mode; buffers and modes are as before."""
        self._filled()
        parts = [part for layer in self.layers for part in layer.modules()]
        modes = [part.training for part in parts]
        for part in parts:
            part.training = False
        losses, counts = [], []
        for number in range(len(batch.inputs)):
            loss, count = self.forward(batch, number, None)
            losses.append(loss)
            counts += [] if count is None else [count]
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        mean: Tensor = torch.stack(losses).double().sum() / self._divisor(batch, counts)
        return mean

    def forward(
        self, batch: Microbatches, number: int, step: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of one microbatch with what layers give beside it, and its count. ``step``: by
        which drawing is seeded."""
        value: Value = batch.inputs[number]
        beside: list[Tensor] = []
        keywords = batch.keywords_of(number)
        for index, layer in enumerate(self.layers):
            if self.seed is not None and step is not None:
                seed_piece(self.seed, step, number, index)
            own = chosen(keywords, _names(layer, keywords))
            own = dict(zip(own, cast(list(own.values()), self.compute), strict=True))
            value, scalars = without_scalars(layer(*cast(tensors_of(value), self.compute), **own))
            beside += [] if scalars is None else [scalars]
            if self.outputs and step is not None:
                self.outputs[index].append(tuple(x.detach().clone() for x in tensors_of(value)))
        loss, count = self.loss(value, batch, number)
        return sum(beside, loss), count

    @torch.no_grad()
    def _filled(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Masters with the parameters that layers compute with, which get their values."""
        pairs = list(zip(self.masters, parameters_of(self.layers).values(), strict=True))
        for master, working in pairs:
            working.data.copy_(master.data)
            working.grad = None
        return pairs

    def _divisor(self, batch: Microbatches, counts: Sequence[Tensor]) -> Any:
        if self.loss.reduction == "tokens":
            return torch.stack(list(counts)).sum()
        return len(batch.inputs) if self.loss.reduction == "mean" else 1


def parameters_of(layers: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of layers, each once, named ``{layer}.{name}``."""
    named = nn.ModuleList(layers).named_parameters()
    return dict(named)


def _names(layer: nn.Module, keywords: Mapping[str, Tensor]) -> frozenset[str]:
    names = keywords_of(layer)
    return names.union(keywords) if takes_all(layer) else names
