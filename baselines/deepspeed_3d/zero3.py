"""DeepSpeed ZeRO-3's entry in the registry of contenders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal, cast

from baselines.deepspeed_3d.contender import DEEPSPEED, RECOMPUTE, check_types
from zeropp.choose.contender import Contender
from zeropp.choose.planner import check_context, recomputed_blocks, resolve_degrees
from zeropp.choose.space import (
    SearchPoint,
    Space,
    at_degrees,
    choices,
    one_member,
    recompute_choices,
    wire_choices,
)
from zeropp.choose.task import Task
from zeropp.price.programs import program_named
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import loop_placement, unordered
from zeropp.types.layout import InfeasibleError, microbatches_per_step
from zeropp.types.literals import AT_LEAST_0, AT_LEAST_1, Auto, WireType, if_auto

ALL = 10**12  # more elements than any model of the suite has


@dataclass(frozen=True, kw_only=True)
class Zero3Knobs:
    """Settings of DeepSpeed's ZeRO-3, by their names in its JSON. A knob that is ``auto`` is chosen
    by the tuner, or has DeepSpeed's default where the cluster has no prices (CPUs)."""

    name: Literal["deepspeed_zero3"] = "deepspeed_zero3"
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # all ranks, or those with other rows
    context: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks that divide a sequence (Ulysses)
    # The types in which gradients of microbatches are added (``data_types.grad_accum_dtype``) and
    # in which they are sent (``communication_data_type``). DeepSpeed's defaults are bf16.
    grad_accum_dtype: WireType | Auto = "fp32"
    reduce_dtype: WireType | Auto = "fp32"
    reduce_bucket_size: Annotated[int | Auto, AT_LEAST_1] = "auto"  # gradients reduced together
    # Each tensor is gathered alone; False: with others, until they have ``prefetch_bucket_size``.
    allgather_sequential: bool | Auto = "auto"
    prefetch_bucket_size: Annotated[int | Auto, AT_LEAST_1] = "auto"
    # Both ``max_live_parameters`` and ``max_reuse_distance``: elements that may be gathered ahead,
    # and those within which a tensor is kept for its next use.
    live_parameters: Annotated[int | Auto, AT_LEAST_1] = "auto"
    # Tensors of at most this many elements are gathered once per step.
    param_persistence_threshold: Annotated[int | Auto, AT_LEAST_0] = "auto"
    # Ranks over which a second copy of the parameters is cut (ZeRO++); 1: there is none.
    zero_hpz_partition_size: Annotated[int | Auto, AT_LEAST_1] = "auto"
    recompute: Literal["none", "full"] | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the model's first N
    compile: bool | Auto = "auto"  # DeepCompile, in prices alone

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


def size(task: Task, knobs: Zero3Knobs, microbatch_size: int) -> SizedPlan:
    """A plan of ZeRO-3 over all ranks, with all sizes. Raises InfeasibleError, whose message is one
    line."""
    # Over all ranks.
    shard = if_auto(knobs.shard, max(1, task.num_gpus // if_auto(knobs.context, 1)))
    layout = resolve_degrees(task, knobs if knobs.shard == shard else replace(knobs, shard=shard))
    check_context(task.shape, layout)
    sums: WireType = if_auto(knobs.grad_accum_dtype, "fp32")
    sent: WireType = if_auto(knobs.reduce_dtype, "fp32")
    check_types(task.precision, sums=sums, sent=sent)
    near = if_auto(knobs.zero_hpz_partition_size, 1)
    if near > 1 and (near >= layout.shards or layout.shards % near):
        raise InfeasibleError(
            f"contender.zero_hpz_partition_size={near}: must divide the {layout.shards} ranks over "
            "which parameters are cut, and be fewer (use 1, for no second copy)",
            "no second copy of the parameters over this many ranks",
        )
    return SizedPlan(
        contender="deepspeed_zero3",
        shape=task.shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered(
            "1f1b",
            loop_placement(1, 1),
            microbatches_per_step(task.global_batch, layout, microbatch_size),
        ),
        cuts=(0, task.shape.num_pieces),
        program=_program(knobs, task, sums),
        precision=task.precision,
        recompute=if_auto(knobs.recompute, "none"),
        recomputed=recomputed_blocks(knobs.recompute_blocks, 1),
        reduce_every="step",
        reduce_dtype=sent,
        sum_dtype=sums,
        compile=if_auto(knobs.compile, False),
    )


def _program(knobs: Zero3Knobs, task: Task, sums: WireType) -> str:
    """The program, whose traits are DeepSpeed's defaults, with what differs from them."""
    default = program_named("deepspeed_zero3")
    together = if_auto(knobs.prefetch_bucket_size, default.gathered_together)
    if if_auto(knobs.allgather_sequential, False):
        together = 0
    chosen = {
        "gathered_together": together,
        "live_parameters": if_auto(knobs.live_parameters, default.live_parameters),
        "persistent": if_auto(knobs.param_persistence_threshold, default.persistent),
        "zero_hpz_partition_size": if_auto(knobs.zero_hpz_partition_size, 1),
    }
    chosen = {name: n for name, n in chosen.items() if n != getattr(default, name)}
    bucket = default.state(task.precision).bucket
    if knobs.reduce_bucket_size not in ("auto", bucket):
        chosen[f"{task.precision}.bucket"] = cast("int", knobs.reduce_bucket_size)
    if sums == "bf16":
        chosen["bf16.gradients"] = 2
    return "+".join(("deepspeed_zero3", *(f"{name}={value}" for name, value in chosen.items())))


_BUCKETS = (1_000_000, 50_000_000, 200_000_000, 500_000_000)
_PREFETCHES = (50_000_000, 500_000_000)


def families(point: SearchPoint[Zero3Knobs]) -> Iterator[Zero3Knobs]:
    """All knobs to try at a point. GPT has the same kernels compiled and not. Sums in 16 bits save
    memory alone. What is gathered once per step is not gathered again, so that the other settings
    of gathers have nothing to do."""
    asked, node = point.asked, point.task.cluster.gpus_per_node
    shards = point.degrees.shards
    known = (1, node) if shards > node > 1 and shards % node == 0 else (1,)
    copies = choices(asked.zero_hpz_partition_size, known)
    recomputed = recompute_choices(
        asked.recompute, asked.recompute_blocks, RECOMPUTE, point.task.shape.layers
    )
    for kept, live, near, (alone, together), bucket, sums, sent, (recompute, blocks) in product(
        choices(asked.param_persistence_threshold, (0, 100_000, ALL)),
        choices(asked.live_parameters, (1_000_000_000, ALL)),
        copies,
        _gathers(asked),
        choices(asked.reduce_bucket_size, _BUCKETS),
        wire_choices(asked.grad_accum_dtype, point.task.precision),
        wire_choices(asked.reduce_dtype, point.task.precision),
        list(recomputed),
    ):
        if kept == ALL and not (
            live in (asked.live_parameters, ALL)
            and near == copies[0]
            and (alone, together) == _gathers(asked)[0]
        ):
            continue
        yield at_degrees(
            asked,
            point.degrees,
            param_persistence_threshold=kept,
            live_parameters=live,
            allgather_sequential=alone,
            prefetch_bucket_size=together,
            zero_hpz_partition_size=near,
            reduce_bucket_size=bucket,
            grad_accum_dtype=sums,
            reduce_dtype=sent,
            recompute=recompute,
            recompute_blocks=blocks,
            compile=if_auto(asked.compile, point.task.shape.family == "llama"),
        )


def _gathers(asked: Zero3Knobs) -> list[tuple[bool, int]]:
    """Whether each tensor is gathered alone, and else how many elements together."""
    return [
        (alone, together)
        for alone in choices(asked.allgather_sequential, (True, False))
        for together in choices(asked.prefetch_bucket_size, _PREFETCHES)[: 1 if alone else None]
    ]


DEEPSPEED_ZERO3: Contender[Any] = replace(
    cast("Any", DEEPSPEED),
    name="deepspeed_zero3",
    label="DeepSpeed ZeRO-3",
    knobs=Zero3Knobs,
    size=size,
    space=Space(
        families=families, members=one_member, pipelines=(1, 1), shards=(2, 0), contexts=True
    ),
    # Blocks that are compiled one by one under ZeRO-3's hooks have other gradients than one process
    # (torch 2.13).
    runs_with={"context": 1, "compile": False},
    unrecorded="gathers and reductions",
    published_as=("deepspeed_zero3", "huggingface_zero3"),
    filler="",
)
