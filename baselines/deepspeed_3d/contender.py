"""DeepSpeed's entries in the registry of contenders.

``deepspeed`` has whatever degrees people give it: with a pipeline its ``PipelineEngine`` runs, and
without one its ordinary engine. ``deepspeed_3d`` always has a pipeline and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Annotated, Literal

from zeropp.choose.contender import Contender
from zeropp.choose.planner import (
    asked_degrees,
    check_stages,
    check_tensor_parallel,
    one_order,
    recomputed_blocks,
    resolve_degrees,
)
from zeropp.choose.space import (
    SearchPoint,
    Space,
    at_degrees,
    choices,
    has_host,
    one_member,
    placement_choices,
    recompute_choices,
    wire_choices,
    zero_choices,
)
from zeropp.choose.task import Task
from zeropp.price import cut_by_cost
from zeropp.schedule.build import build
from zeropp.schedule.passes import add_offload
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import Action, Op, RankProgram, Schedule, loop_placement, unordered
from zeropp.types.layout import InfeasibleError, Layout, microbatches_per_step
from zeropp.types.literals import (
    AT_LEAST_1,
    Auto,
    Placement,
    Precision,
    Recompute,
    ReplicateZero,
    WireType,
    if_auto,
)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedKnobs:
    """Settings of DeepSpeed. A knob that is ``auto`` is chosen by the tuner, or by a simple rule
    where the cluster has no prices (CPUs)."""

    name: Literal["deepspeed", "deepspeed_3d"] = "deepspeed"
    tp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # tensor-parallel ranks
    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # data-parallel ranks
    replicate_zero: ReplicateZero | Auto = "auto"  # ZeRO stage; 2 without a pipeline alone
    # The types in which gradients of microbatches are added (``data_types.grad_accum_dtype``) and
    # in which they are sent (``communication_data_type``). DeepSpeed's defaults are bf16.
    grad_accum_dtype: WireType | Auto = "fp32"
    reduce_dtype: WireType | Auto = "fp32"
    reduce_bucket_size: Annotated[int | Auto, AT_LEAST_1] = "auto"  # elements reduced at once
    # All-reduce a bucket; False, in a pipeline alone: reduce each rank's part of it to that rank.
    use_multi_rank_bucket_allreduce: bool | Auto = "auto"
    recompute: Literal["none", "full"] | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the first N of every stage
    # The host keeps the inputs of recomputed blocks (``activation_checkpointing``), in a pipeline.
    cpu_checkpointing: bool | Auto = "auto"
    placement: Placement | Auto = "auto"  # which ranks share a node
    compile: bool | Auto = "auto"  # torch.compile every block

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True, kw_only=True)
class DeepSpeed3DKnobs(DeepSpeedKnobs):
    """Settings of DeepSpeed with a pipeline and tensor parallelism."""

    name: Literal["deepspeed_3d"] = "deepspeed_3d"


def size(task: Task, knobs: DeepSpeedKnobs, microbatch_size: int) -> SizedPlan:
    """A plan of TP x PP x DP with ZeRO 0 to 2, whose stages are balanced by cost, with all sizes
    but without an order of actions.

    Simple rules for what is ``auto``: TP over two ranks where the model's sizes allow it, one stage
    per node, ZeRO-1, sums and messages in fp32, DeepSpeed's own bucket. Raises InfeasibleError,
    whose message is one line.
    """
    degrees = resolve_degrees(task, replace(knobs, tp=if_auto(knobs.tp, _simple_tp(task, knobs))))
    layout = replace(
        degrees,
        replicate_zero=if_auto(knobs.replicate_zero, 1),
        placement=if_auto(knobs.placement, "dp_inner"),
    )
    if knobs.name == "deepspeed_3d" and 1 in (layout.tp, layout.pp):
        raise InfeasibleError(
            f"contender=deepspeed_3d: has TP and a pipeline, not contender.tp={layout.tp} "
            f"contender.pp={layout.pp} (use contender=deepspeed)",
            "no TP, or no pipeline",
        )
    check_stages(task, layout)
    check_tensor_parallel(task.shape, layout)
    sums: WireType = if_auto(knobs.grad_accum_dtype, "fp32")
    sent: WireType = if_auto(knobs.reduce_dtype, "fp32")
    plan = SizedPlan(
        contender=knobs.name,
        shape=task.shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered(
            "1f1b",
            loop_placement(layout.pp, 1),
            microbatches_per_step(task.global_batch, layout, microbatch_size),
        ),
        cuts=(),
        program=_program(knobs, layout, task.precision, sums=sums, sent=sent),
        precision=task.precision,
        recompute=if_auto(knobs.recompute, "none"),
        recomputed=recomputed_blocks(knobs.recompute_blocks, layout.pp),
        reduce_every="step",
        reduce_dtype=sent,
        sum_dtype=sums,
        compile=if_auto(knobs.compile, False),
    )
    plan = replace(plan, cuts=cut_by_cost(plan, task.cluster))
    if not if_auto(knobs.cpu_checkpointing, False):
        return plan
    if layout.pp == 1 or plan.recompute == "none":
        raise InfeasibleError(
            f"contender.cpu_checkpointing=True: simulated where a pipeline recomputes blocks, "
            f"not with contender.pp={layout.pp} contender.recompute={plan.recompute} (use false)",
            "nothing recomputed whose inputs the host could keep",
        )
    return replace(plan, offloaded=plan.recomputed_per_stage)


_BUCKET = 500_000_000  # DeepSpeed's default of ``reduce_bucket_size``


def _program(
    knobs: DeepSpeedKnobs, layout: Layout, precision: Precision, *, sums: WireType, sent: WireType
) -> str:
    """The program by DeepSpeed's engine and optimizer: ``PipelineEngine`` or the ordinary engine;
    with ZeRO its own optimizer or, for bf16 with sums in fp32 and ZeRO-1, ``BF16_Optimizer``
    (``runtime/engine.py``: ``_do_optimizer_sanity_check``). Raises InfeasibleError for what
    DeepSpeed does not have.

    Sums that are sent in fp32 are copied as often as in 16 bits, except casts: ``BF16_Optimizer``
    scales them where they are (8 bytes per parameter moved), and ZeRO-2, which divides its 16-bit
    bucket (4), casts it (6), and casts what it has received back (6).
    """
    zero = layout.replicate_zero
    if precision == "bf16" and zero == 0:
        raise InfeasibleError(
            f"contender.replicate_zero=0: {knobs.name} keeps fp32 masters of bf16 parameters with "
            "ZeRO only (use 1)",
            "bf16 needs ZeRO-1",
        )
    check_types(precision, sums=sums, sent=sent)
    if (sums, sent) == ("bf16", "fp32"):
        raise InfeasibleError(
            "contender.reduce_dtype=fp32: gradients that are added in bf16 are sent in bf16 (use "
            "bf16, or contender.grad_accum_dtype=fp32)",
            "bf16 sums are sent in bf16",
        )
    if layout.pp > 1 and zero == 2:
        raise InfeasibleError(
            f"contender.replicate_zero=2: DeepSpeed's pipelines have no ZeRO-2 (use 1, or "
            f"contender.pp=1 instead of {layout.pp})",
            "pipelines have no ZeRO-2",
        )
    by_bucket = zero == 2 or (zero == 1 and precision == sums)
    if layout.pp == 1:
        name = f"deepspeed_zero{zero}" if by_bucket else "deepspeed_ordinary"
    else:
        name = "deepspeed_3d_buckets" if sums == "bf16" else "deepspeed_3d"
    if precision == "bf16" and sent == "fp32":
        name += f"+bf16.reduced=4+bf16.copied={16 if by_bucket else 8}"
    if by_bucket:
        name += f"+{precision}.bucket={if_auto(knobs.reduce_bucket_size, _BUCKET)}"
    if if_auto(knobs.use_multi_rank_bucket_allreduce, True):
        return name
    if layout.pp == 1 or not by_bucket:
        raise InfeasibleError(
            "contender.use_multi_rank_bucket_allreduce=False: only a pipeline whose sums have the "
            "type of its parameters reduces by bucket without a wait of the host (use true)",
            "buckets are not reduced to their owners",
        )
    return f"{name}+{precision}.zero1_all_reduces=false"


def check_types(precision: Precision, *, sums: WireType, sent: WireType) -> None:
    """Raise InfeasibleError if gradients of fp32 parameters would be added or sent in bf16, or if
    products are asked for in 8 bits."""
    if precision == "fp8":
        raise InfeasibleError(
            "precision=fp8: DeepSpeed 0.19.8 converts no layers to 8 bits (use bf16, or another "
            "contender)",
            "DeepSpeed converts no layers to 8 bits",
        )
    for name, kind in (("grad_accum_dtype", sums), ("reduce_dtype", sent)):
        if precision == "fp32" and kind == "bf16":
            raise InfeasibleError(
                f"contender.{name}=bf16: gradients of fp32 parameters are added and sent in fp32 "
                "(use fp32, or precision=bf16)",
                "bf16 gradients need bf16",
            )


def programs(plan: SizedPlan) -> Schedule:
    """The programs of a plan: plain 1F1B in the one order of DeepSpeed's own ``TrainSchedule``; a
    test compares the two, action by action."""
    return _schedule(plan.layout.pp, plan.num_microbatches, plan.tied_stages, plan.offloaded_stages)


@lru_cache(maxsize=128)
def _schedule(
    num_ranks: int, num_microbatches: int, tied: tuple[int, ...], offloaded: tuple[int, ...]
) -> Schedule:
    schedule = build("1f1b", num_ranks=num_ranks, chunks=1, num_microbatches=num_microbatches)
    schedule = with_deepspeed_exchanges(schedule, tied)
    programs = (add_offload(program, offloaded) for program in schedule.programs)
    return replace(schedule, programs=tuple(programs))


def _simple_tp(task: Task, knobs: DeepSpeedKnobs) -> int:
    """Two if that divides the model's sizes and the ranks that the given degrees leave, else one,
    and one on CPUs, where it is slow. The degrees that are given count as taken."""
    if task.cluster.device.is_cpu:
        return 1
    shape = task.shape
    taken = prod(degree for degree in asked_degrees(knobs).values() if degree != "auto")
    sizes = (shape.heads, shape.kv_heads, shape.ffn, shape.vocab)
    fits = task.num_gpus % (2 * taken) == 0 and not any(size % 2 for size in sizes)
    return 2 if fits else 1


def with_deepspeed_exchanges(schedule: Schedule, tied: tuple[int, ...]) -> Schedule:
    """Add sends, receives and the final gradient reduction to a compute-only 1F1B schedule, in the
    order of DeepSpeed's ``TrainSchedule.steps``; it sums the gradients of ``tied`` stages before
    they are reduced. A single stage needs none: the ordinary engine reduces in its backward.

    DeepSpeed counts in time slots of one forward or backward pass each. A pass's output is sent in
    the slot after the pass. If that slot holds a backward pass, the gradient that this backward
    needs is received before the send.
    """
    last = schedule.num_stages - 1
    return replace(
        schedule,
        programs=tuple(_exchanges(program, last, tied) for program in schedule.programs),
    )


def _exchanges(program: RankProgram, last: int, tied: tuple[int, ...]) -> RankProgram:
    stage = program[0].stage
    out: list[Action] = []
    unsent: list[Action] = []
    slot = -1
    for action in program:
        assert action.microbatch is not None
        forward = action.op is Op.FORWARD
        # Each pass takes one slot.
        previous, slot = slot, (stage if forward else 2 * last + 1 - stage) + 2 * action.microbatch
        # None at the pipeline's ends.
        ops = ([Op.RECV_F, Op.SEND_B] if stage else []) + ([Op.SEND_F, Op.RECV_B] * (stage < last))
        before, after = (Op.RECV_F, Op.SEND_F) if forward else (Op.RECV_B, Op.SEND_B)
        received = [Action(stage, before, action.microbatch)] * (before in ops)
        receive_first = action.op is Op.FULL_BACKWARD and slot == previous + 1
        out += (*received, *unsent) if receive_first else (*unsent, *received)
        out.append(action)
        unsent = [Action(stage, after, action.microbatch)] * (after in ops)
    return (
        *out,
        *unsent,
        *([Action(stage, Op.REDUCE_TIED)] if stage in tied else []),
        *([Action(stage, Op.REDUCE_GRAD)] if last else []),
    )


RECOMPUTE: tuple[Recompute, ...] = ("none", "full")


def families(point: SearchPoint[DeepSpeedKnobs]) -> Iterator[DeepSpeedKnobs]:
    """All knobs to try at a point."""
    asked, degrees = point.asked, point.degrees
    largest = -(-point.task.shape.layers // degrees.pp)
    recomputed = recompute_choices(asked.recompute, asked.recompute_blocks, RECOMPUTE, largest)
    ways = (False, True)[: 2 if degrees.pp > 1 and has_host(point.task.cluster) else 1]
    for reduction, placement, (recompute, blocks), sent in product(
        _reductions(point),
        placement_choices(asked.placement, point),
        list(recomputed),
        choices(asked.cpu_checkpointing, ways),
    ):
        if sent and recompute == "none":
            continue
        yield at_degrees(
            asked,
            degrees,
            **reduction,
            placement=placement,
            recompute=recompute,
            recompute_blocks=blocks,
            cpu_checkpointing=sent,
            compile=if_auto(asked.compile, True),
        )


# Sizes of buckets to try: DeepSpeed's default, that of Hugging Face's older examples, and one that
# leaves room for more activations.
_BUCKETS = (_BUCKET, 200_000_000, 50_000_000)


def _reductions(point: SearchPoint[DeepSpeedKnobs]) -> Iterator[dict[str, object]]:
    """The knobs of reductions to try. ZeRO-2 adds in fp32 at no cost, as a rank has a part of the
    sums alone; what is added in bf16 is sent so."""
    asked, degrees, precision = point.asked, point.degrees, point.task.precision
    known: set[ReplicateZero] = {1} if precision == "bf16" else {*zero_choices("auto", degrees)}
    if degrees.pp == 1 and degrees.replicate > 1:
        known.add(2)
    types = wire_choices("auto", precision)
    for zero in choices(asked.replicate_zero, sorted(known)):
        for sums in choices(asked.grad_accum_dtype, types if zero == 1 else types[:1]):
            by_bucket = zero == 2 or (zero == 1 and precision == sums)
            owners = by_bucket and degrees.pp > 1 and degrees.replicate > 1
            for sent, size, all_reduce in product(
                choices(asked.reduce_dtype, types if sums == "fp32" else types[1:]),
                choices(asked.reduce_bucket_size, _BUCKETS if by_bucket else _BUCKETS[:1]),
                choices(asked.use_multi_rank_bucket_allreduce, (True, False)[: 1 + owners]),
            ):
                yield {
                    "replicate_zero": zero,
                    "grad_accum_dtype": sums,
                    "reduce_dtype": sent,
                    "reduce_bucket_size": size,
                    "use_multi_rank_bucket_allreduce": all_reduce,
                }


SPACE = Space(families=families, members=one_member, tensor=True)


DEEPSPEED = Contender(
    name="deepspeed",
    label="DeepSpeed",
    knobs=DeepSpeedKnobs,
    size=size,
    orders=one_order(programs),
    space=SPACE,
    runs_with={"cpu_checkpointing": False},
    # DeepSpeed 0.19.8, runtime/engine.py, get_data_types: both default to the type of the model.
    gradient_types={"grad_accum_dtype": "bf16", "reduce_dtype": "bf16"},
    published_as=("megatron_deepspeed_2022", "bigscience", "bigscience_bf16"),
    trainer="baselines.deepspeed_3d.pipeline:build",
    late_imports=(  # by deepspeed.initialize: two seconds of work per rank
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.comm.mori",
        "deepspeed.module_inject.auto_ep_layer",
        "distutils.ccompiler",
    ),
    filler="baselines.deepspeed_3d.pipeline:fill",
    emulation="baselines.deepspeed_3d.emulated:stand_ins",
)


def _families_3d(point: SearchPoint[DeepSpeedKnobs]) -> Iterator[DeepSpeedKnobs]:
    """All knobs to try at a point with tensor parallelism."""
    return families(point) if point.degrees.tp > 1 else iter(())


DEEPSPEED_3D = replace(
    DEEPSPEED,
    name="deepspeed_3d",
    label="DeepSpeed 3D",
    knobs=DeepSpeed3DKnobs,
    space=replace(SPACE, families=_families_3d, pipelines=(2, 0)),
)
