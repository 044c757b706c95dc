"""Why a step takes longer than the compute limit, by causes that add up exactly.

The causes are removed one after the other, in the order of ``_CAUSES``; the time by which the step
becomes shorter is that cause's loss. So each second is counted once; where causes overlap, it is
counted for the one that is removed last. In the end only compute remains. The busiest rank's time
above the mean of all ranks is the imbalance; the mean's recomputation and unfused accumulation are
known; the rest above the limit is due to smaller or slower kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from zeropp.price.plan_price import PlanPrice, StageExtras
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import StageCost

_Change = Callable[[StageCost, StageExtras], StageCost]


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
    copies: float  # into and out of collectives' buffers; gradients added outside their product
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
    for kind, taken_away in _CAUSES.items():
        price = taken_away(price)
        after = step_of(price)
        lost[kind] = before - after
        before = after
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


def _without_optimizer(price: PlanPrice) -> PlanPrice:
    return _changed(price, lambda cost, _: replace(cost, reduce_tied=0.0, update=0.0))


def _without_gathers(price: PlanPrice) -> PlanPrice:
    return _changed(
        price,
        lambda cost, _: replace(cost, unshard=0.0, gather_whole=0.0, gather_updated=0.0),
    )


def _without_reductions(price: PlanPrice) -> PlanPrice:
    price = _changed(
        price,
        lambda cost, extras: replace(
            cost,
            reduce_grad=0.0,
            reduce_replicas=0.0,
            backward_weight=_less(cost.backward_weight, extras.reductions),
        ),
    )
    return _with_extras(price, hidden_replicas=0.0)


def _without_transfers(price: PlanPrice) -> PlanPrice:
    return _changed(
        price,
        lambda cost, extras: replace(
            cost,
            transfer=0.0,
            forward=_less(cost.forward, extras.transfer_forward),
            backward_input=_less(cost.backward_input, extras.transfer_backward),
        ),
    )


def _without_tensor(price: PlanPrice) -> PlanPrice:
    price = _changed(
        price,
        lambda cost, extras: replace(
            cost,
            forward=_less(cost.forward, extras.tensor_forward),
            backward_input=_less(cost.backward_input, extras.tensor_backward),
        ),
    )
    return _with_extras(price, tensor_forward=0.0, tensor_backward=0.0)


def _without_copies(price: PlanPrice) -> PlanPrice:
    return _changed(
        price,
        lambda cost, extras: replace(
            cost,
            copy_in=0.0,
            copy_out=0.0,
            backward_weight=_less(cost.backward_weight, extras.accumulation),
        ),
    )


def _without_slow_nodes(price: PlanPrice) -> PlanPrice:
    return replace(price, stragglers=1.0)


def _less(duration: float, part: float) -> float:
    """A duration without a part of it, at least 0: if traced durations replace the model's, the
    part may be longer than the whole."""
    return max(0.0, duration - part)


def _with_extras(price: PlanPrice, **seconds: float) -> PlanPrice:
    return replace(price, extras=tuple(replace(extras, **seconds) for extras in price.extras))


def _changed(price: PlanPrice, change: _Change) -> PlanPrice:
    return replace(price, stages=tuple(map(change, price.stages, price.extras)))


_CAUSES: dict[str, Callable[[PlanPrice], PlanPrice]] = {
    "optimizer": _without_optimizer,
    "gathers": _without_gathers,
    "reductions": _without_reductions,
    "transfers": _without_transfers,
    "tensor": _without_tensor,
    "copies": _without_copies,
    "slow_nodes": _without_slow_nodes,
}
