"""The values that knobs and plans may have where there is a fixed choice. This module imports
nothing of this project.
"""

from typing import Literal, TypeVar

Auto = Literal["auto"]
BlockHalf = Literal["attention", "mlp"]  # each with its norm and its residual add
Axis = Literal["tp", "pp", "shard", "replicate"]
Placement = Literal["dp_inner", "pp_inner"]  # how ranks are numbered; see ``Layout``
Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
ReduceEvery = Literal["unit", "step"]  # how often gradients are reduced
LossReduction = Literal["mean", "sum"]  # what a loss function does over its batch
WireType = Literal["fp32", "bf16"]  # the type in which gradients are sent
ReplicateZero = Literal[0, 1]
StageStyle = Literal["loop", "v"]  # how stages are assigned to ranks, in torch's words

T = TypeVar("T")


def if_auto(asked: T | Auto, otherwise: T) -> T:
    """``asked`` itself, or ``otherwise`` if it is ``auto``."""
    return otherwise if asked == "auto" else asked
