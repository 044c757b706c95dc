"""Why a step takes longer than the compute limit, by causes that add up exactly.

The causes are removed one after the other, in the order of ``_CAUSES``. The time by which the step
becomes shorter is that cause's loss, so each second is counted once; where causes overlap, it is
counted for the one that is removed last. In the end only compute remains. The busiest rank's time
above the mean of all ranks is the imbalance; the mean's recomputation and unfused accumulation are
known; the rest above the limit is due to smaller or slower kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeropp.price.plan_price import PlanPrice, StageExtras
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import StageCost


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """The seconds of a step by cause; together with the limit they add up to the step.

    Only ``small_kernels`` can be negative: if a program's kernels are faster than those of the
    limit, because of tensor parallelism or of a microbatch that fits only with recomputation.
    """

    limit: float  # the model's own kernels, at the best microbatch
    small_kernels: float  # the same kernels at this microbatch and tensor-parallel degree
    recomputation: float
    imbalance: float  # the busiest rank's compute above the mean of all ranks
    bubble: float  # the busiest rank waits for other ranks
    slow_nodes: float  # every rank waits for the slowest node
    # Into and out of collectives' buffers, and of the host's memory; gradients that are added
    # outside their product.
    copies: float
    tensor: float  # tensor-parallel collectives
    transfers: float  # messages between stages
    reductions: float  # of gradients over shards and replicas, and the compute that they slow
    gathers: float  # of parameters over shards, also ZeRO-1's, and the compute that they slow
    optimizer: float  # its step, the gradient norm, tied embeddings, host work

    @property
    def step_s(self) -> float:
        """The step time: the sum of the limit and all losses."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """The seconds by kind, beginning with the limit."""
        return asdict(self)


def breakdown_of(
    plan: Plan, price: PlanPrice, step_of: Callable[[PlanPrice], float]
) -> TimeBreakdown:
    """Split a step by cause. ``step_of`` gives the plan's step time in seconds for a changed price;
    it is called once per cause."""
    before = step_of(price)
    lost = {}
    for kind, cause in _CAUSES.items():
        price = cause.taken_from(price)
        after = step_of(price)
        lost[kind], before = before - after, after
    ranks = [plan.schedule.stages_of(rank) for rank in range(plan.schedule.num_ranks)]
    busy = [sum(price.stages[s].compute for s in stages) for stages in ranks]
    busiest, mean = (plan.num_microbatches * s for s in (max(busy), sum(busy) / len(busy)))
    again = sum(extras.recomputation for extras in price.extras) / len(ranks)
    recomputation = plan.num_microbatches * again
    return TimeBreakdown(
        limit=price.limit_s,
        small_kernels=mean - recomputation - price.limit_s,
        recomputation=recomputation,
        imbalance=busiest - mean,
        bubble=before - busiest,
        **lost,
    )


@dataclass(frozen=True, kw_only=True)
class _Cause:
    """What is taken out of a price to leave out one cause: whole durations of ``StageCost``, and
    parts of others, which are fields of ``StageExtras``."""

    durations: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)  # by the duration that includes each
    hidden: tuple[str, ...] = ()  # fields of ``StageExtras`` that no duration includes
    stragglers: bool = False  # slow nodes

    def without(self, cost: StageCost, extras: StageExtras) -> StageCost:
        """The durations of a stage without this cause. They are at least 0: if traced durations
        replace the model's, a part may be longer than the whole."""
        left: dict[str, Any] = dict.fromkeys(self.durations, 0.0)
        for duration, part in self.parts.items():
            left[duration] = max(0.0, getattr(cost, duration) - getattr(extras, part))
        return replace(cost, **left)

    def taken_from(self, price: PlanPrice) -> PlanPrice:
        """The price without this cause."""
        gone = dict.fromkeys((*self.parts.values(), *self.hidden), 0.0)
        return replace(
            price,
            stages=tuple(map(self.without, price.stages, price.extras)),
            extras=tuple(replace(extras, **gone) for extras in price.extras),
            stragglers=1.0 if self.stragglers else price.stragglers,
        )


_CAUSES: dict[str, _Cause] = {
    "optimizer": _Cause(durations=("reduce_tied", "update")),
    "gathers": _Cause(
        durations=("unshard", "gather_whole", "gather_updated"), parts={"forward": "gathers"}
    ),
    "reductions": _Cause(
        durations=("reduce_grad", "reduce_replicas"),
        parts={"backward_weight": "reductions"},
        hidden=("hidden_replicas",),
    ),
    "transfers": _Cause(
        durations=("transfer",),
        parts={"forward": "transfer_forward", "backward_input": "transfer_backward"},
    ),
    "tensor": _Cause(parts={"forward": "tensor_forward", "backward_input": "tensor_backward"}),
    "copies": _Cause(
        durations=("copy_in", "copy_out", "store", "load"),
        parts={"backward_weight": "accumulation"},
    ),
    "slow_nodes": _Cause(stragglers=True),
}
