"""The entries of torch's pipelines and of torchtitan in the registry of contenders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Annotated, Literal

from baselines.fsdp import contender as fsdp
from baselines.torch_pp.dualpipev import dualpipev
from zeropp.choose.contender import Contender
from zeropp.choose.planner import (
    check_context,
    check_stages,
    check_tensor_parallel,
    default_chunks,
    one_order,
    recomputed_blocks,
    resolve_degrees,
)
from zeropp.choose.space import (
    SearchPoint,
    Space,
    at_degrees,
    choices,
    chunk_choices,
    one_member,
    placement_choices,
    sequence_choices,
    wire_choices,
)
from zeropp.choose.task import Task
from zeropp.price import cut_by_cost
from zeropp.price.programs import gathers
from zeropp.schedule import lower, validate
from zeropp.schedule.build import build
from zeropp.schedule.passes import add_reductions
from zeropp.schedule.plan import Plan, SizedPlan
from zeropp.schedule.program import (
    COMPUTE,
    Action,
    Op,
    RankProgram,
    Schedule,
    loop_placement,
    unordered,
    v_placement,
)
from zeropp.schedule.torch_runtime import lower_for_torch, with_messages
from zeropp.types.frozen import replace
from zeropp.types.layout import InfeasibleError, Layout, microbatches_per_step
from zeropp.types.literals import AT_LEAST_1, Auto, Placement, Recompute, WireType, if_auto

TorchSchedule = Literal[
    "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev", "zeropp"
]


@dataclass(frozen=True, kw_only=True)
class TorchPPKnobs:
    """Settings of torch's pipelines. A knob that is ``auto`` is chosen by the tuner, or by a simple
    rule where the cluster has no prices (CPUs)."""

    name: Literal["torch_pp"] = "torch_pp"
    tp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # tensor-parallel ranks
    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks of an FSDP2 group (dp_shard)
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # number of such groups (dp_replicate)
    chunks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # virtual stages per rank (V)
    schedule: TorchSchedule | Auto = "auto"
    sequence_parallel: bool | Auto = "auto"
    recompute: Recompute | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the first N of every stage
    placement: Placement | Auto = "auto"  # which ranks share a node
    # Type in which gradients are sent, and in which those of microbatches are added until then.
    reduce_dtype: WireType | Auto = "fp32"
    compile: bool | Auto = "auto"  # torch.compile every block

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True)
class TorchtitanKnobs(TorchPPKnobs):
    """torchtitan has the same degrees and torch's own schedules. It is priced with
    ``torch.compile``, so that its schedules do not split the backward."""

    name: Literal["torchtitan"] = "torchtitan"  # type: ignore[assignment]
    compile: Literal[True] = True
    placement: Literal["dp_inner"] = "dp_inner"  # torchtitan has no key for another
    recompute_blocks: Literal["auto"] = "auto"  # all blocks: it has no key for some
    reduce_dtype: Literal["fp32"] = "fp32"  # ``mixed_precision_reduce`` has no other value
    context: Annotated[int | Auto, AT_LEAST_1] = "auto"  # context_parallel_degree: a ring
    # default: always without a pipeline, and never with one, where always has no price.
    fsdp_reshard_after_forward: Literal["default", "never"] | Auto = "auto"


UNSPLIT: tuple[TorchSchedule, ...] = ("1f1b", "interleaved_1f1b", "looped_bfs")
SPLIT_BACKWARD: tuple[TorchSchedule, ...] = ("interleaved_zb", "zbv", "dualpipev", "zeropp")
SCHEDULES = (*UNSPLIT, *SPLIT_BACKWARD[:-1])  # torch's own; ZeroPP's is tried where it is asked for
_V_SHAPED = ("zbv", "dualpipev")
_FIXED_CHUNKS = {"1f1b": 1, "zbv": 2, "dualpipev": 2}
_ACTIVE_STAGES = 3
# The entry of ``zeropp.price.programs`` that prices each of the two contenders of this folder.
# torchtitan 0.3, components/loss.py, ChunkedLossWrapper: the loss of slices of the tokens.
_PROGRAMS = {"torch_pp": "torch_pp", "torchtitan": "torchtitan_3d+loss_gradient=sliced"}


def size(task: Task, knobs: TorchPPKnobs, microbatch_size: int) -> SizedPlan:
    """A plan of TP x PP x FSDP (x replicas), with all sizes but without an order of actions.

    Simple rules for what is ``auto``: no TP, one stage per node, interleaved 1F1B with two chunks
    per rank where its conditions hold, and otherwise 1F1B. Raises InfeasibleError, whose message is
    one line.
    """
    degrees = resolve_degrees(task, replace(knobs, tp=if_auto(knobs.tp, 1)))
    schedule = if_auto(knobs.schedule, _simple_schedule(task, knobs, degrees, microbatch_size))
    _refuse(knobs, schedule)
    if task.precision == "fp8" and degrees.tp > 1 and knobs.name == "torch_pp":
        raise InfeasibleError(
            f"contender.tp={degrees.tp}: torch PP's layers on DTensors have no products in 8 bits "
            "(use 1, precision=bf16, or contender=torchtitan, which is simulated)",
            "no 8 bits on DTensors",
        )
    layout = replace(
        degrees,
        chunks=if_auto(knobs.chunks, _FIXED_CHUNKS.get(schedule, default_chunks(task, degrees))),
        sequence_parallel=if_auto(knobs.sequence_parallel, False),
        placement=if_auto(knobs.placement, "dp_inner"),
        exchange="ring",
    )
    check_context(task.shape, layout)
    check_stages(task, layout)
    check_tensor_parallel(task.shape, layout)
    if schedule == "zeropp" and layout.shards == 1:
        raise InfeasibleError(
            "contender.shard=1: contender.schedule=zeropp gathers stages over a shard group (use 2 "
            "or more, or contender=zeropp)"
        )
    microbatches = microbatches_per_step(task.global_batch, layout, microbatch_size)
    _check_microbatches(schedule, layout.pp, microbatches)
    place = v_placement(layout.pp) if schedule in _V_SHAPED else None
    placement = place or loop_placement(layout.pp, layout.chunks)
    unit = min(layout.pp, microbatches) if schedule == "zeropp" else microbatches
    sent = fsdp.sent_type(task, knobs.reduce_dtype)
    plan = SizedPlan(
        contender=knobs.name,
        shape=task.shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered(schedule, placement, microbatches, unit),
        cuts=(),
        program=_PROGRAMS[knobs.name],
        precision=task.precision,
        recompute=if_auto(knobs.recompute, "none"),
        recomputed=recomputed_blocks(knobs.recompute_blocks, len(placement)),
        reduce_every="unit" if schedule == "zeropp" else "step",
        reduce_dtype=sent,
        sum_dtype=sent,
        compile=if_auto(knobs.compile, False),
    )
    if isinstance(knobs, TorchtitanKnobs) and layout.pp == 1:
        return _without_pipeline(plan, knobs)
    return replace(plan, cuts=cut_by_cost(plan, task.cluster))


def _without_pipeline(plan: SizedPlan, knobs: TorchtitanKnobs) -> SizedPlan:
    """torchtitan without a pipeline: FSDP2 gathers piece by piece, as in ``baselines.fsdp``."""
    program = f"{plan.program}+torch_stages=false"
    return replace(
        fsdp.by_piece(plan, knobs.recompute_blocks),
        program=fsdp.resharding(program, after_forward=knobs.fsdp_reshard_after_forward != "never"),
        reduce_every="unit",
    )


def programs(plan: SizedPlan) -> Schedule:
    """The programs of a plan: compute, gathers, releases and reductions in the one order of torch's
    schedule class (a test compares the two), or ZeroPP's order as torch's runtime can run it."""
    name, layout = plan.schedule.name, plan.layout
    if name == "accumulation":
        return fsdp.programs(plan)
    return torch_schedule(
        name,
        num_ranks=layout.pp,
        chunks=layout.chunks,
        num_microbatches=plan.num_microbatches,
        gathered=gathers(plan),
    )


@lru_cache(maxsize=128)
def torch_schedule(
    name: str, *, num_ranks: int, chunks: int, num_microbatches: int, gathered: bool
) -> Schedule:
    """The programs of a schedule of torch's, or of ZeroPP's order in torch's runtime; ``gathered``:
    its stages are sharded."""
    compute = _compute(name, num_ranks, chunks, num_microbatches)
    if name == "zeropp":
        return lower_for_torch(compute)
    if name == "1f1b":  # a class of its own, which exchanges messages of both directions at once
        programs = lower(compute, gather=False, reduce_every="step").programs
    else:
        programs = tuple(
            add_reductions(program, num_microbatches, num_microbatches)
            for program in compute.programs
        )
    if gathered:
        programs = tuple(map(with_torch_gathers, programs, compute.programs))
    if name != "1f1b":
        programs = with_messages(programs, compute.stage_rank)
    return replace(compute, programs=programs, pair_streams=name != "1f1b")


def check(plan: Plan) -> None:
    """Validate the plan's schedule; raises ScheduleError. Gathers and releases are left out, since
    torch places them by a rule of its own, which this project's validation does not know."""
    programs = (
        tuple(action for action in program if action.op not in (Op.UNSHARD, Op.RESHARD))
        for program in plan.schedule.programs
    )
    validate(replace(plan.schedule, programs=tuple(programs)))


def with_torch_gathers(
    program: RankProgram, compute: RankProgram, active_stages: int = _ACTIVE_STAGES
) -> RankProgram:
    """Add gathers and releases to a program by torch's rule (``_add_unshard_reshard``): a rank
    keeps the next ``active_stages`` stages gathered that have something to compute.

    ``compute`` are the program's compute actions. Before each of them, the stages that are not
    among the next to compute are released, and those that are among them are gathered. At the end
    all stages that are left are released.
    """
    out: list[Action] = []
    active: list[int] = []
    upcoming = _next_stages(compute, active_stages)
    for action in program:
        if action.op in COMPUTE:
            needed = next(upcoming)
            if needed != active:
                out += [Action(stage, Op.RESHARD) for stage in active if stage not in needed]
                out += [Action(stage, Op.UNSHARD) for stage in needed if stage not in active]
                active = sorted(needed)
        out.append(action)
    return (*out, *(Action(stage, Op.RESHARD) for stage in active))


def _next_stages(compute: RankProgram, active_stages: int) -> Iterator[list[int]]:
    """For each compute action, the next ``active_stages`` stages that have something to compute,
    beginning with its own. The search runs from the end of the program backwards."""
    nearest: list[int] = []
    upcoming = []
    for stage, _, _ in reversed(compute):
        if nearest[:1] != [stage]:
            nearest = [stage, *(other for other in nearest if other != stage)]
        upcoming.append(nearest)
    return (stages[:active_stages] for stages in reversed(upcoming))


def _compute(name: str, num_ranks: int, chunks: int, num_microbatches: int) -> Schedule:
    if name == "dualpipev":
        return Schedule(
            name=name,
            num_microbatches=num_microbatches,
            unit=num_microbatches,
            stage_rank=v_placement(num_ranks),
            programs=dualpipev(num_ranks, num_microbatches),
        )
    group = num_microbatches // max(1, num_microbatches // num_ranks)
    schedule = build(
        name, num_ranks=num_ranks, chunks=chunks, num_microbatches=num_microbatches, group=group
    )
    if name == "looped_bfs":  # torch runs the backwards of a stage last in, first out
        programs = []
        for program in schedule.programs:
            forwards = [action for action in program if action.op is Op.FORWARD]
            backwards = [action for action in program if action.op is not Op.FORWARD]
            programs.append((*forwards, *sorted(backwards, reverse=True)))
        return replace(schedule, programs=tuple(programs))
    return schedule


def _simple_schedule(
    task: Task, knobs: TorchPPKnobs, degrees: Layout, microbatch_size: int
) -> TorchSchedule:
    chunks = if_auto(knobs.chunks, default_chunks(task, degrees))
    microbatches = task.global_batch // (degrees.dp * microbatch_size)
    return "interleaved_1f1b" if chunks > 1 and microbatches % degrees.pp == 0 else "1f1b"


def _refuse(knobs: TorchPPKnobs, schedule: TorchSchedule) -> None:
    fixed = _FIXED_CHUNKS.get(schedule, knobs.chunks)
    if knobs.chunks not in ("auto", fixed):
        raise InfeasibleError(
            f"contender.chunks={knobs.chunks}: {schedule} has {fixed} per rank (use {fixed})"
        )
    if schedule not in SPLIT_BACKWARD:
        return
    if knobs.compile is True:
        raise InfeasibleError(
            f"contender.compile={knobs.compile}: torch cannot split a compiled backward (use false)"
        )
    if knobs.recompute not in ("auto", "none"):
        raise InfeasibleError(
            f"contender.recompute={knobs.recompute}: torch cannot split a recomputed backward "
            f"(use none, or contender.schedule in {', '.join(UNSPLIT)})"
        )


def _check_microbatches(name: str, pp: int, num_microbatches: int) -> None:
    """Torch's own conditions on the number of microbatches (``pipelining/schedules.py``). The
    interleaved schedules divide them into equal rounds of ``pp`` or more. Raises
    InfeasibleError."""
    least = {"1f1b": pp, "zbv": 2 * pp, "dualpipev": 2 * pp}.get(name, 1)
    interleaved = name in ("interleaved_1f1b", "interleaved_zb")
    rounds = max(1, num_microbatches // pp) if interleaved else 1
    if num_microbatches < least or num_microbatches % rounds:
        wanted = f"divide into {rounds} equal rounds" if rounds > 1 else f"be at least {least}"
        raise InfeasibleError(
            f"contender.schedule={name}: the {num_microbatches} microbatches per step and pipeline "
            f"must {wanted} in torch (change global_batch)",
            "number of microbatches that the schedule cannot have",
        )


_CHUNKS: dict[TorchSchedule, tuple[int, ...]] = {
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3, 4, 6, 8, 12),
    "looped_bfs": (2, 3, 4, 6, 8, 12),
    "interleaved_zb": (2, 3, 4, 6, 8, 12),
    "zbv": (2,),
    "dualpipev": (2,),
    "zeropp": (2, 3, 4, 6, 8, 12),
}
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "mlp", "full")


def families(point: SearchPoint[TorchPPKnobs]) -> Iterator[TorchPPKnobs]:
    """All knobs to try at a point, none of them ``auto``."""
    asked, degrees = point.asked, point.degrees
    releases: tuple[dict[str, object], ...] = ({},)
    if isinstance(asked, TorchtitanKnobs):
        known = ("default", "never")[: 2 if degrees.pp == 1 and degrees.shards > 1 else 1]
        tried = choices(asked.fsdp_reshard_after_forward, known)
        releases = tuple({"fsdp_reshard_after_forward": each} for each in tried)
    # Torch refuses to split the backward of compiled blocks (``pipelining/schedules.py``:
    # ``_check_torch_compile_compatibility``).
    schedules = UNSPLIT if asked.compile is True else SCHEDULES
    for released, sequence, wire, placement, schedule in product(
        releases,
        sequence_choices(asked.sequence_parallel, degrees),
        wire_choices(asked.reduce_dtype, point.task.precision),
        placement_choices(asked.placement, point),
        choices(asked.schedule, UNSPLIT[:1] if degrees.pp == 1 else schedules),
    ):
        recomputes = _RECOMPUTE[:1] if schedule in SPLIT_BACKWARD else _RECOMPUTE
        for chunks, recompute, blocks in chunk_choices(point, _CHUNKS[schedule], recomputes):
            yield at_degrees(
                asked,
                degrees,
                **released,
                chunks=chunks,
                schedule=schedule,
                sequence_parallel=sequence,
                recompute=recompute,
                recompute_blocks=blocks,
                placement=placement,
                reduce_dtype=wire,
                compile=if_auto(asked.compile, schedule not in SPLIT_BACKWARD),
            )


def _recomputing_all(point: SearchPoint[TorchPPKnobs]) -> Iterable[TorchPPKnobs]:
    """All knobs to try at a point, without those that recompute some blocks of a stage."""
    asked = replace(point.asked, recompute_blocks=point.task.shape.layers)
    found = families(replace(point, asked=asked))
    return (replace(knobs, recompute_blocks="auto") for knobs in found)


SPACE = Space(families=families, members=one_member, tensor=True, shards=(1, 0))


TORCH_PP = Contender(
    name="torch_pp",
    label="torch PP",
    knobs=TorchPPKnobs,
    size=size,
    orders=one_order(programs),
    space=SPACE,
    # torchtitan, config/configs.py: mixed_precision_reduce is float32, the only choice.
    gradient_types={"reduce_dtype": "fp32"},
    published_as=("kempnerforge",),
    check=check,
    search_effort=3,
    trainer="baselines.torch_pp.trainer:TorchPipelineTrainer",
    unrecorded="gathers and transfers",
)
# torchtitan combines the same schedules, FSDP2 and DTensor. It is priced, but does not run here.
TORCHTITAN = Contender(
    name="torchtitan",
    label="torchtitan",
    published_as=("torchtitan", "torchtitan_compiled", "torchtitan_3d"),
    knobs=TorchtitanKnobs,
    size=size,
    orders=one_order(programs),
    space=replace(SPACE, families=_recomputing_all, contexts=True),
    check=check,
    search_effort=3,
)
