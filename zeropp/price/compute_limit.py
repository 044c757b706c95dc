"""The compute limit: the throughput of a device if only the model's own kernels took time.

No program reaches it. It leaves out pipeline bubbles, communication, copies of parameters and
gradients, recomputation, the optimizer, and differences between stages or nodes. It includes what
no program can avoid on a device: matrix products at the rate that they reach, attention, element-
wise kernels, the addition of each weight gradient to its sum (in the product), and the time to
start kernels. So the difference between a plan and the limit is the cost of parallel training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from zeropp.price.activations import block_kept, head_kept
from zeropp.price.cluster import NEWEST, Cluster
from zeropp.price.flops import parameter_count
from zeropp.price.kernels import ALIGNED
from zeropp.price.pieces import Work, accumulation_bytes, piece_times
from zeropp.price.programs import Program, StateBytes
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape

MICROBATCHES = (1, 2, 4, 8, 16)  # sequences; the sizes that the tuner tries
# The least share of 1F1B's activations with which a pipeline without bubble is known (V-Min: arXiv
# 2405.15362, section 3). 1F1B's are those of one microbatch in the whole model.
LEAST_ACTIVATIONS = 1 / 3
STATE_BYTES = 16  # per parameter: gradient, and the optimizer's fp32 master and two moments
# Fused attention and fused accumulation of fp32 gradient sums.
_IDEAL = Program(
    name="compute limit",
    bf16=StateBytes(4, 4, 8),
    fp32=StateBytes(4, 4, 8),
    fused_loss=True,
    kernels=NEWEST,
)


@dataclass(frozen=True)
class ComputeLimit:
    """The limit of one model on one device, and the microbatch, in sequences, that reaches it."""

    microbatch_size: int
    tokens_per_s_per_gpu: float


@lru_cache(maxsize=1024)
def compute_limit(
    shape: ModelShape,
    cluster: Cluster,
    num_gpus: int,
    precision: Precision,
) -> ComputeLimit:
    """Tokens per second and GPU of the model's kernels alone, at the best microbatch that fits.

    A microbatch fits if a device can hold its share of parameters, gradients and optimizer state,
    divided among all GPUs, and the least activations with which a pipeline can run without a
    bubble. One sequence always counts as fitting, because programs can split it (tensor
    parallelism) or keep less of it (recomputation). The kernels are those of
    ``zeropp.price.pieces``, as fast as the newest software has them, and the vocabulary is padded
    so that its products are not slower than their neighbours'.
    """
    shape = replace(shape, vocab=-(-shape.vocab // ALIGNED) * ALIGNED)
    works = [
        Work(
            shape=shape,
            device=cluster.device.of_year(NEWEST),
            program=_IDEAL,
            precision=precision,
            recompute="none",
            microbatch=size,
            tp=1,
            sequence_parallel=False,
            accumulated=accumulation_bytes(_IDEAL, precision),
        )
        for size in MICROBATCHES
    ]
    states = STATE_BYTES * parameter_count(shape) / num_gpus
    fitting = [
        work
        for work in works
        if work.microbatch == 1
        or states + LEAST_ACTIVATIONS * (shape.layers * block_kept(work) + head_kept(work))
        <= cluster.device.usable_bytes
    ]
    best = max(fitting, key=_tokens_per_s)
    return ComputeLimit(best.microbatch, _tokens_per_s(best))


def _tokens_per_s(work: Work) -> float:
    times = piece_times(work, 0.0, 0.0, 0.0)
    whole = work.shape.layers * times.block.total + times.embedding.total + times.head.total
    return work.tokens / whole
