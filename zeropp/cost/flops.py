"""Parameters and FLOPs of a shape, and cuts of its pieces that are balanced by FLOPs.

A product of [a, b] and [b, c] is 2abc FLOPs. Backward is twice forward: one product for dX and one
for dW, or, for attention scores, one for each of the two activations. Norms, activations and
softmax are not counted, as in Megatron-LM (arXiv 2104.04473, appendix).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from zeropp.literals import BlockHalf
from zeropp.shape import ModelShape


def block_parameters(shape: ModelShape) -> int:
    """Parameters of one transformer block."""
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    attention = 2 * h * h + 2 * h * kv
    mlp = (shape.gates + 1) * h * shape.ffn
    if shape.family == "gpt":
        biases = 2 * h + 2 * kv + shape.gates * shape.ffn + h
        return attention + mlp + biases + 4 * h  # two LayerNorms
    return attention + mlp + 2 * h  # two RMSNorms


def half_parameters(shape: ModelShape, half: BlockHalf) -> int:
    """Parameters of the attention or the MLP of one block, with its norm."""
    h, kv, gpt = shape.hidden, shape.kv_heads * shape.head_dim, shape.family == "gpt"
    attention = 2 * h * h + 2 * h * kv + (2 * h + 2 * kv if gpt else 0) + (2 * h if gpt else h)
    return attention if half == "attention" else block_parameters(shape) - attention


def linear_weights(shape: ModelShape, half: BlockHalf | None = None) -> int:
    """Parameters in the weights of the linear layers of one block, or of one half of it: all but
    biases and norms."""
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    attention = 2 * h * h + 2 * h * kv if half != "mlp" else 0
    mlp = (shape.gates + 1) * h * shape.ffn if half != "attention" else 0
    return attention + mlp


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

    Causal attention is counted in full (4*s*h), as Megatron-LM's and PaLM's MFU do
    (arXiv 2104.04473, eq. 3; arXiv 2204.02311, appendix B).
    """
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    mlp = (shape.gates + 1) * h * shape.ffn
    return 2 * (2 * h * h + 2 * h * kv + mlp) + 4 * shape.seq * h


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


@lru_cache(maxsize=4096)
def balanced_cuts(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """The cuts of a shape's pieces that ``cut_by_weight`` makes by their forward FLOPs."""
    weights = [piece_forward_flops(shape, index) for index in range(shape.num_pieces)]
    return cut_by_weight(weights, num_stages)


def cut_by_weight(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cut pieces into contiguous stages such that the largest weight of a stage is minimal.

    Of the cuts that reach it, the one with the most even stages, counted from the front, is taken.
    Every stage has at least one piece; raises ValueError if there are more stages than pieces.
    """
    if num_stages > len(weights):
        raise ValueError(f"{num_stages} stages for {len(weights)} pieces")
    best: dict[tuple[int, int], tuple[float, float, int]] = {}  # -> (largest, sum of squares, cut)

    def solve(first: int, stages: int) -> tuple[float, float]:
        if stages == 1:
            load = sum(weights[first:])
            return load, load * load
        if (first, stages) not in best:
            options = []
            load = 0
            for cut in range(first + 1, len(weights) - stages + 2):
                load += weights[cut - 1]
                largest, squares = solve(cut, stages - 1)
                options.append((max(load, largest), load * load + squares, cut))
            best[first, stages] = min(options)
        return best[first, stages][:2]

    solve(0, num_stages)
    cuts = [0]
    for stages in range(num_stages, 1, -1):
        cuts.append(best[cuts[-1], stages][2])
    return (*cuts, len(weights))
