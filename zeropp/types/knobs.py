"""What a person may set of a ZeroPP step, through ``zeropp.parallelize`` or in the suite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from zeropp.types.literals import (
    AT_LEAST_0,
    AT_LEAST_1,
    Auto,
    Placement,
    Recompute,
    ReduceEvery,
    WireType,
)


@dataclass(frozen=True, kw_only=True)
class StepKnobs:
    """What a person may set of a ZeroPP step: keywords of ``zeropp.parallelize``, and, with those
    of ``ZeroppKnobs``, keys of the suite's command line and fields of its records.

    A *chunk* is what Megatron-LM calls a virtual stage: a rank holds V of them. A *unit* is a group
    of U microbatches that go through a chunk one after another, so that the chunk's parameters are
    gathered once per unit. A *chunk-activation* is what one microbatch leaves behind in one chunk
    for its backward.
    """

    prefix: ClassVar[str] = ""  # what stands before a knob's name where it is set

    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks of a ZeRO-3 group (dp_shard)
    context: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks that divide a sequence (Ulysses)
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # number of such groups (dp_replicate)
    replicate_zero: Literal[0, 1] | Auto = "auto"  # 1: ZeRO-1 over the replicas
    chunks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # model chunks per rank (V)
    unit: Annotated[int | Auto, AT_LEAST_1] = "auto"  # microbatches per scheduling unit (U)
    activation_cap: Annotated[int | Auto, AT_LEAST_1] = "auto"  # live chunk-activations per rank
    recompute: Recompute | Auto = "auto"  # what backwards compute again: none, selective, mlp, full
    offload_blocks: Annotated[int | Auto, AT_LEAST_0] = "auto"  # per rank, kept by the host
    reduce_every: ReduceEvery | Auto = "auto"  # when gradients are reduced over the shards
    reduce_dtype: WireType = "fp32"  # type in which gradients are sent; sums are fp32
    gradient_parts: Annotated[int, AT_LEAST_1] = 1  # in which a chunk's gradients are reduced
    prefetch: Annotated[int, AT_LEAST_0] = 1  # chunks that are gathered ahead of their use
    merged_microbatches: Annotated[int, AT_LEAST_1] = 1  # whose weight gradients are one product
    logits_slices: Annotated[int, AT_LEAST_1] = 1  # of tokens: their logits exist one by one
    split_backward: bool = True  # delay a pipeline's weight gradients; False: full backwards
    placement: Placement | Auto = "auto"  # which ranks share a node
    compile: bool = False  # torch.compile every block
