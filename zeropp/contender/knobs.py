"""The settings of ZeroPP. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.literals import Auto, Placement, Recompute, ReduceEvery, StageStyle, WireType
from zeropp.ranges import AT_LEAST_0, AT_LEAST_1, MORE_THAN_0


@dataclass(frozen=True, kw_only=True)
class ZeroppKnobs:
    """Settings of ZeroPP. A knob that is ``auto`` is chosen by the tuner, or by a simple rule where
    the cluster has no prices (CPUs).

    A *chunk* is what Megatron-LM calls a virtual stage: a rank holds V of them. A *unit* is a group
    of U microbatches that go through a chunk one after another, so that the chunk's parameters are
    gathered once per unit. A *chunk-activation* is what one microbatch leaves behind in one chunk
    for its backward.
    """

    name: Literal["zeropp"] = "zeropp"
    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks of a ZeRO-3 group (dp_shard)
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # number of such groups (dp_replicate)
    replicate_zero: Literal[0, 1] | Auto = "auto"  # 1: ZeRO-1 over the replicas
    chunks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # model chunks per rank (V)
    unit: Annotated[int | Auto, AT_LEAST_1] = "auto"  # microbatches per scheduling unit (U)
    activation_cap: Annotated[int | Auto, AT_LEAST_1] = "auto"  # live chunk-activations per rank
    activation_cap_gib: Annotated[float | Auto, MORE_THAN_0] = "auto"  # the same cap in GiB
    recompute: Recompute | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the first N of every stage
    reduce_every: ReduceEvery | Auto = "auto"  # when gradients are reduced over the shards
    replicate_every: ReduceEvery = "step"  # when over the replicas; at most as often
    reduce_dtype: WireType = "fp32"  # type in which gradients are sent; sums are fp32
    prefetch: Annotated[int, AT_LEAST_0] = 1  # chunks that are gathered ahead of their use
    keep: Annotated[int | Auto, AT_LEAST_0] = "auto"  # chunks that may stay gathered between uses
    # How stages are assigned to ranks. A V needs fewer activations, but it was the fastest in no
    # configuration that was tried, so the tuner tries it only where this knob is auto.
    stage_style: StageStyle | Auto = "loop"
    split_blocks: bool | Auto = "auto"  # a stage may end inside a block; auto: where it is searched
    split_backward: bool = True  # delay weight gradients; False: full backwards
    placement: Placement | Auto = "auto"  # which ranks share a node
    compile: bool = False  # torch.compile every block

    @property
    def is_open(self) -> bool:
        """Whether any knob is left for the tuner to choose. A cap that is given in GiB counts as
        given in chunk-activations, and the other way round. ``split_blocks`` alone is no reason to
        search."""
        cap = {self.activation_cap, self.activation_cap_gib} == {"auto"}
        settled = "recompute_blocks" if self.recompute == "none" else "split_blocks"
        closed = ("activation_cap", "split_blocks", settled)
        others = {k: v for k, v in vars(self).items() if not k.startswith(closed)}
        return cap or "auto" in others.values()

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
