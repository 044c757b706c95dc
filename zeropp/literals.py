"""The closed lists of words that plans, costs and the engine share. A leaf: it imports nothing."""

from typing import Literal

Auto = Literal["auto"]
Axis = Literal["tp", "pp", "shard", "replicate"]
Placement = Literal["dp_inner", "pp_inner"]
Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
ReduceEvery = Literal["unit", "step"]
WireType = Literal["fp32", "bf16"]
