"""FLOPs, bytes, link times and memory: the only home of formulas. Imports no torch.

``price_plan(plan, cluster)`` gives everything that the simulator needs of a plan: seconds of
every stage's passes, gathers, reductions and transfers, of what follows the last microbatch, and
bytes by kind. ``model_flops_per_token`` is what MFU counts.
"""

from zeropp.cost.flops import (
    balanced_cuts,
    cut_by_weight,
    model_flops_per_token,
    parameter_count,
)
from zeropp.cost.plan_price import PlanPrice, StageMemory
from zeropp.cost.stage_costs import price_plan

__all__ = [
    "PlanPrice",
    "StageMemory",
    "balanced_cuts",
    "cut_by_weight",
    "model_flops_per_token",
    "parameter_count",
    "price_plan",
]
