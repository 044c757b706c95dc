"""Sequences that a group of ranks divides (DeepSpeed-Ulysses, arXiv 2309.14509).

Ranks of a context group have the same rows, and each a slice of their tokens. Layers compute token
by token, except attention: ``scaled_dot_product_attention`` gets all tokens for a part of the
heads, and gives back all heads for a rank's tokens. While a layer runs, torch's function has a
stand-in that does so, whoever calls it. What the stand-in does not reach (positions that a layer
counts itself, other kinds of attention, convolutions, draws but of dropout) ``zeropp.check`` finds.
Attention over another number of tokens than the slice's is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.backends import mha
from torch.nn import functional

from zeropp.engine.layers.values import POSITIONS
from zeropp.engine.ranks.collectives import all_gather_single, as_sent
from zeropp.types.layout import InfeasibleError

_none: Any = None
# For all threads, as the stand-ins are: on a GPU autograd recomputes layers in threads of its own.
_active: Context | None = None


def active() -> Context | None:
    """The ranks among which the sequences that a layer is given are divided; None outside."""
    return _active


class Context:
    """The ranks that divide sequences: how many, and which this one is. Without a ``group`` what
    others would send has the right shape alone, as a walk over layers needs it."""

    def __init__(
        self,
        size: int,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        *,
        positions: bool = True,
        packs: bool = False,
        without_tokens: Collection[str] = (),
    ) -> None:
        """``positions``: layers take ``position_ids``; ``packs``: batches have them.
        ``without_tokens``: keyword inputs that every rank has whole."""
        self.size, self.rank, self.group, self.packs = size, rank, group, packs
        self._positions, self._without_tokens = positions, without_tokens
        self._attention = self._dropout = _none
        self._tokens = 0  # of a slice
        # One object each, as torch.compile compiles again where it meets others.
        self._stand_ins = torch.compiler.disable(self._attend), self._drop  # type: ignore[no-untyped-call]

    def part(self, value: Tensor, length: int) -> Tensor:
        """This rank's tokens of a tensor [rows, length, ...]; one without ``length`` tokens in
        dimension 1 is given back whole."""
        if value.dim() < 2 or value.shape[1] != length:
            return value
        return value.chunk(self.size, 1)[self.rank]

    def parts(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tokens of all tensors of a batch (its inputs come first) and, if
        layers take them and the batch has none, the positions of its tokens. Raises InfeasibleError
        if tokens do not divide."""
        first = next(iter(whole.values()))
        if first.dim() < 2 or first.shape[1] % self.size:
            raise InfeasibleError(
                f"inputs: sequences of tokens [rows, tokens, ...] must divide among "
                f"context={self.size} ranks, but inputs are {tuple(first.shape)} (pad them, or "
                "take another context)"
            )
        places = torch.arange(first.shape[1], device=first.device).expand(first.shape[:2])
        every = {POSITIONS: places, **whole} if self._positions else whole
        return {
            name: one if name in self._without_tokens else self.part(one, first.shape[1])
            for name, one in every.items()
        }

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def whole(self, part: Tensor, dim: int = 1) -> Tensor:
        """The tensor whose parts in a dimension the ranks have; without gradients."""
        if self.group is None:
            return torch.cat([part] * self.size, dim)
        first = as_sent(part.detach().movedim(dim, 0))
        gathered = first.new_empty(self.size * len(first), *first.shape[1:])
        all_gather_single(gathered, first, group=self.group)
        return gathered.movedim(0, dim)

    @contextmanager
    def exchanging(self, tokens: int) -> Iterator[None]:
        """Inside this context attention over the ``tokens`` of a slice exchanges heads for tokens,
        and dropout drops what it would drop of whole sequences. Backwards are inside, too, as
        layers may recompute in them."""
        global _active
        before = functional.scaled_dot_product_attention, functional.dropout
        if before != self._stand_ins:
            self._attention, self._dropout = before
        functional.scaled_dot_product_attention, functional.dropout = self._stand_ins
        outside, _active, self._tokens = _active, self, tokens
        # In evaluations torch's encoder layers have a kernel of their own for all of a layer.
        is_fast = mha.get_fastpath_enabled()
        mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            mha.set_fastpath_enabled(is_fast)
            functional.scaled_dot_product_attention, functional.dropout = before
            _active = outside

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        if dropout_p:
            raise InfeasibleError(
                f"context={self.size}: attention drops weights (dropout_p={dropout_p}), and a "
                "rank with some of the heads would drop others (set it to 0)"
            )
        q, k, v = self._to_heads(query, key, value)
        if attn_mask is not None:
            attn_mask = self._whole_mask(attn_mask, query.shape[2], query.shape[1])
        more["enable_gqa"] = q.shape[1] != k.shape[1]
        mixed: Tensor = self._attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **more)
        by_rank = mixed.view(*mixed.shape[:2], self.size, -1, mixed.shape[3]).movedim(2, 0)
        return _joined(self._exchanged(by_rank), 2)

    def _drop(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or not p or input.dim() < 2:
            dropped: Tensor = self._dropout(input, p, training, inplace)
            return dropped
        # Drawn for all tokens, as one process draws; this takes their memory.
        shape = [*input.shape]
        shape[1] *= self.size
        kept = self._dropout(torch.ones(shape, dtype=input.dtype, device=input.device), p)
        factor = kept.chunk(self.size, 1)[self.rank]
        return input.mul_(factor) if inplace else input * factor

    def _to_heads(self, *given: Tensor) -> list[Tensor]:
        """Queries, keys, values [rows, heads, tokens, width] of all tokens for own heads."""
        query, key, _ = given
        if query.dim() != 4 or query.shape[2] != key.shape[2]:
            raise InfeasibleError(
                f"context={self.size}: attention must be over [rows, heads, tokens, width] of as "
                f"many queries as keys, but is of {tuple(query.shape)} and {tuple(key.shape)}"
            )
        if query.shape[2] != self._tokens:
            raise InfeasibleError(
                f"context={self.size}: attention is over {query.shape[2]} tokens, but a slice of a "
                f"sequence has {self._tokens} (give windows of tokens as a mask of all of them, or "
                "take context=1)"
            )
        if query.shape[1] % self.size:
            raise InfeasibleError(
                f"context={self.size}: must divide the {query.shape[1]} heads of attention (try "
                f"{gcd(query.shape[1], self.size)})"
            )
        by_rank = []
        for x in given:
            if missing := self.size // gcd(x.shape[1], self.size) - 1:
                x = x.repeat_interleave(missing + 1, 1)
            by_rank.append(x.view(len(x), self.size, -1, *x.shape[2:]).movedim(1, 0))
        if len({x.shape[-1] for x in given}) > 1:
            return [_joined(self._exchanged(x), 3) for x in by_rank]
        joined = _joined(self._exchanged(torch.cat(by_rank, 2)), 3)
        return list(torch.split(joined, [x.shape[2] for x in by_rank], 1))

    def _exchanged(self, by_rank: Tensor) -> Tensor:
        if self.group is None:
            return by_rank
        exchanged: Tensor = _AllToAll.apply(by_rank, self.group)  # type: ignore[no-untyped-call]
        return exchanged

    def _whole_mask(self, mask: Tensor, length: int, heads: int) -> Tensor:
        """A mask [.., queries, keys] of all tokens for own heads; it may have only keys."""
        rows, columns = mask.shape[-2:]
        if rows == 1 and columns == length:
            mask = self.whole(mask, mask.dim() - 1)
        elif rows not in (1, self.size * length) or columns not in (1, self.size * length):
            raise InfeasibleError(
                f"context={self.size}: a layer makes a mask [{rows}, {columns}] of its slice of "
                f"{length} tokens (give a mask of all tokens as a keyword input, or is_causal)"
            )
        if mask.dim() == 4 and mask.shape[1] == heads > 1:
            mask = mask.chunk(self.size, 1)[self.rank]
        return mask


class _AllToAll(torch.autograd.Function):
    """Of tensors [ranks, ...], the first part of every rank on the first, and so on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


def _joined(received: Tensor, dim: int) -> Tensor:
    """The parts of a dimension, which are counted by the first one, as one tensor without it."""
    return received.movedim(0, dim - 1).flatten(dim - 1, dim)
