"""Bytes of one microbatch's tensors in a block, in the head and between stages, on one rank.

Saved tensors are listed one by one, as in arXiv 2205.05198 (eq. 1 to 4), also for fused attention
and for Llama. What programs on plain torch operators keep and allocate in addition was read from
traces (``zeropp.emulate.memory``); a test compares these formulas with the traces.
"""

from __future__ import annotations

from zeropp.price.eager import eager_pass
from zeropp.price.kernels import element_bytes
from zeropp.price.pieces import Work, linears

FP32 = 4


def boundary_bytes(work: Work) -> float:
    """Bytes of the hidden states between two blocks, which are also a stage's input and output."""
    return work.tokens * work.shape.hidden * element_bytes(work.precision) / sequence_split(work)


def _keeps_casts(work: Work) -> bool:
    """Whether products of a block keep their inputs in 8 bits."""
    return work.precision == "fp8" and work.program.keeps_casts


def _input_bytes(work: Work) -> int:
    """Bytes per element of the input that a product of a block keeps for its weight gradient."""
    return 1 if _keeps_casts(work) else element_bytes(work.precision)


def _mlp_saved(work: Work) -> int:
    """How many tensors [tokens, ffn] the MLP saves: input and output of its non-linearity; with a
    gate its input, the gate's non-linearity (unless that is computed again), up, and the product
    of the last two."""
    if work.shape.gates == 1:
        return 2
    return 3 if work.program.fused_gate else 4


def _mlp_saved_bytes(work: Work) -> float:
    """Their bytes per token; the last is the input of a product."""
    others = (_mlp_saved(work) - 1) * element_bytes(work.precision)
    return work.shape.ffn * (others + _input_bytes(work))


def _inputs_split(work: Work) -> int:
    """The number of ranks that share the kept inputs of a block's column-parallel products."""
    return 1 if work.program.keeps_gathered_inputs else sequence_split(work)


def block_saved(work: Work) -> float:
    """Bytes that a block's backward needs from its forward.

    Only sequence parallelism splits over the TP ranks the inputs of both norms, the masks of both
    dropouts before residual additions and, in programs that gather them again for the backward
    (DTensor does not), the inputs of the products. Everything between is split by TP in any case.
    """
    shape, program = work.shape, work.program
    e, h, kv = element_bytes(work.precision), shape.hidden, shape.kv_heads * shape.head_dim
    a, split = shape.attended, sequence_split(work)
    scores = 0.0
    if not program.flash and work.recompute not in ("selective", "mlp"):
        scores = shape.heads * shape.seq * (2 * e + 1 if program.dropout_masks else e)
    if program.eager:
        kept = eager_pass(program.eager, shape, work.precision, "saved").moved(shape)
        return work.tokens * (kept + scores / work.tp)
    norms = (2 * h * e + 2 * h * program.dropout_masks) / split
    products = 2 * h * _input_bytes(work) / _inputs_split(work)
    if work.by_heads > 1:  # attention keeps what it got and gave; heads that are sent twice, too
        kv = max(kv, work.by_heads * work.tp * shape.head_dim)
    given = a * (work.by_heads > 1)
    inner = (2 * a + 2 * kv + given) * e + _mlp_saved_bytes(work) + a * _keeps_casts(work)
    inner += FP32 * shape.heads if program.flash else scores
    rotations = 0
    if not program.fused_rotary and shape.family == "llama":
        inner += a * e  # rotated heads are contiguous, so attention's output is copied into rows
        rotations = (
            4 * FP32 * work.tokens // work.microbatch * shape.head_dim // 2
        )  # sines, cosines; queries and keys
    return work.tokens * (norms + products + inner / work.tp) + rotations


def _mlp_inner(work: Work) -> float:
    """Of these bytes, those of its MLP without the input of the norm."""
    inputs = work.shape.hidden * _input_bytes(work) / _inputs_split(work)
    return work.tokens * (inputs + _mlp_saved_bytes(work) / work.tp)


def attention_saved(work: Work) -> float:
    """Of these bytes, those from the input of the block's first norm to attention's output, as far
    as recomputation keeps them."""
    of_attention = block_saved(work) - _mlp_inner(work) - boundary_bytes(work)
    return min(of_attention, block_kept(work) - boundary_bytes(work))


def block_kept(work: Work) -> float:
    """Bytes that a block keeps from its forward to its backward.

    With selective recomputation they depend on the program (``Program.selective``). With that of
    the MLP they are what torch keeps of the other operators: queries, keys and values, attention's
    output, and that of the product behind it.
    """
    if work.recompute == "full":
        return boundary_bytes(work)
    if work.recompute == "none":
        return block_saved(work)
    shape, e, selective = work.shape, element_bytes(work.precision), work.program.selective
    h, a, kv = shape.hidden, shape.attended, shape.kv_heads * shape.head_dim
    attended = (2 * a + 2 * kv) * e + FP32 * shape.heads
    if work.recompute == "mlp":
        return boundary_bytes(work) + work.tokens * (attended / work.tp + h * e)
    if selective in ("scores", "half", "mlp"):
        saved = block_saved(work)
        half = (boundary_bytes(work) + saved) / 2
        return {"scores": saved, "half": half, "mlp": saved - _mlp_inner(work)}[selective]
    if selective in ("qkv", "qkv_out"):  # what attention gave is made again
        out = h * e * (selective == "qkv_out")
        return boundary_bytes(work) + work.tokens * ((a + 2 * kv) * e / work.tp + out)
    if selective == "alternate":  # outputs of products, in the order of a block
        outputs = [
            a / work.tp,
            kv / work.tp,
            kv / work.tp,
            h,
            *[shape.ffn / work.tp] * shape.gates,
            h,
        ]
        kept = e * (sum(outputs[::2]) + a / work.tp) + FP32 * shape.heads / work.tp
        return boundary_bytes(work) + work.tokens * kept
    split = attended + shape.gates * shape.ffn * e
    sums = 2 * h * e  # outputs of the row-parallel products, whole on every TP rank
    return boundary_bytes(work) + work.tokens * (split / work.tp + sums)


def block_deferred(work: Work) -> float:
    """Bytes that wait for a block's weight gradients: x and dY of every linear layer.

    Torch's pipeline stages split the backward in the autograd graph: then no saved tensor is freed,
    and a gradient is held for every parameter (``torch.distributed.pipelining._backward``).
    """
    shape, e = work.shape, element_bytes(work.precision)
    h, a, kv = shape.hidden, shape.attended, shape.kv_heads * shape.head_dim
    outputs = (a + 2 * kv + shape.gates * shape.ffn) / work.tp
    if work.program.torch_stages:
        return block_saved(work) + work.tokens * e * (outputs + 4 * h)
    inputs = 2 * h / sequence_split(work) + (a + shape.ffn) / work.tp
    return work.tokens * e * (inputs + outputs + 2 * h)


def block_forward(work: Work) -> float:
    """Bytes of a block at the fullest moment of its forward: what it keeps, the output of its last
    product and its own output; if it is recomputed, temporarily also the MLP's tensors."""
    e, h = element_bytes(work.precision), work.shape.hidden
    inside = _mlp_saved(work) * work.shape.ffn / work.tp
    if work.recompute == "none":
        inside = 0.0
    return block_kept(work) + work.tokens * e * (2 * h / sequence_split(work) + inside)


def block_backward(work: Work, *, split: bool) -> float:
    """Bytes of a block at the fullest moment of its backward: what its forward has saved (or saves
    again), the gradient of its output, and the gradients in the MLP's non-linearity. ``split``: the
    input of the last product also waits for the weight gradient, or nothing is freed at all."""
    e, inside = element_bytes(work.precision), work.shape.ffn / work.tp
    if split and work.program.torch_stages:
        return block_deferred(work) + work.tokens * e * inside
    inside *= work.shape.gates + split
    # The output is joined again from the slices of the TP ranks.
    outputs = 1 + (work.program.pipe_buffers and work.tp > 1)
    product = work.program.separate_weight_gradient * work.shape.hidden * work.shape.ffn / work.tp
    return block_saved(work) + outputs * boundary_bytes(work) + e * (work.tokens * inside + product)


def logits_bytes(work: Work, size: int) -> float:
    """Bytes of the logits with ``size`` bytes per element."""
    split = work.tp if work.program.vocab_parallel else 1
    return work.tokens * work.shape.vocab / split * size


def head_kept(work: Work) -> float:
    """Bytes that the head keeps: input and output of the final norm, and the fp32 softmax of the
    loss, or the logits if the loss is fused, or their gradient if it is sliced. Torch's
    pipeline stages keep their outputs, so that the logits are always kept. In slices it keeps its
    input alone."""
    if work.slices > 1:
        return boundary_bytes(work)
    short = work.program.fused_loss or work.program.loss_gradient == "sliced"
    size = element_bytes(work.precision) if short else _loss_element(work)
    kept = 2 * boundary_bytes(work) + logits_bytes(work, size)
    if work.program.torch_stages and not work.program.fused_loss:
        kept += logits_bytes(work, element_bytes(work.precision))
    return kept


def joined_bytes(work: Work) -> float:
    """Bytes of x and dY of a linear layer, the largest, of all microbatches whose weight gradients
    are one product; 0 where those of each are."""
    if work.merged == 1:
        return 0.0
    largest = max(map(sum, linears(work)))
    return work.merged * work.tokens * element_bytes(work.precision) * largest


def head_deferred(work: Work) -> float:
    """Bytes that wait for the head's weight gradient, which only torch's pipeline stages delay."""
    if not work.program.torch_stages:
        return 0.0
    return 2 * boundary_bytes(work) + logits_bytes(work, element_bytes(work.precision))


def head_forward(work: Work) -> float:
    """Bytes of temporaries in the head's forward: the logits and, unless fused, their fp32 copy.
    Megatron's loss turns that copy into the softmax, which the head keeps."""
    e = element_bytes(work.precision)
    if work.program.fused_loss or work.slices > 1:
        return 0.0
    if work.program.loss_gradient == "sliced":  # the logits beside their gradient, and a slice
        slice_ = min(logits_bytes(work, 1), 2**27)
        return logits_bytes(work, e) + slice_ * (e + 3 * FP32)
    if work.program.loss_gradient == "in_place":
        return logits_bytes(work, e) if e < FP32 else 0.0
    return logits_bytes(work, e + (_loss_element(work) if e < FP32 else 0))


def _loss_element(work: Work) -> int:
    """Bytes of one element in which torch's or Megatron's loss computes."""
    return element_bytes(work.precision) if work.program.short_loss else FP32


def head_backward(work: Work) -> float:
    """Bytes of temporaries in the head's backward. Torch's loss makes fp32 gradients of its
    logarithms and of its input and, if cut by the vocabulary, a third tensor
    (``distributed/tensor/parallel/loss.py``). A fused loss works in place and makes only the
    gradient of the logits. Slices have logits, their gradient and three fp32 tensors of the loss,
    one slice after another, beside the gradients of their inputs, which are joined at the end."""
    if work.slices > 1:
        logits = logits_bytes(work, 1) / work.slices
        inside = 2 * logits * element_bytes(work.precision) + min(logits, 2**27) * 3 * FP32
        return boundary_bytes(work) + max(boundary_bytes(work), inside)
    if work.program.loss_gradient == "sliced":  # it is kept already
        return 0.0
    if work.program.fused_loss or work.program.loss_in_place(work.tp):
        return logits_bytes(work, element_bytes(work.precision))
    return logits_bytes(work, (3 if work.tp > 1 else 2) * _loss_element(work))


def sequence_split(work: Work) -> int:
    """The number of ranks over which sequence parallelism splits what TP leaves whole."""
    return work.tp if work.sequence_parallel else 1
