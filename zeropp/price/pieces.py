"""Seconds of one piece's forward, input gradient and weight gradient on one rank.

In: a ``Work``, which is a shape, a microbatch, the tensor-parallel degree, a device and a program's
traits. Matrix products are those of arXiv 2104.04473 (section 2.3, appendix). Of element-wise
kernels and the loss every read and write counts as if nothing was fused, from the list of saved
tensors in arXiv 2205.05198 (section 4.1), unless a function names another source. The host starts
kernels ahead of the device, so a forward or backward takes the longer of device and host time, and
their sum where the host waits for each kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from zeropp.price.cluster import Device
from zeropp.price.eager import EagerPass, eager_pass
from zeropp.price.flops import piece_parameters
from zeropp.price.kernels import (
    element_bytes,
    fused_attention_backward_s,
    fused_attention_s,
    matmul_s,
    stream_s,
)
from zeropp.price.programs import Program
from zeropp.schedule.plan import SizedPlan
from zeropp.types.literals import Precision, Recompute
from zeropp.types.operators import Attention
from zeropp.types.shape import ModelShape

KERNELS = {"gpt": 40, "llama": 50}  # kernel launches of one block's forward
BACKWARD_LAUNCHES = 1.5  # those of a backward, over the forward's
# What starting one pass of a stage takes on the host, in launches: it receives, builds or walks
# autograd's graph, sends (the last two rows of results/reference/host_time.csv, which are 72 passes
# apart). On a GPU the host does it while kernels run.
PASS_LAUNCHES = 40
TENSORS = {"gpt": 12, "llama": 6}  # parameter tensors of one block; GPT's include biases
SEPARATE = {"gpt": 16, "llama": 9}  # with separate projections
TENSOR_KERNELS = 8  # additional launches with tensor parallelism


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
    accumulated: float  # bytes per parameter that adding a microbatch's gradients moves
    context: int = 1  # ranks that divide sequences
    by_heads: int = 1  # of these, those that exchange heads for tokens; groups of them are a ring
    merged: int = 1  # microbatches whose weight gradients of a linear layer are one product
    slices: int = 1  # of the tokens, in which the head and the loss run, in the backward if several

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch on one rank."""
        return self.microbatch * self.shape.seq // self.context

    @property
    def launch_s(self) -> float:
        """The host's seconds per kernel launch."""
        return self.device.launch_us * self.program.launch_factor * 1e-6


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


def tensors_of(work: Work) -> int:
    """The parameter tensors of a block."""
    return (SEPARATE if work.program.separate_projections else TENSORS)[work.shape.family]


def linears(work: Work) -> tuple[tuple[int, int], ...]:
    """(k, n) of the matrix products of a block on one rank. Those of one input are fused (of
    queries, keys and values; of a gated MLP), unless the program has separate ones."""
    shape, tp = work.shape, work.tp
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    attended, gated = [shape.attended + 2 * kv], [shape.gates * shape.ffn]
    if work.program.separate_projections:
        attended, gated = [shape.attended, kv, kv], [shape.ffn] * shape.gates
    return (
        *((h, max(1, n // tp)) for n in attended),
        (shape.attended // tp or 1, h),
        *((h, n // tp) for n in gated),
        (shape.ffn // tp or 1, h),
    )


def gradients_of(plan: SizedPlan, work: Work, stage: int) -> list[tuple[float, ...]]:
    """The elements of a stage's gradients in the order in which a backward makes them, those of one
    product, or of one norm, together."""
    shape, pieces = plan.shape, plan.pieces_of(stage)
    biases = shape.family == "gpt"
    products = [(float(n),) * biases + (float(k * n),) for k, n in reversed(linears(work))]
    mlp = 1 + (shape.gates if work.program.separate_projections else 1)
    norm = (float(shape.hidden),) * (1 + biases)
    block = [*products[:mlp], norm, *products[mlp:], norm]
    table = [(float(shape.vocab * shape.hidden / plan.layout.tp),)]
    ends = [0 in pieces, shape.num_pieces - 1 in pieces]
    head = table if ends[1] and not (shape.tied_embeddings and ends[0]) else []
    return head + block * plan.blocks[stage] + table * ends[0]


@dataclass(frozen=True, kw_only=True)
class PieceTimes:
    """Passes of the three kinds of piece."""

    embedding: PassTimes
    block: PassTimes
    head: PassTimes


@lru_cache(maxsize=65536)
def piece_times(work: Work, forward_tp: float, backward_tp: float, again_tp: float) -> PieceTimes:
    """The times of all kinds of piece. ``forward_tp``, ``backward_tp`` and, of recomputation,
    ``again_tp`` are the exposed seconds of a block's tensor-parallel collectives."""
    forward: float = KERNELS[work.shape.family]
    backward = BACKWARD_LAUNCHES * forward
    if work.program.eager:
        forward, backward = (_eager(work, name).launches for name in ("forward", "backward"))
    more = TENSOR_KERNELS if work.tp > 1 else 0
    block = passes_of(
        _block_kernels(work), work.program, work.recompute,
        host_s=(forward + more) * work.launch_s,
        back_host_s=(backward + BACKWARD_LAUNCHES * more) * work.launch_s,
        in_line=work.program.blocking_launches or work.device.is_cpu,  # whose host runs kernels
        forward_tp=forward_tp, backward_tp=backward_tp, again_tp=again_tp,
    )  # fmt: skip
    return PieceTimes(embedding=_embedding(work), block=block, head=_head(work))


def _eager(work: Work, name: str, part: str = "block") -> EagerPass:
    return eager_pass(work.program.eager, work.shape, work.precision, name, part)


@dataclass(frozen=True, kw_only=True)
class KernelSeconds:
    """Seconds of the kernels of a block, or of any other layer."""

    products: float
    transposed: float  # products for the gradients of inputs
    weights: float  # products for the gradients of weights
    attention: float
    attention_backward: float
    elementwise: float
    elementwise_backward: float
    accumulation: float  # weight gradients that are added to their sums
    biases: float = 0.0  # of all element-wise backward ones, those that come with weight gradients
    mlp: float = 0.0  # of all forward ones, those of the MLP and of the norm before it
    wide: float = 0.0  # of all forward ones, the products whose input or output is the widest
    last: float = 0.0  # of all forward ones, the last product
    behind: float = 0.0  # of all forward ones, the product behind attention


def _block_kernels(work: Work) -> KernelSeconds:
    device, precision, tokens, merged = work.device, work.precision, work.tokens, work.merged
    cast, cast_backward = cast_bytes(work)
    gain = eight_bit_gain(device, work.program, precision)

    def product(m: int, k: int, n: int) -> float:
        return matmul_s(device, precision, m=m, k=k, n=n, gain=gain)

    products = [product(tokens, k, n) for k, n in linears(work)]
    forward, backward = _elementwise_kernels(work)
    mlp = 1 + (work.shape.gates if work.program.separate_projections else 1)  # products
    added = tensors_of(work) if work.program.fsdp_hooks and work.accumulated else 4
    return KernelSeconds(
        products=sum(products),
        transposed=sum(product(tokens, n, k) for k, n in linears(work)),
        weights=sum(product(k, merged * tokens, n) for k, n in linears(work)) / merged,
        attention=attention_s(work),
        attention_backward=attention_s(work, backward=True),
        elementwise=stream_s(device, block_traffic(work) + cast, forward),
        elementwise_backward=stream_s(
            device, block_traffic_backward(work) + cast_backward, backward
        ),
        accumulation=stream_s(
            device, work.accumulated * (piece_parameters(work.shape, 1) / work.tp), added
        )
        / merged
        + _joined_s(work),
        biases=_late_biases_s(work),
        last=products[-1],
        behind=products[-mlp - 1],
        wide=sum(products[len(products) - mlp :]),
        mlp=sum(products[len(products) - mlp :]) + stream_s(device, mlp_traffic(work), kernels=4),
    )


def _joined_s(work: Work) -> float:
    """Seconds in which a microbatch's x and dY of all linear layers are copied behind those of the
    others whose weight gradients are merged."""
    if work.merged == 1:
        return 0.0
    copied = 2 * element_bytes(work.precision) * work.tokens * sum(map(sum, linears(work)))
    return stream_s(work.device, copied, 2 * len(linears(work)))


def passes_of(
    kernels: KernelSeconds,
    program: Program,
    recompute: Recompute,
    *,
    host_s: float,
    back_host_s: float,
    in_line: bool,
    forward_tp: float = 0.0,
    backward_tp: float = 0.0,
    again_tp: float = 0.0,
) -> PassTimes:
    """The passes of a block, or of any other layer, whose forward the host starts in ``host_s``
    seconds, and its backward in ``back_host_s``: before the kernels run (``in_line``) or while
    they do. For the others see ``piece_times``."""
    core, elementwise = kernels.attention, kernels.elementwise
    forward = kernels.products + core + elementwise + forward_tp
    forward = forward + host_s if in_line else max(forward, host_s)
    whole = forward - kernels.last if program.stops_recomputing else forward
    again = {"none": 0.0, "selective": 0.0, "mlp": 0.0, "full": whole - forward_tp + again_tp}
    wide = kernels.wide - (kernels.last if program.stops_recomputing else 0.0)
    if recompute == "mlp":
        again["mlp"] = elementwise + wide + again_tp
    if recompute == "selective":
        parts = {"scores": 0.0 if program.flash else core, "elementwise": elementwise + again_tp}
        parts |= {"half": forward / 2, "alternate": forward / 2}
        parts["qkv_out"] = core + elementwise + wide + again_tp
        parts["qkv"] = parts["qkv_out"] + kernels.behind
        parts["mlp"] = max(kernels.mlp + again_tp, host_s / 2)
        again["selective"] = parts[program.selective]
    weight = kernels.weights + kernels.accumulation + kernels.biases
    input_ = kernels.transposed + kernels.attention_backward
    input_ += kernels.elementwise_backward - kernels.biases + backward_tp
    if not input_ + weight:  # nothing in it has a gradient
        return PassTimes(forward, again[recompute], 0.0)
    back = back_host_s / (input_ + weight)
    stretch = 1.0 + back if in_line else max(1.0, back)
    return PassTimes(forward, input_ * stretch + again[recompute], weight * stretch)


def attention_s(work: Work, *, backward: bool = False) -> float:
    """Seconds of attention's forward: scores, softmax, and their product with the values. Fused
    attention computes only the causal half of the products (arXiv 2205.14135); unfused attention
    computes whole products and moves the scores through memory. A ``backward`` has five products
    for the forward's two if fused (section 3.1), otherwise twice the forward's products."""
    if work.program.flash:
        fused_s = fused_attention_backward_s if backward else fused_attention_s
        gain = work.program.attention_gain(work.device)
        return fused_s(work.device, work.precision, _attention(work), gain=gain)
    # Softmax reads the causal half and writes all, dropout reads, writes, and writes its mask. In
    # the backward softmax reads its gradient, too, and dropout its gradient and mask.
    e = element_bytes(work.precision)
    moved = (1.5 + backward) * e + (2 * e + 1) * work.program.dropout_masks
    softmax_s = stream_s(work.device, moved * _scores(work), kernels=2)
    return (1 + backward) * _unfused_products_s(work) + softmax_s


def _scores(work: Work) -> int:
    heads = max(1, work.shape.heads // work.tp)
    return work.microbatch * heads * work.shape.seq**2 // work.context


def _attention(work: Work) -> Attention:
    shape = work.shape
    heads = work.microbatch * max(1, shape.heads // (work.tp * work.by_heads))
    queries = shape.seq * work.by_heads // work.context
    keys = shape.seq
    if shape.document:  # every document is a row of its own
        heads, keys = heads * queries // shape.document, shape.document
        queries = keys
    return Attention(heads=heads, queries=queries, keys=keys, width=shape.head_dim, causal=True)


def _unfused_products_s(work: Work) -> float:
    seq, width = work.shape.seq, work.shape.head_dim
    batch = _scores(work) // seq**2
    scores_s = matmul_s(work.device, work.precision, m=seq, k=width, n=seq, batch=batch)
    return scores_s + matmul_s(work.device, work.precision, m=seq, k=seq, n=width, batch=batch)


def _embedding(work: Work) -> PassTimes:
    """The embedding's times: rows are looked up, and gradients are added to rows."""
    shape, e = work.shape, element_bytes(work.precision)
    rows = work.tokens * shape.hidden * e
    split = work.tp if work.sequence_parallel else 1
    forward = stream_s(work.device, 4 * rows / split, kernels=3)
    parameters = piece_parameters(shape, 0) / work.tp
    backward = stream_s(work.device, 3 * rows + work.accumulated * parameters, kernels=4)
    return PassTimes(forward, 0.0, backward)


def _head(work: Work) -> PassTimes:
    """The head's times: final norm, logits and loss. In slices, each adds its weight gradient to
    the sum, and all is in the backward."""
    shape, device, precision, slices = work.shape, work.device, work.precision, work.slices
    h, tokens, e = shape.hidden, work.tokens, element_bytes(precision)
    rows = -(-tokens // slices)
    vocab = shape.vocab
    if work.tp > 1 or work.program.pads_vocabulary:  # to whole 128 columns per rank, as Megatron
        vocab = -(-vocab // (128 * work.tp)) * 128
    norm = norm_backward = stream_s(device, 2 * tokens * h * e, kernels=2)
    if work.program.eager:
        norm, norm_backward = (
            stream_s(device, tokens * last.moved(shape), last.kernels)
            for last in (_eager(work, name, "norm") for name in ("forward", "backward"))
        )
    lost = vocab if work.program.vocab_parallel else vocab * work.tp
    loss, loss_backward = loss_s(device, work.program, precision, tokens * lost, work.tp)
    forward = slices * matmul_s(device, precision, m=rows, k=h, n=vocab) + norm + loss
    products = slices * matmul_s(device, precision, m=rows, k=vocab, n=h)
    backward = products + norm_backward + loss_backward
    weight = matmul_s(device, precision, m=h, k=rows, n=vocab)
    weight += stream_s(device, work.accumulated * h * vocab)
    if slices > 1:
        return PassTimes(0.0, forward + backward, slices * weight)
    return PassTimes(forward, backward, weight)


def _elementwise_kernels(work: Work) -> tuple[int, int]:
    """Element-wise kernels of a block's forward and backward. With separate projections there are
    two norms, two sums and a non-linearity, of rotary embedding one each for queries and keys, and
    of a gate its product; in the backward a sum for every further product of the same input, and
    one of each bias."""
    if work.program.eager:
        return _eager(work, "forward").kernels, _eager(work, "backward").kernels
    if not work.program.separate_projections:
        return 12, 18
    gated = work.shape.gates - 1
    rotary, biases = (0, 6) if work.shape.family == "gpt" else (2, 0)
    added, _ = _biases_added(work)
    return 5 + rotary + gated + added, 7 + rotary + 2 * gated + biases


def block_traffic(work: Work) -> float:
    """Bytes that element-wise kernels move in a block's forward: two norms, two residual adds, the
    layout changes around attention (none with separate projections, except rotary embedding, which
    reads and writes queries and keys), and the MLP's non-linearity."""
    if work.program.eager:
        return work.tokens * work.program.traffic_factor * _eager(work, "forward").moved(work.shape)
    shape, e = work.shape, element_bytes(work.precision)
    whole = 2 * 2 + 2 * 3 + (1 if work.program.dropout_masks else 0)  # two norms, two residuals
    if work.sequence_parallel:
        whole /= work.tp  # type: ignore[assignment]
    around = 6
    if work.program.separate_projections:
        around = 0 if shape.family == "gpt" else 4
    inside = (around * shape.attended + _activation_passes(work) * shape.ffn) / work.tp
    inside += 2 * _biases_added(work)[1]
    return work.tokens * e * work.program.traffic_factor * (whole * shape.hidden + inside)


def _late_biases_s(work: Work) -> float:
    """Seconds of the gradients of GPT's biases, where torch computes them with those of weights:
    they sum the gradients of outputs."""
    if not work.program.torch_stages or work.shape.family != "gpt":
        return 0.0
    shape, tp = work.shape, work.tp
    summed = 3 * shape.attended / tp + shape.ffn / tp + 2 * shape.hidden
    return stream_s(work.device, work.tokens * element_bytes(work.precision) * summed, kernels=6)


def _biases_added(work: Work) -> tuple[int, int]:
    """Kernels in a block's forward that only add a bias, and the width of what they add to: all
    (``LinearFunctionForZeroStage3``), or those of row-parallel products."""
    if not work.program.separate_biases or work.shape.family != "gpt":
        return 0, 0
    shape = work.shape
    if work.program.live_parameters:
        return 6, 3 * shape.attended + 2 * shape.hidden + shape.ffn
    return (2, 2 * shape.hidden) if work.tp > 1 else (0, 0)


def mlp_traffic(work: Work) -> float:
    """Of these bytes, those of the norm before the MLP and of the MLP's non-linearity."""
    norm = 2 * work.shape.hidden / (work.tp if work.sequence_parallel else 1)
    moved = norm + _activation_passes(work) * work.shape.ffn / work.tp
    return work.tokens * element_bytes(work.precision) * work.program.traffic_factor * moved


def _activation_passes(work: Work) -> int:
    """How often a tensor [tokens, ffn] is read or written: GELU's in and out; SiLU's in and out,
    the product's two inputs and its output."""
    return 2 if work.shape.gates == 1 else 5


def block_traffic_backward(work: Work) -> float:
    """Bytes that element-wise kernels move in a block's backward. A norm reads its input and the
    gradient twice (for its own gradient and for that of its parameters) and writes once; the
    residual's gradient is added; the gradients of queries, keys and values are joined, or, with
    separate projections, those of their inputs added; GPT's biases sum the gradients of their
    outputs. GELU's backward reads two tensors and writes one, and its
    bias sums one; that of a gated MLP is assumed to move 1.5 times what its forward moves."""
    shape = work.shape
    if work.program.eager:
        return work.tokens * work.program.traffic_factor * _eager(work, "backward").moved(shape)
    biases = 1 if shape.family == "gpt" else 0
    whole = 5 + 3 + biases + (2.5 if work.program.dropout_masks else 0.0)  # of each residual branch
    if work.sequence_parallel:
        whole /= work.tp
    around, added = 3 if biases else 4, 0  # of biases or rotary embedding
    if work.program.separate_projections:
        added = 3 * (1 + shape.gates)
    else:  # layout and joining
        around += 8
    passes = 4 if shape.gates == 1 else 7.5
    inside = (around * shape.attended + passes * shape.ffn) / work.tp
    scale = work.tokens * element_bytes(work.precision) * work.program.traffic_factor
    return scale * ((2 * whole + added) * shape.hidden + inside)


# Bytes per element that a cast to 8 bits moves (torchao 0.13, ``float8`` and ``mx_formats``).
# "fused": 16 bits are read, and 8 are written for a product and 8, transposed, for another one.
# "tensorwise": the maximum comes with the kernel that makes them, and the transpose copies 8 bits;
# "apart": each of a tensor's two products reads it for the maximum and casts it (5), and the second
# copies its transpose (2).
# "rowwise": along rows and along columns 16 bits are read twice, and 8 are written. "mx": the two
# casts of 3 bytes, as long as they take on a B200 (5.5 and 3.9 TB/s by the README of mx_formats).
CAST_BYTES = {"fused": 4, "tensorwise": 5, "apart": 12, "rowwise": 10, "mx": 8}
# The share of the 8-bit rate that products with a scale per row reach: an 8B gains 10 % with them
# on 8 H100 and 4 % on 8 B200, and 25 % with a scale per tensor on both (torchao, training.md and
# README of mx_formats).
_ROWWISE = 0.8


def eight_bit_gain(device: Device, program: Program, precision: Precision) -> float:
    """The rate of a block's products over that of 16-bit ones."""
    if precision != "fp8":
        return 1.0
    gain = device.eight_bit_gain or 1.0
    return gain * _ROWWISE if program.scaling == "rowwise" else gain


def cast_bytes(work: Work) -> tuple[int, int]:
    """Bytes that casts to 8 bits move in a block's forward and backward. Every input, weight and
    gradient of an output is cast; "fused" saves what inputs cost that a norm makes (Transformer
    Engine, ``LayerNormLinear``), and weights, which are cast once per step, as are those that are
    cast before their gathers."""
    if work.precision != "fp8":
        return 0, 0
    products, each = linears(work), CAST_BYTES[work.program.scaling]
    inputs, gradients = (work.tokens * sum(side) for side in zip(*products, strict=True))
    if work.program.scaling == "fused":
        return each * work.tokens * sum(k for k, _ in products[1::2]), each * gradients
    weights = 0 if work.program.gathers_casts else sum(k * n for k, n in products)
    if work.program.scaling == "apart":  # half of them are for the products of the backward
        half = each // 2 * (inputs + weights)
        return half, half + each * gradients
    return each * (inputs + weights), each * gradients


def accumulation_bytes(program: Program, precision: Precision) -> int:
    """Bytes per parameter that move when a microbatch's weight gradient is added to the sum, beside
    the output of the product, which ``matmul_s`` counts: the sum is read and written. Where the
    product does this, it is its output; otherwise the gradient is read as well. A program that
    moves more says so itself (``StateBytes.accumulated``)."""
    state, element = program.state(precision), element_bytes(precision)
    total = 2 * state.gradients
    if program.fused_accumulation:
        return total - element
    return state.accumulated or total + element


def loss_bytes(program: Program, precision: Precision, tp: int = 1) -> tuple[int, int]:
    """Bytes that the loss's forward and backward move per logit, with ``tp`` tensor-parallel ranks.

    flash-attention's loss reads the logits, and then reads them and overwrites them with their
    gradient. Others cast logits to fp32 and their gradient back. Between the casts, torch's own
    loss reads logits and writes log-probabilities. Later it writes a gradient that is zero where no
    target is, and reads both for the gradient of the logits. Megatron's (``cross_entropy.py``)
    reads the logits for their maximum, subtracts it, exponentiates, sums and divides in a kernel
    each, and later multiplies by the loss's gradient.
    """
    e = element_bytes(precision)
    if program.fused_loss:
        return e, 2 * e
    if program.short_loss:  # torch's, without casts
        return 2 * e, 4 * e
    cast = e + 4 if e < 4 else 0
    if program.loss_in_place(tp):
        return cast + 8 * 4, cast + 2 * 4
    if program.loss_gradient == "sliced":  # torch's, a copy into the gradient, and its scaling
        return 2 * cast + 6 * 4 + 2 * e, 2 * e
    return cast + 2 * 4, cast + 4 * 4


def loss_s(
    device: Device, program: Program, precision: Precision, logits: int, tp: int = 1
) -> tuple[float, float]:
    """Seconds of the loss's forward and backward over this many logits on one rank."""
    forward, backward = loss_bytes(program, precision, tp)
    return (
        stream_s(device, logits * forward, kernels=4),
        stream_s(device, logits * backward, kernels=4),
    )
