"""Contender: what the tuner, the planner's callers, the launchers and the report know of one way
to train. Each contender's folder makes one, and a registry outside this package lists them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, cast

from zeropp.cost import PlanPrice, price_plan
from zeropp.plan import Candidate, K, Knobs, Plan, Task
from zeropp.planner.orders import fastest
from zeropp.schedule import validate
from zeropp.sim.simulator import SimResult
from zeropp.training import OptimizerConfig, Trainer
from zeropp.tune.space import Space

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Dashes = str | tuple[float, tuple[float, ...]]  # as matplotlib takes them


@dataclass(frozen=True)
class Style:
    """How figures draw a contender; hatch, dashes and marker repeat the colour for print."""

    colour: str
    hatch: str
    dashes: Dashes
    marker: str


def any_auto(knobs: Knobs) -> bool:
    """Whether a knob is left for the tuner to choose.

    How many blocks are recomputed is a question only where there is recomputation.
    """
    settled = {"recompute_blocks"} if getattr(knobs, "recompute", "none") == "none" else set()
    return any(value == "auto" for name, value in vars(knobs).items() if name not in settled)


def check_schedule(plan: Plan) -> None:
    """Refuse an illegal or deadlocking schedule, or one over its cap; raises ScheduleError."""
    validate(plan.schedule, activation_cap=plan.activation_cap or None)


@dataclass(frozen=True, kw_only=True)
class Contender(Generic[K]):
    """One way to train. Nothing here imports torch; ``trainer`` and ``filler`` are named as
    ``module:function`` and imported on first use.

    ``size`` gives a candidate's plan without its programs, which is all that the cost model reads;
    it fills in what is ``auto`` by simple rules and raises InfeasibleError in one line. ``order``
    gives that plan with the programs among which the simulator chooses: the first is made without
    durations, the others only when they are asked for. ``check`` refuses a schedule that cannot
    run, and ``left_open`` says whether the tuner has something to choose.
    """

    name: str
    label: str  # in tables and figures
    style: Style
    knobs: type[K]
    size: Callable[[Task, K, int], Plan]  # task, knobs, microbatch size
    order: Callable[[Plan, K, PlanPrice], Iterator[Plan]]
    space: Space[K]
    check: Callable[[Plan], None] = check_schedule
    left_open: Callable[[K], bool] = any_auto
    trainer: str = ""  # empty: it can be priced, and not run
    # Dropout's masks depend on the step, the microbatch and the piece alone (see
    # zeropp/engine/randomness.py), so that one process can draw them, too.
    reproduces_dropout: bool = False
    filler: str = ""  # writes the integers that a lone rank's peers would send, where not all are 1

    def plan(self, task: Task, candidate: Candidate[K]) -> Plan:
        """The plan of a candidate, its order chosen by the simulator and checked; raises
        InfeasibleError where there is none."""
        plan = self.simulated(task, candidate).plan
        self.check(plan)
        return plan

    def simulated(self, task: Task, candidate: Candidate[K]) -> SimResult:
        """The simulated step of a candidate, in the order that is fastest."""
        sized = self.size(task, candidate.knobs, candidate.microbatch_size)
        price = price_plan(sized, task.cluster)
        return fastest(self.order(sized, candidate.knobs, price), task.cluster, price)

    def build(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> Trainer:
        """Build this rank's trainer; collective, after torch.distributed is initialised."""
        return cast("Trainer", _load(self.trainer)(plan, optimizer, device, seed))

    def fill_integers(self, plan: Plan, message: Tensor) -> None:
        """Write into a message of integers what a peer would have sent. The usual one is a yes:
        torch's pipeline stages ask their neighbours whether they know the shapes."""
        if self.filler:
            _load(self.filler)(plan, message)
        else:
            message.fill_(1)


def _load(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), function))
