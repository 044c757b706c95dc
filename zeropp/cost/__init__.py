"""The cost model: FLOPs, bytes, durations and memory; all formulas are here. Imports no torch.

In: a SizedPlan (or a Plan, which is one) and a Cluster. Out: ``price_plan`` gives everything that
the simulator needs: the seconds of every stage's forward, backward, gathers, reductions and
transfers, the seconds after the last microbatch, and bytes by kind. ``compute_limit`` gives the
throughput of the model's kernels alone, with which every plan is compared.
``model_flops_per_token`` is what MFU counts.

Read in this order, from the smallest formula to the whole price:

* ``kernels``: seconds of one matrix product, of one pass over memory, and of one piece's forward,
  input gradient and weight gradient.
* ``flops``: parameters and FLOPs of a model's pieces.
* ``communication``: seconds of collectives and messages, and what tensor and data parallelism add
  to a stage.
* ``memory``: bytes of a microbatch's tensors, of a stage's parameters and gradients, and of the
  whole stage.
* ``cuts``: stages of equal work, cut between blocks or also inside them.
* ``price``: ``price_plan``, which puts them together, and the compute limit; ``plan_price`` is the
  type of a price.
"""

from zeropp.cost.cuts import cut_by_cost
from zeropp.cost.flops import balanced_cuts, cut_by_weight, model_flops_per_token, parameter_count
from zeropp.cost.plan_price import PlanPrice, StageExtras, StageMemory, StepBytes, StepTimes
from zeropp.cost.price import (
    ComputeLimit,
    compute_limit,
    pass_times,
    plan_bytes,
    price_plan,
    time_plan,
)

__all__ = [
    "ComputeLimit",
    "PlanPrice",
    "StageExtras",
    "StageMemory",
    "StepBytes",
    "StepTimes",
    "balanced_cuts",
    "compute_limit",
    "cut_by_cost",
    "cut_by_weight",
    "model_flops_per_token",
    "parameter_count",
    "pass_times",
    "plan_bytes",
    "price_plan",
    "time_plan",
]
