"""Bytes that element-wise kernels and the loss read and write on one rank, per microbatch.

Every read and write of unfused kernels counts, from the list of saved tensors in arXiv 2205.05198
(section 4.1), unless a function names another source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropp.cost.kernels import element_bytes

if TYPE_CHECKING:
    from zeropp.cost.blocks import Work


def attention_share(traffic: tuple[float, float]) -> float:
    """The part of a block's ``traffic``, given by half, that belongs to its attention half."""
    attention, mlp = traffic
    return attention / (attention + mlp)


def half_traffic(work: Work) -> tuple[float, float]:
    """Bytes that element-wise kernels move in the attention half and in the MLP half: in both a
    norm and a residual add, in the first the layout changes around attention, and in the second
    the MLP's non-linearity."""
    shape, e = work.shape, element_bytes(work.precision)
    whole = 2 * 2 + 2 * 3 + (1 if work.program.dropout_masks else 0)  # two norms, two residuals
    if work.sequence_parallel:
        whole /= work.tp  # type: ignore[assignment]
    passes = 2 if shape.gates == 1 else 5  # GELU: in, out; SiLU in, out, product in, in, out
    each, scale = whole * shape.hidden / 2, work.tokens * e * work.program.traffic_factor
    attention = each + 6 * shape.hidden / work.tp
    return scale * attention, scale * (each + passes * shape.ffn / work.tp)


def half_traffic_backward(work: Work) -> tuple[float, float]:
    """Bytes that element-wise kernels move in the backward of the attention half and of the MLP
    half. A norm reads its input and the gradient twice (for its own gradient and for that of its
    parameters) and writes once; the residual's gradient is added; the gradients of queries, keys
    and values are joined; GPT's biases sum the gradients of their outputs. GELU's backward reads
    two tensors and writes one, and its bias sums one; that of a gated MLP is assumed to move 1.5
    times what its forward moves."""
    shape = work.shape
    biases = 1 if shape.family == "gpt" else 0
    whole = 5 + 3 + biases + (2.5 if work.program.dropout_masks else 0.0)
    if work.sequence_parallel:
        whole /= work.tp
    joined = 11 if biases else 12  # layout, joining and, of biases or rotary embedding, 3 or 4
    passes = 4 if shape.gates == 1 else 7.5
    scale = work.tokens * element_bytes(work.precision) * work.program.traffic_factor
    attention = whole * shape.hidden + joined * shape.hidden / work.tp
    return scale * attention, scale * (whole * shape.hidden + passes * shape.ffn / work.tp)


def accumulation_bytes(work: Work) -> int:
    """Bytes per parameter that move when a microbatch's weight gradient is added to the sum, beside
    the output of the product, which ``matmul_s`` counts: the sum is read and written. Where the
    product does this, it is its output; otherwise the gradient is read as well."""
    total = 2 * work.program.state(work.precision).gradients
    element = element_bytes(work.precision)
    return total - element if work.program.fused_accumulation else total + element


def loss_bytes(work: Work) -> tuple[int, int]:
    """Bytes that the loss's forward and backward move per logit.

    flash-attention's loss reads the logits, and then reads them and overwrites them with their
    gradient. Others cast logits to fp32 and their gradient back. Between the casts, torch's own
    loss reads logits and writes log-probabilities, later writes a gradient of zeros but for the
    targets, and reads both for the gradient of the logits. Megatron's (``cross_entropy.py``) reads
    the logits for their maximum, subtracts it, exponentiates, sums and divides in a kernel each,
    and later multiplies by the loss's gradient.
    """
    e = element_bytes(work.precision)
    if work.program.fused_loss:
        return e, 2 * e
    cast = e + 4 if e < 4 else 0
    if work.program.loss_in_place(work.tp):
        return cast + 8 * 4, cast + 2 * 4
    return cast + 2 * 4, cast + 4 * 4
