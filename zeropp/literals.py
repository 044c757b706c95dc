"""The closed lists of words that plans, costs and the engine share. A leaf: it imports nothing."""

from typing import Literal, TypeVar

Auto = Literal["auto"]
BlockHalf = Literal["attention", "mlp"]  # each with its norm and its residual add
Axis = Literal["tp", "pp", "shard", "replicate"]
Placement = Literal["dp_inner", "pp_inner"]
Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
ReduceEvery = Literal["unit", "step"]
LossReduction = Literal["mean", "sum"]
WireType = Literal["fp32", "bf16"]
ReplicateZero = Literal[0, 1]
StageStyle = Literal["loop", "v"]  # torch's words for how stages are dealt out to ranks

T = TypeVar("T")


def if_auto(asked: T | Auto, otherwise: T) -> T:
    """What was asked for, or ``otherwise`` where it was left open."""
    return otherwise if asked == "auto" else asked
