"""Parameters and FLOPs of a shape, and cuts of its pieces that are balanced by FLOPs.

A product of [a, b] and [b, c] is 2abc FLOPs. Backward is twice forward: one product for dX and one
for dW, or, for attention scores, one for each of the two activations. Norms, activations and
softmax are not counted, as in Megatron-LM (arXiv 2104.04473, appendix).
"""

from __future__ import annotations

from functools import lru_cache

from zeropp.schedule.cuts import cut_by_weight
from zeropp.types.operators import LayerOperators
from zeropp.types.shape import ModelShape


def block_parameters(shape: ModelShape) -> int:
    """Parameters of one transformer block."""
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    if shape.family == "gpt":
        biases = h + shape.attended + 2 * kv + shape.gates * shape.ffn + h
        return linear_weights(shape) + biases + 4 * h  # two LayerNorms
    return linear_weights(shape) + 2 * h  # two RMSNorms


@lru_cache(maxsize=1024)
def linear_weights(shape: ModelShape) -> int:
    """Parameters in the weights of the linear layers of one block: all but biases and norms."""
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    return 2 * h * shape.attended + 2 * h * kv + (shape.gates + 1) * h * shape.ffn


@lru_cache(maxsize=16384)
def piece_parameters(shape: ModelShape, index: int) -> int:
    """Parameters of piece ``index``; a tied head counts its copy of the embedding."""
    h = shape.hidden
    if index == 0:
        return (shape.vocab + (shape.seq if shape.family == "gpt" else 0)) * h
    if index == shape.num_pieces - 1:
        return shape.vocab * h + (2 * h if shape.family == "gpt" else h)
    return block_parameters(shape)


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the whole model, in which tied embeddings count once."""
    ends = piece_parameters(shape, 0) + piece_parameters(shape, shape.num_pieces - 1)
    total = ends + shape.layers * block_parameters(shape)
    return total - (shape.vocab * shape.hidden if shape.tied_embeddings else 0)


def block_forward_flops(shape: ModelShape) -> int:
    """Forward FLOPs of one block per token: projections, and attention over the whole sequence.

    Causal attention is counted in full (4*s*h for heads that are h wide together), as Megatron-LM's
    and PaLM's MFU do (arXiv 2104.04473, eq. 3; arXiv 2204.02311, appendix B).
    """
    return 2 * linear_weights(shape) + 4 * (shape.document or shape.seq) * shape.attended


def piece_forward_flops(shape: ModelShape, index: int) -> int:
    """Forward FLOPs of a piece per token; an embedding look-up has none."""
    if index == 0:
        return 0
    if index == shape.num_pieces - 1:
        return 2 * shape.vocab * shape.hidden
    return block_forward_flops(shape)


def model_flops_per_token(shape: ModelShape) -> int:
    """Forward and backward FLOPs of the model per token, without recomputation."""
    head = piece_forward_flops(shape, shape.num_pieces - 1)
    return 3 * (shape.layers * block_forward_flops(shape) + head)


def layer_flops(layer: LayerOperators) -> int:
    """The same of a recorded layer, for one microbatch: its products and its attention, and of
    their backward what has a gradient."""
    products = sum(
        2 * one.m * one.k * one.n * one.batch * (1 + (one.left != "none") + (one.right != "none"))
        for one in layer.products
    )
    attentions = sum(
        4 * one.heads * one.queries * one.keys * one.width * (3 if one.has_backward else 1)
        for one in layer.attentions
    )
    return products + attentions


@lru_cache(maxsize=4096)
def balanced_cuts(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """The cuts of a shape's pieces that ``cut_by_weight`` makes by their forward FLOPs."""
    weights = [piece_forward_flops(shape, index) for index in range(shape.num_pieces)]
    return cut_by_weight(weights, num_stages)
