"""What a step takes: FLOPs, bytes, durations and memory, and the simulated step. Imports no torch.

In: a SizedPlan (or a Plan, which is one) and a Cluster. Out: ``price_plan`` gives everything that
the simulator needs: the seconds of every stage's forward, backward, gathers, reductions and
transfers, the seconds after the last microbatch, and bytes by kind. ``compute_limit`` gives the
throughput of the model's kernels alone, with which every plan is compared.
``model_flops_per_token`` is what MFU counts.

Read in this order, from the smallest formula to the whole price:

* ``kernels``: seconds of one matrix product, of one attention, and of one pass over memory.
* ``flops``: parameters and FLOPs of a model's pieces.
* ``pieces``: seconds of one piece's forward, input gradient and weight gradient.
* ``network``: seconds of collectives and messages; ``communication``: what tensor and data
  parallelism add to a stage.
* ``activations``: bytes of a microbatch's tensors; ``memory``: of a stage's parameters and
  gradients, and of the whole stage.
* ``compute_limit``: the throughput of a device if only the model's own kernels took time.
* ``price``: ``price_plan``, which puts them together, and ``cut_by_cost``, stages of equal work;
  ``plan_price`` is the type of a price.
* ``simulator``: ``simulate(plan, cluster)`` prices a plan and runs its programs in the event loop
  (``zeropp.schedule.event_loop``); ``peak_memory`` follows the bytes that a rank holds from action
  to action; ``lost_time`` says why the step takes longer than the compute limit, by causes that
  add up.

``programs`` are its data: what versions of training software do.
"""

from zeropp.price.compute_limit import ComputeLimit, compute_limit
from zeropp.price.flops import balanced_cuts, model_flops_per_token, parameter_count
from zeropp.price.plan_price import PlanPrice, StageExtras, StageMemory, StepBytes, StepTimes
from zeropp.price.price import cut_by_cost, pass_times, plan_bytes, price_plan, time_plan

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
    "model_flops_per_token",
    "parameter_count",
    "pass_times",
    "plan_bytes",
    "price_plan",
    "time_plan",
]
