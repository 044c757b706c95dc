"""The entries of a search's queue: families, and their members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, NamedTuple

from zeropp.cost import PlanPrice, StepBytes, StepTimes
from zeropp.plan import Candidate, K, SizedPlan


def adds_later(plan: SizedPlan) -> tuple[bool, bool]:
    """Whether reduced gradients are added to those of earlier units: over the shards, and over the
    replicas. It is the one thing besides the family on which the price of a member depends."""
    several = plan.num_units > 1
    return several and plan.reduce_every == "unit", several and plan.replicate_every == "unit"


class Member(NamedTuple, Generic[K]):
    """A member of a family that may fit into memory."""

    candidate: Candidate[K]
    plan: SizedPlan
    held: StepBytes


@dataclass(frozen=True, eq=False, slots=True)
class Entry(Generic[K]):
    """An entry of the queue: a family with the bound of its compute, a family with its durations,
    or a member with its price."""

    bound_s: float
    number: int  # unique
    candidate: Candidate[K]
    alike: object  # the same for families that differ only in how data-parallel ranks are used
    _: KW_ONLY
    plan: SizedPlan | None = None  # None: not sized yet
    times: StepTimes | None = None
    members: Iterable[Member[K]] = ()  # of a family with its durations; read once
    price: PlanPrice | None = None  # of a member

    def __lt__(self, other: Entry[K]) -> bool:
        """Whether this entry comes first: the one with the lower bound, or the older one."""
        return (self.bound_s, self.number) < (other.bound_s, other.number)
