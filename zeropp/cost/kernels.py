"""Seconds of one kernel on one device: matrix products, and element-wise passes over memory.

A product is limited by the rate that the device reaches or by memory, whichever is slower, and
takes a fixed time in addition. Its output tiles run in waves over the multiprocessors (NVIDIA,
"Matrix Multiplication Background User's Guide", tile and wave quantization): if the last wave is
only partly filled, the rest of it is wasted. Libraries split tiles to reduce that loss, so half of
it is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

from zeropp.cluster import Device
from zeropp.cost.flops import block_parameters, half_parameters, piece_parameters
from zeropp.programs import Program
from zeropp.shape import ModelShape

if TYPE_CHECKING:
    from zeropp.literals import Precision, Recompute


TILE = (128, 128)
# The share of the rate that products reach if a side is no multiple of 8, or of 64, because tensor
# cores read rows in groups of 128 bytes. The first is that of the same guide ("alignment"); the
# second was fitted on two runs of a model of hidden size 14,400 with TP 8 and without a pipeline
# (results/published/deepspeed_pipelines.csv).
UNALIGNED, PARTLY_ALIGNED = 0.42, 0.62
ALIGNED = 64  # sides of which a multiple reach the whole rate


def element_bytes(precision: Precision) -> int:
    """Bytes of one element of an activation."""
    return 2 if precision == "bf16" else 4


def matmul_rate(device: Device, precision: Precision) -> float:
    """The FLOP/s that the largest products reach."""
    tflops = device.matmul_bf16_tflops if precision == "bf16" else device.matmul_fp32_tflops
    return tflops * 1e12


def wave_efficiency(device: Device, m: int, n: int, batch: int = 1) -> float:
    """The share of the multiprocessors that the tiles of an [m, n] output keep busy."""
    if device.units == 1:
        return 1.0
    tiles = m * n * batch / (TILE[0] * TILE[1])
    rows, columns = ceil(m / TILE[0]), ceil(n / TILE[1])
    waves = ceil(rows * columns * batch / device.units)
    return 0.5 + 0.5 * min(1.0, tiles / (waves * device.units))


def alignment_efficiency(*sides: int) -> float:
    """The share of the rate that a product reaches by what its sides are multiples of."""
    if any(side % 8 for side in sides):
        return UNALIGNED
    return PARTLY_ALIGNED if any(side % ALIGNED for side in sides) else 1.0


def matmul_s(
    device: Device,
    precision: Precision,
    *,
    m: int,
    k: int,
    n: int,
    batch: int = 1,
    gain: float = 1.0,
) -> float:
    """Seconds of ``batch`` products of [m, k] and [k, n] in one kernel, at ``gain`` times the rate
    of the precision."""
    flops = 2.0 * m * k * n * batch
    rate = gain * matmul_rate(device, precision) * wave_efficiency(device, m, n, batch)
    if device.units > 1:
        rate *= alignment_efficiency(m, k, n)
    element = element_bytes(precision) * batch
    output_s = device.exposed_output * _stream(device, element * m * n)
    moved_s = _stream(device, element * (m * k + k * n + m * n))
    return max(flops / rate + output_s, moved_s) + device.kernel_us * 1e-6


def stream_s(device: Device, moved: float, kernels: int = 1) -> float:
    """Seconds of ``kernels`` element-wise kernels that together read and write ``moved`` bytes."""
    return _stream(device, moved) + kernels * device.kernel_us * 1e-6


def _stream(device: Device, moved: float) -> float:
    return moved / (device.memory_bandwidth_gb_s * 1e9 * device.memory_efficiency)


# Bytes that element-wise kernels and the loss read and write on one rank, per microbatch.
#
# Every read and write of unfused kernels counts, from the list of saved tensors in arXiv 2205.05198
# (section 4.1), unless a function names another source.


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


def cast_bytes(work: Work) -> tuple[int, int]:
    """Bytes that casts to 8 bits move in a block's forward and backward. A cast reads 16 bits and
    writes 8 for a product and 8, transposed, for another one. Inputs that a norm makes are written
    in 8 bits by the norm (Transformer Engine, ``LayerNormLinear``), which saves what it costs; all
    gradients of outputs are cast."""
    if not work.program.eight_bit:
        return 0, 0
    each, products = 4 * work.tokens, linears(work)
    return each * sum(k for k, _ in products[1::2]), each * sum(n for _, n in products)


def accumulation_bytes(work: Work) -> int:
    """Bytes per parameter that move when a microbatch's weight gradient is added to the sum, beside
    the output of the product, which ``matmul_s`` counts: the sum is read and written. Where the
    product does this, it is its output; otherwise the gradient is read as well. A program that
    moves more says so itself (``StateBytes.accumulated``)."""
    state, element = work.program.state(work.precision), element_bytes(work.precision)
    total = 2 * state.gradients
    if work.program.fused_accumulation:
        return total - element
    return state.accumulated or total + element


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


# Time of one piece's forward, input gradient and weight gradient on one rank.
#
# The inputs are a shape, a microbatch, the tensor-parallel degree and a device. Matrix products are
# those of arXiv 2104.04473 (section 2.3, appendix); the functions above count the bytes of
# element-wise kernels. The host starts kernels ahead of the device, so a forward or backward takes
# the longer of device and host time, and their sum where the host waits for each kernel.


KERNELS = {"gpt": 40, "llama": 50}  # kernel launches of one block's forward
TENSORS = {"gpt": 12, "llama": 6}  # parameter tensors of one block; GPT's include biases
TENSOR_KERNELS = 8  # additional launches with tensor parallelism
# Fused attention computes whole square tiles on the diagonal, of which causal attention needs half
# (arXiv 2307.08691, section 3.1.1).
ATTENTION_TILE = 128


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything on which the price of a piece depends."""

    shape: ModelShape
    device: Device
    program: Program
    precision: Precision
    recompute: Recompute
    microbatch: int
    tp: int
    sequence_parallel: bool

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch, in whole sequences."""
        return self.microbatch * self.shape.seq


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one microbatch, with tensor-parallel collectives."""

    forward: float
    backward_input: float  # with recomputation
    backward_weight: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward_input + self.backward_weight


def linears(work: Work) -> tuple[tuple[int, int], ...]:
    """(k, n) of the matrix products of a block on one rank; Llama's parallel ones are fused."""
    shape, tp = work.shape, work.tp
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    return (
        (h, (h + 2 * kv) // tp),
        (h // tp or 1, h),
        (h, shape.gates * shape.ffn // tp),
        (shape.ffn // tp or 1, h),
    )


@dataclass(frozen=True, kw_only=True)
class PieceTimes:
    """Passes of the three kinds of piece, and of both halves of a block, which add up to it."""

    embedding: PassTimes
    block: PassTimes
    head: PassTimes
    attention: PassTimes
    mlp: PassTimes


@lru_cache(maxsize=65536)
def piece_times(work: Work, forward_tp: float, backward_tp: float) -> PieceTimes:
    """The times of all kinds of piece. ``forward_tp`` and ``backward_tp`` are the exposed seconds
    of a block's tensor-parallel collectives, without those of recomputation."""
    kernels = _block_kernels(work)
    whole = _block(work, kernels, forward_tp, backward_tp)
    attention = _attention_half(
        work, kernels, whole, forward_tp=forward_tp, backward_tp=backward_tp
    )
    mlp = PassTimes(
        whole.forward - attention.forward,
        whole.backward_input - attention.backward_input,
        whole.backward_weight - attention.backward_weight,
    )
    return PieceTimes(
        embedding=_embedding(work), block=whole, head=_head(work), attention=attention, mlp=mlp
    )


@dataclass(frozen=True, kw_only=True)
class _BlockSeconds:
    """Seconds of a block's kernels. Lists have an entry per matrix product (see ``linears``)."""

    products: Sequence[float]
    transposed: Sequence[float]
    weights: Sequence[float]
    attention: float
    attention_backward: float
    elementwise: float
    elementwise_backward: float
    accumulation: float  # weight gradients that are added to their sums


def _block_kernels(work: Work) -> _BlockSeconds:
    device, precision, tokens = work.device, work.precision, work.tokens
    parameters = piece_parameters(work.shape, 1) / work.tp
    cast, cast_backward = cast_bytes(work)
    gain = (device.eight_bit_gain or 1.0) if work.program.eight_bit else 1.0

    def product(m: int, k: int, n: int) -> float:
        return matmul_s(device, precision, m=m, k=k, n=n, gain=gain)

    return _BlockSeconds(
        products=[product(tokens, k, n) for k, n in linears(work)],
        transposed=[product(tokens, n, k) for k, n in linears(work)],
        weights=[product(k, tokens, n) for k, n in linears(work)],
        attention=attention_s(work),
        attention_backward=attention_backward_s(work),
        elementwise=stream_s(device, sum(half_traffic(work)) + cast, kernels=12),
        elementwise_backward=stream_s(
            device, sum(half_traffic_backward(work)) + cast_backward, kernels=18
        ),
        accumulation=stream_s(device, accumulation_bytes(work) * parameters, kernels=4),
    )


def _block(work: Work, kernels: _BlockSeconds, forward_tp: float, backward_tp: float) -> PassTimes:
    host, core, elementwise = _host(work), kernels.attention, kernels.elementwise
    in_line = work.program.blocking_launches
    forward = sum(kernels.products) + core + elementwise + forward_tp
    forward = forward + host if in_line else max(forward, host)
    again = {"none": 0.0, "selective": 0.0, "full": forward}
    if work.recompute == "selective":
        scores = 0.0 if work.program.flash else core
        parts = {"scores": scores, "elementwise": elementwise, "half": forward / 2}
        again["selective"] = parts[work.program.selective]
    weight = sum(kernels.weights) + kernels.accumulation
    input_ = sum(kernels.transposed) + kernels.attention_backward
    input_ += kernels.elementwise_backward + backward_tp
    back = 1.5 * host / (input_ + weight)
    stretch = 1.0 + back if in_line else max(1.0, back)
    return PassTimes(forward, input_ * stretch + again[work.recompute], weight * stretch)


def _attention_half(
    work: Work, kernels: _BlockSeconds, block: PassTimes, *, forward_tp: float, backward_tp: float
) -> PassTimes:
    """The times of a block's attention half: of each of the block's times, the share that the
    kernels of attention have in those of the whole block. Meant for blocks without recomputation,
    since a block that is cut in two is never recomputed."""
    moves = attention_share(half_traffic(work))
    moves_back = attention_share(half_traffic_backward(work))
    weights = half_parameters(work.shape, "attention") / block_parameters(work.shape)

    def part(
        whole: float, products: Sequence[float], core: float, others: Sequence[float]
    ) -> float:
        attention = sum(products[:2]) + core + others[0]
        return whole * attention / (attention + sum(products[2:]) + others[1])

    def beside(seconds: float, share: float, tensor: float = 0.0) -> tuple[float, float]:
        return share * seconds + tensor / 2, (1 - share) * seconds + tensor / 2

    once = beside(kernels.elementwise, moves, forward_tp)
    back = beside(kernels.elementwise_backward, moves_back, backward_tp)
    added = beside(kernels.accumulation, weights)
    return PassTimes(
        part(block.forward, kernels.products, kernels.attention, once),
        part(block.backward_input, kernels.transposed, kernels.attention_backward, back),
        part(block.backward_weight, kernels.weights, 0.0, added),
    )


def attention_s(work: Work) -> float:
    """Seconds of attention's forward: scores, softmax, and their product with the values. Fused
    attention computes only the causal half of the products (arXiv 2205.14135); unfused attention
    computes whole products and moves the scores through memory."""
    if work.program.flash:
        return _fused_products_s(work) + work.device.kernel_us * 1e-6
    # softmax reads the causal half and writes all, dropout reads, writes, and writes its mask
    passes = 1.5 * element_bytes(work.precision)
    if work.program.dropout_masks:
        passes += 2 * element_bytes(work.precision) + 1
    return _unfused_products_s(work) + stream_s(work.device, passes * _scores(work), kernels=2)


def attention_backward_s(work: Work) -> float:
    """Seconds of attention's backward: five products for the forward's two if fused (arXiv
    2205.14135, section 3.1), otherwise twice the forward's products."""
    if work.program.flash:
        return 2.5 * _fused_products_s(work) + work.device.kernel_us * 1e-6
    # softmax reads its gradient and the causal half of its output and writes, dropout reads
    # its gradient and mask and writes
    passes = 2.5 * element_bytes(work.precision)
    if work.program.dropout_masks:
        passes += 2 * element_bytes(work.precision) + 1
    return 2 * _unfused_products_s(work) + stream_s(work.device, passes * _scores(work), kernels=2)


def _scores(work: Work) -> int:
    heads = max(1, work.shape.heads // work.tp)
    return work.microbatch * heads * work.shape.seq**2 * work.program.slices


def _fused_products_s(work: Work) -> float:
    width = work.shape.head_dim
    rate = matmul_rate(work.device, work.precision) * work.device.attention_efficiency
    rate *= work.program.attention_factor
    rate *= min(1.0, 0.5 + width / 256)  # narrow heads use the tensor cores less well
    whole_tiles = 1 + ATTENTION_TILE / work.shape.seq
    return 2.0 * _scores(work) * width * whole_tiles / rate


def _unfused_products_s(work: Work) -> float:
    seq, width = work.shape.seq, work.shape.head_dim
    batch = _scores(work) // seq**2
    scores_s = matmul_s(work.device, work.precision, m=seq, k=width, n=seq, batch=batch)
    return scores_s + matmul_s(work.device, work.precision, m=seq, k=seq, n=width, batch=batch)


def _host(work: Work) -> float:
    kernels = KERNELS[work.shape.family] + (TENSOR_KERNELS if work.tp > 1 else 0)
    return kernels * work.device.launch_us * work.program.launch_factor * 1e-6


def _embedding(work: Work) -> PassTimes:
    """The embedding's times: rows are looked up, and gradients are added to rows."""
    shape, e = work.shape, element_bytes(work.precision)
    rows = work.tokens * shape.hidden * e
    split = work.tp if work.sequence_parallel else 1
    forward = stream_s(work.device, 4 * rows / split, kernels=3)
    parameters = piece_parameters(shape, 0) / work.tp
    backward = stream_s(work.device, 3 * rows + accumulation_bytes(work) * parameters, kernels=4)
    return PassTimes(forward, 0.0, backward)


def _head(work: Work) -> PassTimes:
    """The head's times: final norm, logits and loss."""
    shape, device, precision = work.shape, work.device, work.precision
    h, tokens, e = shape.hidden, work.tokens, element_bytes(precision)
    vocab = shape.vocab
    if work.tp > 1 or work.program.pads_vocabulary:  # to whole 128 columns per rank, as Megatron
        vocab = -(-vocab // (128 * work.tp)) * 128
    norm = stream_s(device, 2 * tokens * h * e, kernels=2)
    lost = vocab if work.program.vocab_parallel else vocab * work.tp
    loss, loss_backward = (
        stream_s(device, tokens * lost * moved, kernels=4) for moved in loss_bytes(work)
    )
    forward = matmul_s(device, precision, m=tokens, k=h, n=vocab) + norm + loss
    backward = matmul_s(device, precision, m=tokens, k=vocab, n=h) + norm + loss_backward
    moved = accumulation_bytes(work) * h * vocab
    weight = matmul_s(device, precision, m=h, k=tokens, n=vocab) + stream_s(device, moved)
    return PassTimes(forward, backward, weight)
