"""Why a step takes longer than the compute limit, by kinds that add up exactly.

The causes are taken away one after the other, in the order of ``_CAUSES``: what the step is
shorter after a cause is gone, with those before it gone already, is that cause's loss. So each
second is counted once, where causes hide behind each other under the one that goes last. What
remains is compute alone: the busiest rank against the mean of all ranks is the imbalance, the
mean's recomputation and unfused accumulation are known, and the rest above the limit is what
smaller or slower kernels take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from zeropp.cost.plan_price import PlanPrice, StageExtras
from zeropp.plan import Plan
from zeropp.schedule.program import StageCost

_Change = Callable[[StageCost, StageExtras], StageCost]


@dataclass(frozen=True)
class Losses:
    """Seconds of a step by cause; with the limit they add up to the step.

    Only ``small_kernels`` can be negative: where a program's kernels are better than those of the
    limit, by tensor parallelism or by a microbatch that fits thanks to recomputation.
    """

    limit: float  # the model's kernels alone, at their best microbatch
    small_kernels: float  # the same kernels at this microbatch and tensor-parallel degree
    recomputation: float
    imbalance: float  # the busiest rank's compute above the mean of all ranks
    bubble: float  # the busiest rank waits for other ranks
    slow_nodes: float  # every rank waits for the slowest node
    copies: float  # to and from the collectives' buffers; gradients added outside their product
    tensor: float  # tensor-parallel collectives
    transfers: float  # boundaries between stages
    reductions: float  # gradients over shards and replicas, and what they slow beside them
    gathers: float  # parameters over shards, ZeRO-1's updated ones, and what they slow
    optimizer: float  # its step, the norm, tied embeddings, host work

    @property
    def step_s(self) -> float:
        """The step: the sum of all kinds, the limit among them."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """Seconds by kind, from the limit outwards."""
        return asdict(self)


def losses_of(plan: Plan, price: PlanPrice, step_of: Callable[[PlanPrice], float]) -> Losses:
    """Take a step apart. ``step_of`` gives the plan's step (seconds) on a changed price; it is
    called once per cause."""
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
    return Losses(
        limit=price.limit_s,
        small_kernels=mean - recomputation - price.limit_s,
        recomputation=recomputation,
        imbalance=busiest - mean,
        bubble=before - busiest,
        **lost,
    )


def _without_optimizer(price: PlanPrice) -> PlanPrice:
    return replace(price, finish_s=(0.0,) * len(price.finish_s))


def _without_gathers(price: PlanPrice) -> PlanPrice:
    price = replace(price, gather_updated_s=(0.0,) * len(price.gather_updated_s))
    return _changed(price, lambda cost, _: replace(cost, unshard=0.0))


def _without_reductions(price: PlanPrice) -> PlanPrice:
    price = replace(price, replica_s=(0.0,) * len(price.replica_s))
    return _changed(price, lambda cost, _: replace(cost, reduce_grad=0.0))


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
    none = {"tensor_forward": 0.0, "tensor_backward": 0.0}
    return replace(price, extras=tuple(replace(extras, **none) for extras in price.extras))


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
    """A duration without a part of it; where traced durations replaced the model's, the part may
    be longer than the whole."""
    return max(0.0, duration - part)


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
