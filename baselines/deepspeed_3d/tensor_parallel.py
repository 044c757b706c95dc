"""Tensor parallelism as in Megatron-LM (arXiv 1909.08053, section 3), over one process group.

A piece of the model (embedding, block or head) is built whole, as one process would build it, and
then cut in place: attention by heads, the MLP by its hidden width, embedding and logits by the
vocabulary. The gradient of a cut region's input is summed over the group; the output is summed over
the group, and its gradient is passed on as it is. A parameter that was cut has two attributes:
``model_parallel``, which DeepSpeed reads, and ``cut_dim``, the cut dimension.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from baselines.model import Block, Embedding, Head

Group = dist.ProcessGroup


class _Columns(torch.autograd.Function):
    """Column-parallel products of one input, [..., in] -> one [..., out / tp] per weight and bias.
    The gradient of the input is summed over the group beside the products of the weights'
    gradients, as in Megatron-LM (``LinearWithGradAccumulationAndAsyncCommunication``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, *parameters: Any) -> tuple[Tensor, ...]:
        weights, ctx.biases = parameters[::2], parameters[1::2]
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, ctx.biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        total = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            total = total + grad @ weight
        summed = dist.all_reduce(total, group=ctx.group, async_op=True)
        rows, made = x.flatten(0, -2), []
        for grad, bias in zip(grads, ctx.biases, strict=True):
            columns = grad.flatten(0, -2)
            made += [columns.t() @ rows, None if bias is None else columns.sum(0)]
        summed.wait()
        return total, None, *made


class _Sum(torch.autograd.Function):
    """All-reduce in the forward, identity in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def cut_piece(piece: nn.Module, group: Group) -> None:
    """Cut a piece of ``baselines.model`` in place to the part of this rank of the group."""
    if group.size() == 1:
        return
    if isinstance(piece, Block):
        _cut_block(piece, group)
    elif isinstance(piece, Embedding):
        _cut_parameter(piece.tokens, "weight", 0, group)
        piece.tokens.forward = partial(_vocabulary_embedding, piece.tokens, group)  # type: ignore[method-assign]
    elif isinstance(piece, Head):
        _cut_parameter(piece.output, "weight", 0, group)
        piece.output.forward = lambda x: cut_logits(x, piece.output.weight, group)  # type: ignore[assignment, method-assign]


def cut_logits(x: Tensor, weight: Tensor, group: Group) -> Tensor:
    """This rank's logits [batch, seq, vocab / tp] from hidden states [batch, seq, hidden] and a
    weight [vocab / tp, hidden] that is cut by the vocabulary."""
    if group.size() == 1:
        return F.linear(x, weight)
    return _Columns.apply(x, group, weight, None)[0]  # type: ignore[no-any-return, no-untyped-call]


def whole_parameter(parameter: Tensor, values: Tensor, group: Group) -> Tensor:
    """The whole values of a parameter, on every rank of the group.

    ``values`` are cut as the parameter is: the parameter itself, or its fp32 master weights. If the
    parameter is cut, this is a collective.
    """
    if not hasattr(parameter, "cut_dim"):
        return values.detach()
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.detach().contiguous(), group=group)
    return torch.cat(parts, dim=parameter.cut_dim)


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """Mean loss per token in fp32. ``logits``: this rank's [batch, seq, vocab / tp]; ``targets``:
    int64 [batch, seq], the same on every rank of the group."""
    if group.size() == 1:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return _VocabularyLoss.apply(logits.flatten(0, 1), targets.flatten(), group)  # type: ignore[no-any-return, no-untyped-call]


class _VocabularyLoss(torch.autograd.Function):
    """Cross entropy without gathering the logits (arXiv 1909.08053, section 3)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:
        scores = logits.float()
        largest = scores.max(dim=-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scores = scores - largest.unsqueeze(-1)
        mask, local = _local_tokens(targets, logits.shape[-1], group)
        rows = torch.arange(len(targets), device=targets.device)
        chosen = torch.where(mask, scores[rows, local], 0.0)
        exponentials = scores.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), chosen))
        dist.all_reduce(sums, group=group)
        total, chosen = sums
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), mask, local)
        ctx.dtype = logits.dtype
        loss: Tensor = (total.log() - chosen).mean()
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gradient, mask, local = ctx.saved_tensors
        rows = torch.arange(len(mask), device=mask.device)
        gradient[rows, local] -= mask.to(gradient.dtype)
        gradient *= grad / len(mask)
        return gradient.to(ctx.dtype), None, None


def _cut_block(block: Block, group: Group) -> None:
    attention, mlp = block.attention, block.mlp
    columns = [attention.query, attention.key, attention.value, mlp.up]
    if mlp.gate is not None:
        columns.append(mlp.gate)
    for linear in columns:
        for name, _ in list(linear.named_parameters()):
            _cut_parameter(linear, name, 0, group)
    for linear in (attention.output, mlp.down):
        _cut_parameter(linear, "weight", 1, group)
        linear.forward = partial(_row_parallel, linear, group)  # type: ignore[method-assign]
    _share_input(attention, columns[:3], group)
    _share_input(mlp, columns[3:], group)


def _cut_parameter(module: nn.Module, name: str, dim: int, group: Group) -> None:
    parts = getattr(module, name).detach().chunk(group.size(), dim=dim)
    parameter = nn.Parameter(parts[group.rank()].clone())
    parameter.cut_dim = dim  # type: ignore[attr-defined]
    parameter.model_parallel = True  # type: ignore[attr-defined]
    setattr(module, name, parameter)


def _share_input(module: nn.Module, linears: list[nn.Linear], group: Group) -> None:
    """Compute all of a module's column-parallel products when it gets its input, so that the
    backward has one all-reduce for them; each of ``linears`` then gives its own."""
    outputs: dict[int, Tensor] = {}

    def multiply(_: nn.Module, inputs: tuple[Tensor]) -> None:
        parameters = [p for linear in linears for p in (linear.weight, linear.bias)]
        made = _Columns.apply(inputs[0], group, *parameters)  # type: ignore[no-untyped-call]
        outputs.update(enumerate(made))

    module.register_forward_pre_hook(multiply)
    for index, linear in enumerate(linears):
        linear.forward = partial(lambda i, _: outputs.pop(i), index)  # type: ignore[method-assign]


def _row_parallel(linear: nn.Linear, group: Group, x: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(F.linear(x, linear.weight), group)  # type: ignore[no-untyped-call]
    return total if linear.bias is None else total + linear.bias


def _vocabulary_embedding(embedding: nn.Embedding, group: Group, tokens: Tensor) -> Tensor:
    mask, local = _local_tokens(tokens, embedding.weight.shape[0], group)
    part = F.embedding(local, embedding.weight) * mask.unsqueeze(-1)
    return _Sum.apply(part, group)  # type: ignore[no-any-return, no-untyped-call]


def _local_tokens(tokens: Tensor, size: int, group: Group) -> tuple[Tensor, Tensor]:
    """(mask of the tokens that are among this rank's ``size`` entries of the vocabulary, their
    index there or 0)."""
    shifted = tokens - group.rank() * size
    mask = (shifted >= 0) & (shifted < size)
    return mask, torch.where(mask, shifted, 0)
