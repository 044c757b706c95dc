"""ZeroPP's entry in the registry of contenders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Annotated, ClassVar, Literal

from zeropp.choose.contender import Contender
from zeropp.choose.planner import (
    check_context,
    check_stages,
    default_chunks,
    resolve_degrees,
)
from zeropp.choose.space import (
    SearchPoint,
    Space,
    at_degrees,
    choices,
    offload_choices,
    placement_choices,
    recompute_choices,
    wire_choices,
    zero_choices,
)
from zeropp.choose.task import Task
from zeropp.price import cut_by_cost
from zeropp.price.flops import block_parameters
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.step_plan import drafts, size_step
from zeropp.types.frozen import replace
from zeropp.types.knobs import StepKnobs
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import (
    AT_LEAST_0,
    AT_LEAST_1,
    Auto,
    Recompute,
    ReduceEvery,
    WireType,
    if_auto,
)


@dataclass(frozen=True, kw_only=True)
class ZeroppKnobs(StepKnobs):
    """Settings of ZeroPP in the suite. A knob that is ``auto`` is chosen by the tuner, or by a
    simple rule where the cluster has no prices (CPUs)."""

    prefix: ClassVar[str] = "contender."

    name: Literal["zeropp"] = "zeropp"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the first N of every rank
    # fp32 | bf16: the type in which gradients are sent; sums are fp32
    reduce_dtype: WireType | Auto = "fp32"  # type: ignore[assignment]
    gradient_parts: Annotated[int | Auto, AT_LEAST_1] = "auto"  # type: ignore[assignment]
    prefetch: Annotated[int | Auto, AT_LEAST_0] = "auto"  # type: ignore[assignment]
    merged_microbatches: Annotated[int | Auto, AT_LEAST_1] = 1  # type: ignore[assignment]
    compile: bool | Auto = "auto"  # type: ignore[assignment]  # torch.compile every block
    split_backward: bool | Auto = "auto"  # type: ignore[assignment]  # delay weight gradients

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


def size(task: Task, knobs: ZeroppKnobs, microbatch_size: int) -> SizedPlan:
    """A plan of PP x ZeRO-3 (x replicas), with all sizes but without an order of actions.

    Simple rules for what is ``auto``: one pipeline rank per node, two chunks per rank, and those of
    ``size_step``. Raises InfeasibleError, whose message is one line.
    """
    knobs = replace(
        knobs,
        compile=if_auto(knobs.compile, False),
        reduce_dtype=if_auto(knobs.reduce_dtype, "fp32"),
        split_backward=if_auto(knobs.split_backward, True),
        gradient_parts=if_auto(knobs.gradient_parts, 1),
        prefetch=if_auto(knobs.prefetch, 1),
        merged_microbatches=if_auto(knobs.merged_microbatches, 1),
    )
    if knobs.compile and task.shape.dropout > 0:
        raise InfeasibleError(
            f"contender.compile={knobs.compile}: compiled blocks draw dropout masks from a random "
            "generator of their own, which would make runs differ (use false, or model.dropout=0)"
        )
    degrees = resolve_degrees(task, knobs)
    layout = replace(
        degrees,
        chunks=if_auto(knobs.chunks, default_chunks(task, degrees)),
        replicate_zero=if_auto(knobs.replicate_zero, 0),
        placement=if_auto(knobs.placement, "dp_inner"),
    )
    check_stages(task, layout, lone_ends=layout.pp <= task.shape.layers)
    check_context(task.shape, layout)
    plan = size_step(
        knobs,
        layout,
        task.shape,
        global_batch=task.global_batch,
        microbatch_size=microbatch_size,
        precision=task.precision,
        hides_collectives=task.cluster.device.hides_collectives,
    )
    plan = replace(plan, cuts=cut_by_cost(plan, task.cluster))
    again, sent = knobs.recompute_blocks, if_auto(knobs.offload_blocks, 0)
    return replace(
        plan,
        recomputed=() if again == "auto" else plan.first_of_ranks(again),
        offloaded=plan.spread_over_ranks(sent) if sent else (),
    )


_CHUNKS = (1, 2, 3, 4, 6, 8, 12)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "mlp", "full")
_REDUCE: tuple[ReduceEvery, ...] = ("unit", "step")
_UNITS = (
    0.5,
    1,
    1.25,
    1.5,
    2,
    3,
    4,
)  # multiples of the pipeline ranks; one unit of the whole step is tried, too
_PARTS, _LARGE = 4, 1 / 8  # parts of gradients; their share of memory from which they are tried
_LARGEST_CAP = 1.5  # times the activations of a unit, or of a round of the pipeline


def families(point: SearchPoint[ZeroppKnobs]) -> Iterator[ZeroppKnobs]:
    """All knobs to try at a point, except for unit, cap and when gradients are reduced.

    Delayed weight gradients keep more tensors than a recomputed block does, so that both ways are
    tried where all blocks are recomputed, and in 8 bits, whose casts cost less in full backwards;
    full backwards alone are tried where blocks are offloaded. Families are set to what takes the
    least time: the largest unit, a cap that holds all activations of a step, and gradients that are
    reduced once per step. So the lower bound on a family's step time holds for all that ``members``
    yields.
    """
    asked, degrees, m = point.asked, point.degrees, point.num_microbatches
    layers, pieces = point.task.shape.layers, point.task.shape.num_pieces
    most = -(-layers // degrees.pp)
    known = sorted({*_CHUNKS, max(1, pieces // degrees.pp)})
    for zero, wire, placement, chunks in product(
        zero_choices(asked.replicate_zero, degrees),
        wire_choices(asked.reduce_dtype, point.task.precision),
        placement_choices(asked.placement, point),
        choices(asked.chunks, [n for n in known if n == 1 or n * degrees.pp <= pieces]),
    ):
        shared = _buffers(point, chunks)
        for recompute, blocks in recompute_choices(
            asked.recompute, asked.recompute_blocks, _RECOMPUTE, most
        ):
            in_all = degrees.pp > 1 and recompute in ("mlp", "full") and blocks == most
            ways = (True, False) if in_all or point.task.precision == "fp8" else (True,)
            backwards = {
                sent: choices(asked.split_backward, (False,) if sent else ways)
                for sent in offload_choices(asked.offload_blocks, (most,), point.task.cluster)
            }
            for sent, split, (parts, prefetch) in (
                (n, way, buffers)
                for n, each in backwards.items()
                for way in each
                for buffers in shared
            ):
                yield at_degrees(
                    asked,
                    degrees,
                    replicate_zero=zero,
                    reduce_dtype=wire,
                    placement=placement,
                    chunks=chunks,
                    recompute=recompute,
                    recompute_blocks=blocks,
                    offload_blocks=sent,
                    split_backward=split,
                    gradient_parts=parts,
                    prefetch=prefetch,
                    # More of them are tried beside the best plan.
                    merged_microbatches=if_auto(asked.merged_microbatches, 1),
                    compile=if_auto(asked.compile, point.task.shape.dropout == 0),
                    unit=if_auto(asked.unit, m),
                    activation_cap=m * chunks,
                    reduce_every=if_auto(asked.reduce_every, "step"),
                )


def _buffers(point: SearchPoint[ZeroppKnobs], chunks: int) -> list[tuple[int | Auto, int | Auto]]:
    """(parts of gradients, chunks that are gathered ahead) to try: where a chunk's gradients are a
    large part of a device's memory, also one buffer for them, and one for its parameters."""
    asked, shape = point.asked, point.task.shape
    plain = (asked.gradient_parts, asked.prefetch)
    blocks = -(-shape.layers // (point.degrees.pp * chunks))
    # Chunks of many blocks had better be cut into more.
    if blocks > 2 or 4 * blocks * block_parameters(shape) < _LARGE * point.task.limit_bytes:
        return [plain]
    parts = if_auto(asked.gradient_parts, _PARTS)
    return [*dict.fromkeys((plain, (parts, asked.prefetch), (parts, if_auto(asked.prefetch, 0))))]


def members(asked: ZeroppKnobs, family: ZeroppKnobs, plan: SizedPlan) -> Iterator[ZeroppKnobs]:
    """A family's knobs with every unit and choice of when gradients are reduced, those with the
    least memory first; the activation cap is the largest that a search tries."""
    m, chunks = plan.num_microbatches, plan.layout.chunks
    units = {min(m, max(1, int(plan.layout.pp * factor))) for factor in _UNITS} | {m}
    for unit in choices(asked.unit, sorted(units)):
        unit = min(unit, m)
        reductions = choices(asked.reduce_every, _REDUCE if unit < m else ("step",))
        largest = min(m * chunks, round(_LARGEST_CAP * max(unit, plan.layout.pp) * chunks))
        cap = if_auto(asked.activation_cap, largest)
        for reduce_every in reductions:
            yield replace(family, unit=unit, activation_cap=cap, reduce_every=reduce_every)


# With one pipeline rank ZeroPP is FSDP that gathers once per unit instead of once per microbatch. A
# ZeRO-3 group has at least two ranks, as it would otherwise be a zero-bubble pipeline.
SPACE = Space(families=families, members=members, shards=(2, 0), contexts=True)


ZEROPP = Contender(
    name="zeropp",
    label="ZeroPP",
    knobs=ZeroppKnobs,
    size=size,
    orders=drafts,
    space=SPACE,
    gradient_types={"reduce_dtype": "fp32"},
    search_effort=4,
    caveat=(
        "No full configuration of PP x ZeRO-3 with gathers once per unit (ZeroPP) has been found "
        "among published measurements: its simulated step is the sum of parts (kernels, pipeline, "
        "gathers) that are held against measurements."
    ),
    reproduces_dropout=True,
    trainer="baselines.zeropp.trainer:build",
)
