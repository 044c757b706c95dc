"""Megatron-Core's plans, and those of a bound that has the parts of all public 3D programs.

In: a ``Task`` and the program's knobs. Out: a ``Plan``. Below are the settings, what each
program can be set to (by its released version), the planner, and what the tuner tries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, product
from typing import Annotated, Any, Literal, TypeVar

from baselines.fsdp import contender as fsdp
from zeropp.choose.contender import Contender
from zeropp.choose.planner import (
    check_context,
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
    chunk_choices,
    has_host,
    offload_choices,
    one_member,
    placement_choices,
    sequence_choices,
    wire_choices,
    zero_choices,
)
from zeropp.choose.task import Task
from zeropp.price import cut_by_cost
from zeropp.price.programs import program_named
from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import Schedule, loop_placement, unordered, v_placement
from zeropp.types.frozen import replace
from zeropp.types.layout import InfeasibleError, Layout, microbatches_per_step
from zeropp.types.literals import (
    AT_LEAST_0,
    AT_LEAST_1,
    Auto,
    Exchange,
    Placement,
    Precision,
    Recompute,
    WireType,
    if_auto,
)
from zeropp.types.shape import ModelShape

Public3D = Literal["best_3d", "megatron_core", "megatron_core_local"]
CpCommType = Literal["p2p", "a2a", "a2a+p2p"]
EXCHANGES: dict[CpCommType, Exchange] = {"p2p": "ring", "a2a": "heads", "a2a+p2p": "both"}
OffloadModules = Literal["none", "attention"]
Public3DSchedule = Literal["1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv"]


@dataclass(frozen=True, kw_only=True)
class Public3DKnobs:
    """Settings of a public 3D program. A knob that is ``auto`` is chosen by the tuner, or by a
    simple rule where the cluster has no prices (CPUs)."""

    name: Public3D
    tp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # tensor-parallel ranks
    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # data-parallel ranks
    replicate_zero: Literal[0, 1] | Auto = "auto"  # 1: distributed optimizer
    chunks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # virtual stages per rank (V)
    schedule: Public3DSchedule | Auto = "auto"
    sequence_parallel: bool | Auto = "auto"
    recompute: Recompute | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the first N of every stage
    placement: Placement | Auto = "auto"  # which ranks share a node
    grad_accum_dtype: WireType | Auto = "fp32"  # type in which gradients are added and sent

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True, kw_only=True)
class SlicingKnobs(Public3DKnobs):
    """Settings of programs that divide sequences and send activations to the host, too."""

    context: Annotated[int | Auto, AT_LEAST_1] = "auto"  # context_parallel_size
    cp_comm_type: CpCommType | Auto = "auto"  # how attention sees other slices
    # cpu_offloading_num_layers: whole blocks, without a pipeline and recomputation.
    offload_blocks: Annotated[int | Auto, AT_LEAST_0] = "auto"
    # Of every block; attention: fine_grained_activation_offloading, of the modules that dense
    # blocks of Transformer Engine have (qkv_linear, core_attn, attn_proj).
    offload_modules: OffloadModules | Auto = "auto"
    # Elements of a bucket of gradients and parameters (--ddp-bucket-size), without a pipeline; 0:
    # Megatron-Core's default, which is at least 40 million and a million per data-parallel rank.
    bucket_size: Annotated[int | Auto, AT_LEAST_0] = "auto"


@dataclass(frozen=True)
class Best3DKnobs(SlicingKnobs):
    """Settings of the bound that has the best of all public parts."""

    name: Literal["best_3d"] = "best_3d"


_VIRTUAL_STAGES = (2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One program's choices. ``program`` is its name in ``zeropp.price.programs``, whose traits set
    the price, and ``program_on_cpus`` that of what runs on CPUs instead, if it is another one;
    ``schedules`` gives the numbers of virtual stages per rank that each schedule may have.

    ``recomputes`` are the ways of recomputation. ``interleaves_few``: interleaved schedules accept
    fewer microbatches than there are pipeline ranks.
    """

    program: str
    program_on_cpus: str = ""
    schedules: Mapping[Public3DSchedule, tuple[int, ...]]
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    selects_blocks: bool = False  # selective recomputation may be of some blocks of a stage
    interleaves_few: bool = False


_MEGATRON_SCHEDULES: dict[Public3DSchedule, tuple[int, ...]] = {
    "1f1b": (1,),
    "interleaved_1f1b": _VIRTUAL_STAGES,
}

OFFERS: dict[Public3D, Offer] = {
    # megatron/core/pipeline_parallel/schedules.py (core_v0.12): 1F1B and interleaved 1F1B, no
    # split backward. Ranks are numbered tp-dp-pp, or tp-pp-dp with --use-tp-pp-dp-mapping.
    # Selective recomputation is that of ``recompute_modules`` "mlp", in all blocks. Of the other
    # modules (core_v0.16), "core_attn" drops scores that fused attention never keeps; "layernorm"
    # does nothing to dense layers of Transformer Engine, whose norms are inside
    # their products (gpt_layer_specs.py: IdentityOp); others are for experts or MLA.
    "megatron_core": Offer(
        program="megatron_core",
        program_on_cpus="megatron_core_local",  # Transformer Engine is for GPUs
        schedules=_MEGATRON_SCHEDULES,
    ),
    "megatron_core_local": Offer(program="megatron_core_local", schedules=_MEGATRON_SCHEDULES),
    # No existing program: the best of every public part at once.
    "best_3d": Offer(
        program="best_public_3d",
        schedules={
            **_MEGATRON_SCHEDULES,
            "zb_h1": (1,),
            "interleaved_zb": _VIRTUAL_STAGES,
            "zbv": (2,),
        },
        recomputes=("none", "selective", "mlp", "full"),  # torch's selective checkpointing
        selects_blocks=True,
        interleaves_few=True,  # torch/distributed/pipelining/schedules.py: one round of them
    ),
}


_FIXED_CHUNKS = {"1f1b": 1, "zb_h1": 1, "zbv": 2}


def size(task: Task, knobs: Public3DKnobs, microbatch_size: int) -> SizedPlan:
    """A plan of TP x PP x DP with ZeRO 0 or 1, with all sizes but without an order of actions.
    Raises InfeasibleError, whose message is one line."""
    schedule: Public3DSchedule = if_auto(knobs.schedule, "1f1b")
    layout = replace(
        resolve_degrees(task, replace(knobs, tp=if_auto(knobs.tp, 1))),
        chunks=if_auto(knobs.chunks, _FIXED_CHUNKS.get(schedule, 2)),
        replicate_zero=if_auto(knobs.replicate_zero, 0),
        sequence_parallel=if_auto(knobs.sequence_parallel, False),
        placement=if_auto(knobs.placement, "dp_inner"),
        context_copies=True,
        exchange=EXCHANGES[if_auto(getattr(knobs, "cp_comm_type", "p2p"), "p2p")],
    )
    # Transformer Engine 2.9, attention/dot_product_attention/context_parallel.py
    # (attn_forward_func_with_cp): heads of queries, keys and values divide.
    check_context(task.shape, layout, kv_heads=True)
    offer = OFFERS[knobs.name]
    _check_offer(knobs, offer, schedule, task.precision)
    on_cpus = task.cluster.device.is_cpu and offer.program_on_cpus
    # pipeline_model_parallel_layout has stages without a block.
    check_stages(task, layout, lone_ends=layout.pp <= task.shape.layers)
    check_tensor_parallel(task.shape, layout)
    microbatches = microbatches_per_step(task.global_batch, layout, microbatch_size)
    _check_schedule(knobs, schedule, layout, microbatches)
    sums: WireType = if_auto(knobs.grad_accum_dtype, "fp32")
    pp, chunks = layout.pp, layout.chunks
    placement = v_placement(pp) if schedule == "zbv" else loop_placement(pp, chunks)
    program = on_cpus or offer.program
    if task.precision == "fp8" and program == "megatron_core_local":
        raise InfeasibleError(
            "precision=fp8: Megatron-Core multiplies in 8 bits by Transformer Engine alone, which "
            "needs a GPU (use bf16, or contender=megatron_core on a GPU)",
            "no 8 bits without Transformer Engine",
        )
    if sums == "bf16":
        program += "+bf16.gradients=2+bf16.reduced=2"
    elif task.precision != "fp32" and program_named(program).bf16.reduced != 4:
        program += "+bf16.reduced=4"
    # In a pipeline the first stage alone has buckets.
    if (bucket := if_auto(getattr(knobs, "bucket_size", 0), 0)) and pp == 1:
        program += f"+updated_bucket={bucket}"
    plan = SizedPlan(
        contender=knobs.name,
        shape=task.shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered(schedule, placement, microbatches),
        cuts=(),
        program=program,
        precision=task.precision,
        recompute=if_auto(knobs.recompute, "none"),
        recomputed=recomputed_blocks(knobs.recompute_blocks, len(placement)),
        reduce_every="step",
        sum_dtype=sums,
    )
    plan = replace(plan, cuts=cut_by_cost(plan, task.cluster))
    in_all = plan.recompute not in ("selective", "mlp") or plan.recomputed_per_stage == plan.blocks
    if not (in_all or offer.selects_blocks):
        raise InfeasibleError(
            f"contender.recompute_blocks={knobs.recompute_blocks}: selective recomputation of "
            f"{knobs.name} is that of all blocks (use auto)"
        )
    return _offloading(plan, knobs) if isinstance(knobs, SlicingKnobs) else plan


def _offloading(plan: SizedPlan, knobs: SlicingKnobs) -> SizedPlan:
    """The plan with what it sends to the host, block by block where there is no pipeline
    (Megatron-Core 0.16.1, core/transformer/transformer_config.py, and its
    docs/source/api-guide/fine_grained_activation_offloading.md). Raises InfeasibleError."""
    sent, modules = if_auto(knobs.offload_blocks, 0), if_auto(knobs.offload_modules, "none")
    if not sent and modules == "none":
        return plan
    if sent and (plan.layout.pp > 1 or modules != "none"):
        raise InfeasibleError(
            f"contender.offload_blocks={sent}: Megatron-Core sends whole blocks without a pipeline "
            f"and offload_modules alone (use 0 with contender.pp={plan.layout.pp} "
            f"contender.offload_modules={modules})",
            "whole blocks are offloaded without a pipeline alone",
        )
    if plan.recompute == "full" and plan.recomputed_per_stage == plan.blocks and not sent:
        raise InfeasibleError(
            f"contender.offload_modules={modules}: contender.recompute=full leaves nothing of it "
            "to send (use none)",
            "nothing is left to offload",
        )
    fsdp.check_cpu_offloading(sent, plan.recompute, plan.shape.layers)
    if plan.layout.pp == 1:
        plan = fsdp.by_piece(plan, knobs.recompute_blocks)
    if sent:
        return replace(plan, offloaded=fsdp.offloaded_pieces(sent, plan.shape.num_pieces))
    return replace(plan, offloaded=plan.blocks, offloads="attention")


def programs(plan: SizedPlan) -> Schedule:
    """The programs of a plan, in the one order of its schedule."""
    layout, m = plan.layout, plan.num_microbatches
    if plan.schedule.name == "accumulation":
        return fsdp.programs(plan)
    return _schedule(
        plan.schedule.name,
        num_ranks=layout.pp,
        chunks=layout.chunks,
        num_microbatches=m,
        group=microbatch_group(layout.pp, m),
        offloaded=plan.offloaded_stages,
    )


@lru_cache(maxsize=128)
def _schedule(
    name: str,
    *,
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    group: int,
    offloaded: tuple[int, ...],
) -> Schedule:
    """A lowered schedule, cached, because many plans that differ in other degrees share it."""
    order = build(
        name, num_ranks=num_ranks, chunks=chunks, num_microbatches=num_microbatches, group=group
    )
    return lower(order, gather=False, reduce_every="step", offloaded=offloaded)


def _check_offer(
    knobs: Public3DKnobs, offer: Offer, schedule: Public3DSchedule, precision: Precision
) -> None:
    if schedule not in offer.schedules:
        known = ", ".join(offer.schedules)
        raise InfeasibleError(
            f"contender.schedule={schedule}: {knobs.name} does not have it (use one of {known})"
        )
    if knobs.recompute not in ("auto", *offer.recomputes):
        known = ", ".join(offer.recomputes)
        raise InfeasibleError(
            f"contender.recompute={knobs.recompute}: {knobs.name} does not have it (use one of "
            f"{known})"
        )
    if knobs.grad_accum_dtype == "bf16" and precision == "fp32":
        raise InfeasibleError(
            f"contender.grad_accum_dtype=bf16: {knobs.name} adds gradients in fp32 with "
            f"precision={precision} (use fp32)",
            "bf16 gradients need bf16",
        )


def _check_schedule(
    knobs: Public3DKnobs, name: Public3DSchedule, layout: Layout, num_microbatches: int
) -> None:
    pp, chunks = layout.pp, layout.chunks
    fixed = _FIXED_CHUNKS.get(name, chunks)
    if chunks != fixed:
        raise InfeasibleError(
            f"contender.chunks={chunks}: {name} has {fixed} per rank (use {fixed})"
        )
    if pp == 1 and name != "1f1b":
        raise InfeasibleError(
            f"contender.schedule={name}: one pipeline rank leaves nothing to schedule (use 1f1b)",
            "no pipeline to schedule",
        )
    few = num_microbatches < pp and not OFFERS[knobs.name].interleaves_few
    if name.startswith("interleaved") and few:
        raise InfeasibleError(
            f"contender.schedule={name}: {num_microbatches} microbatches per step and pipeline "
            f"must be at least contender.pp={pp} (change global_batch)",
            "fewer microbatches than pipeline ranks",
        )


def microbatch_group(pp: int, num_microbatches: int) -> int:
    """The microbatches that interleaving sends through a chunk before the next chunk.

    It is the smallest number that Megatron-Core allows (``microbatch_group_size_per_vp_stage``): at
    least P, and the last group has none or at least P. Programs that interleave fewer than P
    microbatches send all of them.
    """
    groups = range(min(pp, num_microbatches), num_microbatches + 1)
    return next(size for size in groups if (left := num_microbatches % size) == 0 or left >= pp)


P = TypeVar("P", bound=Public3DKnobs)


def families(point: SearchPoint[P]) -> Iterator[P]:
    """All knobs to try at a point that the program can have, none of them ``auto``."""
    asked, degrees = point.asked, point.degrees
    offer = OFFERS[asked.name]
    schedules = [s for s in choices(asked.schedule, offer.schedules) if s in offer.schedules]
    if asked.schedule == "auto":
        few = point.num_microbatches < degrees.pp and not offer.interleaves_few
        alone = degrees.pp == 1  # there is no pipeline to schedule
        kept = (s == "1f1b" or not (alone or (few and s.startswith("inter"))) for s in schedules)
        schedules = [*compress(schedules, kept)]
    for way, zero, sums, sequence, placement, schedule in product(
        _ways(asked, degrees, point.task.shape),
        zero_choices(asked.replicate_zero, replace(degrees, context_copies=True)),
        wire_choices(asked.grad_accum_dtype, point.task.precision),
        sequence_choices(asked.sequence_parallel, degrees),
        placement_choices(asked.placement, point),
        schedules,
    ):
        tried = chunk_choices(point, offer.schedules[schedule], offer.recomputes)
        if not offer.selects_blocks:
            layers, in_part = point.task.shape.layers, ("none", "full")
            tried = iter(
                dict.fromkeys((n, kind, b if kind in in_part else layers) for n, kind, b in tried)
            )
        for (chunks, recompute, blocks), more in (
            (each, more) for each in tried for more in _sliced(asked, point, zero, each[1])
        ):
            yield at_degrees(
                asked,
                degrees,
                **({"cp_comm_type": way, **more} if more else {}),
                replicate_zero=zero,
                chunks=chunks,
                schedule=schedule,
                sequence_parallel=sequence,
                recompute=recompute,
                recompute_blocks=blocks,
                placement=placement,
                grad_accum_dtype=sums,
            )


def _sliced(
    asked: Public3DKnobs, point: SearchPoint[Any], zero: int, recompute: Recompute
) -> Iterator[dict[str, object]]:
    """The ways to send activations to the host to try beside ``recompute``, and sizes of buckets
    beside ZeRO-1: the default and, where few microbatches follow a gather, another."""
    degrees, cluster = point.degrees, point.task.cluster
    if not isinstance(asked, SlicingKnobs):
        yield {}
        return
    whole = (point.task.shape.layers - 1,) if (degrees.pp, recompute) == (1, "none") else ()
    modules = ("none", "attention")[: 2 if recompute != "full" and has_host(cluster) else 1]
    gathered = (degrees.pp, zero) == (1, 1) and point.num_microbatches <= 2
    sizes = choices(asked.bucket_size, (0, 100_000_000)[: 1 + gathered])
    for sent in offload_choices(asked.offload_blocks, whole, cluster):
        for part in choices(asked.offload_modules, modules[: 1 if sent else None]):
            for bucket in sizes:
                yield {"offload_blocks": sent, "offload_modules": part, "bucket_size": bucket}


def _ways(asked: Public3DKnobs, degrees: Layout, shape: ModelShape) -> Iterator[str]:
    """The ways to exchange context that are asked for, or that divide the model."""
    ways = choices(getattr(asked, "cp_comm_type", "p2p"), EXCHANGES)
    for way in ways if degrees.context > 1 else ways[:1]:
        with suppress(InfeasibleError):
            check_context(shape, replace(degrees, exchange=EXCHANGES[way]), kv_heads=True)
            yield way


SPACE: Space[Any] = Space(families=families, members=one_member, tensor=True, contexts=True)


BEST_3D = Contender(
    name="best_3d",
    label="3D, all public parts",
    knobs=Best3DKnobs,
    size=size,
    orders=one_order(programs),
    space=SPACE,
    gradient_types={"grad_accum_dtype": "bf16"},
    search_effort=2,
)
