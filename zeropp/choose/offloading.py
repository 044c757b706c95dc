"""How many blocks of every rank wait in the host's memory: the fewest with which a plan fits, as
the link then has the least to carry.

Where their number is open, a family that offloads has all of its blocks there: if it does not fit
so, no member does. A member has the fewest with which its least bytes fit, and if it does not fit
after all, a few more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Generic, cast

from zeropp.choose.bounds import least_bytes
from zeropp.choose.contender import Contender
from zeropp.choose.task import Candidate, K, Task
from zeropp.price import StepBytes
from zeropp.price.peak_memory import TOO_MANY
from zeropp.schedule.plan import SizedPlan

Sized = tuple[Candidate[K], SizedPlan, StepBytes]
_FEW = 32  # a plan that does not fit offloads more by one part in this number


def offloads_some(asked: K, candidate: Candidate[K]) -> bool:
    """Whether a candidate offloads blocks whose number was not ``asked`` for."""
    return getattr(asked, "offload_blocks", None) == "auto" and blocks_of(candidate) > 0


@dataclass(frozen=True, kw_only=True)
class Offloading(Generic[K]):
    """Candidates of a task with other numbers of offloaded blocks."""

    task: Task
    contender: Contender[K]
    _known: dict[Candidate[K], Sized[K]] = field(default_factory=dict)  # the fewest

    def sized(self, candidate: Candidate[K], blocks: int) -> Sized[K]:
        """The candidate with ``blocks`` offloaded blocks, its plan and what that holds."""
        knobs = replace(cast("Any", candidate.knobs), offload_blocks=blocks)
        plan = self.contender.size(self.task, knobs, candidate.microbatch_size)
        held = self.contender.prices.memory(plan, self.task.cluster)
        return replace(candidate, knobs=knobs), plan, held

    def fewest(self, candidate: Candidate[K]) -> Sized[K]:
        """The candidate with the fewest blocks, one at least, with which it may fit; with all of
        its own if it fits with no number."""
        if candidate not in self._known:
            self._known[candidate] = self._fewest(candidate)
        return self._known[candidate]

    def _fewest(self, candidate: Candidate[K]) -> Sized[K]:
        few, enough = 1, blocks_of(candidate)
        best = self.sized(candidate, enough)
        if (under := self._over(best)) > 0:
            return best
        if (over := self._over(one := self.sized(candidate, few))) <= 0:
            return one
        while enough - few > 1:  # bytes fall about evenly, so that this ends soon
            share = over / (over - under) if under < 0 else 0.5  # 0: the host is too small
            middle = min(max(few + ceil(share * (enough - few)), few + 1), enough - 1)
            tried = self.sized(candidate, middle)
            if (bytes_ := self._over(tried)) <= 0:
                enough, under, best = middle, bytes_, tried
            else:
                few, over = middle, bytes_
        return best

    def more(
        self, candidate: Candidate[K], plan: SizedPlan, held: StepBytes, over: int
    ) -> Sized[K] | None:
        """A candidate that does not fit after all, by ``over`` bytes if that is known, with a few
        more blocks; None if it has all."""
        blocks = blocks_of(candidate)
        sent = zip(held.memory, plan.offloaded_per_stage, strict=True)
        of_block = max(of.sent // count for of, count in sent if count)
        # The microbatches of a chunk that a rank may hold: in a pipeline those of two units.
        of_unit = plan.schedule.unit if plan.activation_cap or plan.layout.pp > 1 else 1
        together = of_unit * (1 + (plan.layout.pp > 1))
        few = max(1 + blocks // _FEW, over // (together * of_block))
        sized = self.sized(candidate, blocks + few)
        return sized if sized[1].offloaded_per_stage != plan.offloaded_per_stage else None

    def _over(self, sized: Sized[K]) -> int:
        """The bytes of a device by which a plan does not fit; 0 if the host has too few."""
        held = least_bytes(*sized[1:])
        return 0 if held == TOO_MANY else held - self.task.limit_bytes


def blocks_of(candidate: Candidate[K]) -> int:
    """The number of blocks that a candidate offloads."""
    return cast("int", cast("Any", candidate.knobs).offload_blocks)
