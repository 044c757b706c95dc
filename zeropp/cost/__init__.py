"""The cost model: FLOPs, bytes, durations and memory; all formulas are here. Imports no torch.

In: a SizedPlan (or a Plan, which is one) and a Cluster. Out: ``price_plan`` gives everything that
the simulator needs: the seconds of every stage's forward, backward, gathers, reductions and
transfers, the seconds after the last microbatch, and bytes by kind. ``compute_limit`` gives the
throughput of the model's kernels alone, with which every plan is compared.
``model_flops_per_token`` is what MFU counts.

Read in this order, from the smallest formula to the whole price:

* ``kernels``: seconds of one matrix product and of one pass over memory on a device.
* ``flops``: parameters and FLOPs of a model's pieces.
* ``blocks``: seconds of one block's forward, input gradient and weight gradient.
* ``traffic``: bytes that element-wise kernels and the loss read and write.
* ``compute_limit``: tokens per second and GPU if only those kernels took time.
* ``collectives``: seconds of collectives and messages between the ranks of a layout.
* ``activations``, ``state_memory`` and ``stage_memory``: bytes of a microbatch's tensors, of a
  stage's parameters and gradients, and of the whole stage.
* ``cuts`` and ``half_cuts``: stages of equal work, cut between blocks or also inside them.
* ``tensor_parallel`` and ``data_parallel``: what a stage's parallelism adds to its kernels.
* ``alike``: which stages have the same price, so that one of them is priced for all.
* ``stage_costs``: ``price_plan``, which puts them together; ``plan_price`` is its result's type.
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
