"""The time that a microbatch takes from stage to stage if it waits for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from zeropp.cost import StepTimes
from zeropp.plan import SizedPlan

_SPLIT = frozenset({"zeropp", "zb_h1", "interleaved_zb", "zbv", "dualpipev"})


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds of a microbatch that waits for nothing. Lists have one entry per stage; ``backward``
    is a full backward if weight gradients do not wait, and otherwise an input gradient."""

    to: list[float]  # from the step's start to the stage
    back: list[float]  # from the end of its backward at the stage to that at stage 0
    turn: float  # from the step's start to the end of its last forward
    forward: list[float]
    backward: list[float]
    weight: list[float]  # weight gradients that wait

    @property
    def last_weight(self) -> float:
        """The weight gradient that stage 0 makes after its last input gradient."""
        return self.weight[0]

    def held(self, stage: int) -> float:
        """The least time from the start of a forward at a stage to the end of its weight gradient:
        through the last stage and back."""
        there_and_back = (
            self.turn - self.to[stage] + self.backward[-1] + self.back[-1] - self.back[stage]
        )
        return there_and_back + self.weight[stage]

    @classmethod
    def of(cls, plan: SizedPlan, price: StepTimes) -> Latency:
        """The latencies of a priced plan."""
        ranks, split, costs = plan.schedule.stage_rank, splits(plan), price.stages
        forward = [cost.forward for cost in costs]
        backward = [c.backward_input + (0.0 if split else c.backward_weight) for c in costs]
        weight = [c.backward_weight if split else 0.0 for c in costs]
        to, back = [first_gather_s(plan, price, 0)], [0.0]
        for stage, (here, there) in enumerate(pairwise(ranks)):
            hop = costs[stage].transfer if here != there else 0.0
            to.append(to[-1] + forward[stage] + hop)
            back.append(back[-1] + hop + backward[stage])
        return cls(
            to=to,
            back=back,
            turn=to[-1] + forward[-1],
            forward=forward,
            backward=backward,
            weight=weight,
        )


def splits(plan: SizedPlan) -> bool:
    """Whether input gradients do not wait for weight gradients."""
    return plan.schedule.name in _SPLIT and plan.split_backward


def first_gather_s(plan: SizedPlan, price: StepTimes, stage: int) -> float:
    """The least seconds until a stage can be used for the first time."""
    return price.stages[stage].unshard if plan.layout.shard > 1 else 0.0
