"""What can be set of ZeroPP. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.literals import Auto, Placement, Recompute, ReduceEvery, StageStyle, WireType
from zeropp.ranges import AT_LEAST_0, AT_LEAST_1, MORE_THAN_0


@dataclass(frozen=True)
class ZeroppKnobs:
    """``auto`` is chosen by the tuner; where the cluster has no prices, by a simple rule."""

    name: Literal["zeropp"] = "zeropp"
    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks of a ZeRO-3 group
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # data-parallel copies of the groups
    replicate_zero: Literal[0, 1] | Auto = "auto"  # 1: optimizer sharded over the copies (ZeRO-1)
    chunks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # model chunks per rank (V)
    unit: Annotated[int | Auto, AT_LEAST_1] = "auto"  # microbatches per scheduling unit (U)
    activation_cap: Annotated[int | Auto, AT_LEAST_1] = "auto"  # live chunk-activations per rank
    activation_cap_gib: Annotated[float | Auto, MORE_THAN_0] = "auto"  # the same cap by its size
    recompute: Recompute | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # per stage, its first ones
    reduce_every: ReduceEvery | Auto = "auto"  # when gradients are reduced over the shards
    replicate_every: ReduceEvery = "step"  # and, at most as often, over the replicas
    reduce_dtype: WireType = "fp32"  # in which gradients are sent; they are summed in fp32
    prefetch: Annotated[int, AT_LEAST_0] = 1  # chunks gathered ahead of their use
    keep: Annotated[int | Auto, AT_LEAST_0] = "auto"  # chunks that may stay gathered between uses
    # How stages are dealt out. A v needs fewer activations; it won in no cell that was tried, so
    # the tuner looks at it only where it is asked to, with auto.
    stage_style: StageStyle | Auto = "loop"
    split_blocks: bool | Auto = "auto"  # a stage may end inside a block; auto: where it is searched
    split_backward: bool = True  # weight gradients are put off; False: full backwards
    placement: Placement | Auto = "auto"  # which ranks share a node
    compile: bool = False  # torch.compile each block

    @property
    def is_open(self) -> bool:
        """Whether a knob is left for the tuner to choose; the cap may be given in either way. Where
        all else is given, ``split_blocks`` is no reason to search."""
        cap = {self.activation_cap, self.activation_cap_gib} == {"auto"}
        settled = "recompute_blocks" if self.recompute == "none" else "split_blocks"
        closed = ("activation_cap", "split_blocks", settled)
        others = {k: v for k, v in vars(self).items() if not k.startswith(closed)}
        return cap or "auto" in others.values()

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
