"""Contender: everything that the tuner, the launchers and the report need to know of one way to
train. Each contender's folder makes one; ``benchmarks.specification.contenders`` lists them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, cast

from zeropp.choose.planner import fastest
from zeropp.choose.space import Space, points
from zeropp.choose.task import Candidate, K, Knobs, Task
from zeropp.engine.ranks.cuda_settings import CUDA_SETTINGS
from zeropp.price import PlanPrice, StepBytes, StepTimes, pass_times, plan_bytes, time_plan
from zeropp.price.cluster import Cluster
from zeropp.price.programs import program_named, sent_bytes
from zeropp.price.simulator import SimResult
from zeropp.schedule.plan import Draft, Plan, SizedPlan, TooLarge
from zeropp.schedule.program import StageCost
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Precision, Settings, WireType
from zeropp.types.training import OptimizerConfig, Trainer

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# The knobs of offload of all contenders, with what switches it off.
WITHOUT_OFFLOAD = {"offload_blocks": 0, "offload_modules": "none", "cpu_checkpointing": False}


def any_auto(knobs: Knobs) -> bool:
    """Whether any knob is ``auto``, so that the tuner has something to choose.

    The number of recomputed blocks counts only if there is recomputation. That of offloaded ones,
    and how chunks share buffers, are chosen only where another knob is.
    """
    settled = {*WITHOUT_OFFLOAD, "gradient_parts", "prefetch", "merged_microbatches"}
    settled |= {"recompute_blocks"} if getattr(knobs, "recompute", "none") == "none" else set()
    return any(value == "auto" for name, value in vars(knobs).items() if name not in settled)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Where the durations and bytes of plans come from; by default, from the cost model.

    ``passes`` gives the seconds of every stage's forward, input gradient and weight gradient, which
    are cheaper to find than all ``times``; the search uses them for its first bound alone.
    """

    passes: Callable[[SizedPlan, Cluster], Sequence[tuple[float, float, float]]] = pass_times
    times: Callable[[SizedPlan, Cluster], StepTimes] = time_plan
    memory: Callable[[SizedPlan, Cluster], StepBytes] = plan_bytes

    def of(self, plan: SizedPlan, cluster: Cluster) -> PlanPrice:
        """The whole price of a plan."""
        return PlanPrice(**vars(self.times(plan, cluster)), **vars(self.memory(plan, cluster)))


@dataclass(frozen=True, kw_only=True)
class Contender(Generic[K]):
    """One way to train. ``trainer``, ``filler`` and ``emulation`` are given as ``module:name`` of
    what is called. They are imported on first use, so that nothing here imports torch.

    ``size`` makes a candidate's plan with all sizes, but without an order of actions; the cost
    model needs no more. It fills in knobs that are ``auto`` by simple rules, and raises
    InfeasibleError with one line. ``orders`` yields the orders of actions among which the simulator
    chooses: the first is made without the durations of the plan's price, and others are made only
    when they are asked for (``planner.one_order``, ``zeropp.schedule.step_plan.drafts``).
    ``check`` raises ScheduleError for a schedule that cannot run. ``runs_with``: the only values
    with which the trainer runs some knobs; others have a price alone. ``search_effort`` tells how
    long a search takes in comparison with the others, so that the longest can begin first.
    """

    name: str
    label: str  # its name in tables and figures
    knobs: type[K]
    size: Callable[[Task, K, int], SizedPlan]  # task, knobs, microbatch size
    orders: Callable[[SizedPlan, Sequence[StageCost] | None, TooLarge | None], Iterator[Draft]]
    space: Space[K]
    check: Callable[[Plan], None] = Plan.check
    prices: Prices = Prices()
    search_effort: int = 0
    caveat: str = ""  # what readers of its simulated numbers must know, as one sentence
    trainer: str = ""  # empty: it can be priced, but not run
    # Whether a row of the verdict's comparison has its plans, if it runs (``COMPARED`` in
    # ``benchmarks.specification.contenders``).
    in_verdict: bool = True
    # Knobs, fp32 by default, with which its own configuration lets users choose 16 bits as the type
    # in which gradients are added or sent, and the types that its documents recommend.
    gradient_types: Mapping[str, WireType] = field(default_factory=dict)
    # The entries of conf/program as which its published runs are priced.
    published_as: tuple[str, ...] = ()
    # Modules that a step of the trainer imports late. Ranks on CPUs are forked from a process that
    # has imported them; names that the installed version does not have are ignored.
    late_imports: tuple[str, ...] = ()
    # (module, this project's extra that installs it): what the trainer imports beside the suite's.
    extra: tuple[str, str] | None = None
    runs_with: Mapping[str, object] = field(default_factory=dict)
    # Variables that its ranks set before CUDA starts, whatever a sweep or its job has set.
    environment: Mapping[str, str] = field(default_factory=CUDA_SETTINGS.copy)
    unrecorded: str = ""  # communication that its runtime starts itself, so no span shows it
    # Whether dropout masks depend only on step, microbatch and piece, so that one process can draw
    # the same (zeropp/engine/layers/chunk.py).
    reproduces_dropout: bool = False
    filler: str = ""  # fills messages of integers to a rank without peers; empty: with ones
    emulation: str = ""  # what runs otherwise on an emulated device; empty: nothing

    def types_as(self, settings: Settings, precision: Precision) -> dict[str, WireType]:
        """The types of gradients as its users run it, or equal to those of all others."""
        if settings == "users" and precision != "fp32":
            return dict(self.gradient_types)
        return dict.fromkeys(self.gradient_types, "fp32")

    def as_run(self, knobs: K) -> K:
        """The knobs with what the trainer runs for those that are ``auto``. Raises InfeasibleError
        for a value that has a price alone."""
        for name, value in self.runs_with.items():
            if (asked := getattr(knobs, name)) not in ("auto", value):
                raise InfeasibleError(
                    f"contender.{name}={asked}: contender={self.name} has it in simulation alone "
                    f"(launcher=simulate, zeropp tune, zeropp explain); to run it, use {value}"
                )
        return replace(cast("Any", knobs), **self.runs_with)  # type: ignore[no-any-return]

    def runs(self, knobs: K) -> bool:
        """Whether there is a trainer, and runs with these knobs."""
        with suppress(InfeasibleError):
            return bool(self.trainer and self.as_run(knobs))
        return False

    def plan(self, task: Task, candidate: Candidate[K]) -> Plan:
        """The plan of a candidate, with the order that the simulator finds fastest, checked. Raises
        InfeasibleError if there is none."""
        plan = self.simulated(task, candidate).plan
        self.check(plan)
        return plan

    def simulated(self, task: Task, candidate: Candidate[K]) -> SimResult:
        """The simulated step of a candidate, in its fastest order that fits the device's memory (in
        its fastest if none fits)."""
        sized = self.size(task, candidate.knobs, candidate.microbatch_size)
        price = self.prices.of(sized, task.cluster)
        return fastest(self.plans(sized, price), task.cluster, price, task.limit_bytes)

    def plans(self, sized: SizedPlan, price: PlanPrice) -> Iterator[Plan]:
        """The plan with each of its orders, completed."""
        return (draft.complete() for draft in self.orders(sized, price.stages, None))

    def candidates(
        self, task: Task, asked: K | None = None
    ) -> Iterator[tuple[Candidate[K], SizedPlan]]:
        """Everything that a search may try within ``asked`` (by default, all knobs are open), with
        its plan without an order of actions."""
        asked = asked or self.knobs()
        for point, size in points(task, self.space, asked, "auto", rejected=Counter()):
            for family in self.space.families(point):
                for plan in self._sized(task, family, size):
                    for knobs in self.space.members(asked, family, plan):
                        for member in self._sized(task, knobs, size):
                            yield Candidate(knobs, size), member

    def _sized(self, task: Task, knobs: K, microbatch_size: int) -> Iterator[SizedPlan]:
        """The plan without an order of actions, if there is one."""
        with suppress(InfeasibleError):
            yield self.size(task, knobs, microbatch_size)

    def missing(self, precision: Precision) -> str:
        """One line if what the trainer imports is not installed here, otherwise empty."""
        needed = {f"contender={self.name}": self.extra}
        if precision == "fp8":
            needed["precision=fp8"] = ("torchao", "fp8")
        for what, extra in needed.items():
            if extra and importlib.util.find_spec(extra[0]) is None:
                return (
                    f"{what}: {extra[0]} is not installed here (run pip install -e '.[{extra[1]}]')"
                )
        return ""

    def build(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> Trainer:
        """Build this rank's trainer. All ranks must call it after torch.distributed is
        initialised. Raises RuntimeError with one line if something is not installed."""
        if missing := self.missing(plan.precision):
            raise RuntimeError(missing)
        return cast("Trainer", _load(self.trainer)(plan, optimizer, device, seed))

    def fill_integers(self, plan: Plan, message: Tensor) -> None:
        """Fill a received message of integers as a peer would have. Without a ``filler`` it gets
        ones, which for torch's pipeline stages mean that the neighbour knows the shapes."""
        if self.filler:
            _load(self.filler)(plan, message)
        else:
            message.fill_(1)

    def stand_ins(self, device: object) -> Iterable[tuple[Any, str, Any]]:
        """What runs otherwise on a device of ``zeropp.emulate``: owners, names and stand-ins."""
        return _load(self.emulation)(device) if self.emulation else ()


def _load(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), function))


def describe(plan: SizedPlan) -> str:
    """The degrees and knobs of a plan as short text, such as
    ``pp=4 shard=16 b=1 m=32 zeropp V=2 U=8 cap=16 reduce=unit``. Two plans of one contender have
    the same text only where they are the same plan."""
    layout, order, program = plan.layout, plan.schedule, program_named(plan.program)
    degrees = [(k, getattr(layout, k)) for k in ("pp", "tp", "context", "shard", "replicate")]
    words = [f"{name}={degree}" for name, degree in degrees if degree > 1] or ["one GPU"]
    words += [f"b={plan.microbatch_size}", f"m={plan.num_microbatches}", order.name]
    if 1 < layout.chunks < plan.shape.num_pieces:  # FSDP's stages are all pieces
        words.append(f"V={layout.chunks}")
    if plan.activation_cap:
        words.append(f"U={order.unit} cap={plan.activation_cap} reduce={plan.reduce_every}")
    elif order.name == "accumulation" and plan.reduce_every == "unit":
        words.append("reduce=microbatch")
    words += [f"zero{layout.replicate_zero}"] * (layout.replicate_zero > 0)
    words += ["sp"] * layout.sequence_parallel
    words += [f"{layout.exchange} exchanged"] * (layout.context > 1)
    if order.name == "zeropp" and layout.pp > 1 and not plan.split_backward:
        words.append("full backwards")
    if layout.placement == "pp_inner":
        words.append("pp inside the node")
    words += ["compiled"] * plan.compile
    state = program.state(plan.precision)
    words += ["sums=bf16"] * (plan.sum_dtype == "bf16")
    words += ["sent=bf16"] * (sent_bytes(plan, program) == 2)
    sizes = {"bucket": state.bucket or program.updated_bucket}  # elements
    if program.zero_hpz_partition_size > 1:
        words.append(f"hpz={program.zero_hpz_partition_size}")
    if program.live_parameters:
        ahead = {"live": program.live_parameters, "together": program.gathered_together}
        sizes |= {**ahead, "persistent": program.persistent}
    words += [f"{name}={size / 1e6:g}M" for name, size in sizes.items() if size]
    words += ["to owners"] * (layout.pp > 1 and state.bucket > 0 and not state.zero1_all_reduces)
    words += ["kept after forwards"] * (not program.reshard_after_forward)
    words += ["kept after backwards"] * (not program.reshard_after_backward)
    words += [f"gradients in {plan.gradient_parts} parts"] * (plan.gradient_parts > 1)
    words += [f"prefetch={plan.prefetch}"] * (plan.prefetch != 1)
    merged = plan.merged_microbatches
    words += [f"weight gradients of {merged} microbatches in one product"] * (merged > 1)
    words += [f"logits in {plan.logits_slices} slices"] * (plan.logits_slices > 1)
    if plan.recompute != "none":
        words.append(f"{plan.recompute} recompute")
        if plan.recomputed and layout.chunks == plan.shape.num_pieces:  # every piece is a stage
            words.append(f"of {sum(plan.recomputed)} blocks")
        elif plan.recomputed:
            words.append(_recomputed(plan))
    if plan.offload_blocks:
        part = "" if plan.offloads == "all" else f"{plan.offloads} of "
        words.append(f"{part}{plan.offload_blocks} blocks per rank offloaded")
    return " ".join(words)


def _recomputed(plan: SizedPlan) -> str:
    count = max(plan.recomputed_per_stage)
    if plan.recomputed_per_stage == tuple(min(blocks, count) for blocks in plan.blocks):
        return f"of {count} blocks per stage"
    of_ranks = [0] * plan.schedule.num_ranks
    for rank, blocks in zip(plan.schedule.stage_rank, plan.recomputed_per_stage, strict=True):
        of_ranks[rank] += blocks
    return f"of {max(of_ranks)} blocks per rank"


def overrides(candidate: Candidate[K]) -> list[str]:
    """The words for the command line of ``benchmarks.run`` that set exactly this candidate; knobs
    at their defaults are left out."""
    knobs: dict[str, Any] = asdict(candidate.knobs)  # type: ignore[call-overload]
    default = vars(type(candidate.knobs)())
    words = [f"contender={knobs.pop('name')}", f"microbatch_size={candidate.microbatch_size}"]
    for name, value in knobs.items():
        if value != default[name]:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words.append(f"contender.{name}={text}")
    return words
