"""ZeroPP's entry in the registry of contenders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Annotated, Literal

from zeropp.cost import cut_by_cost
from zeropp.layout import InfeasibleError, Layout
from zeropp.literals import (
    AT_LEAST_0,
    AT_LEAST_1,
    Auto,
    Placement,
    Recompute,
    ReduceEvery,
    WireType,
    if_auto,
)
from zeropp.plan import SizedPlan, Task
from zeropp.planner import (
    check_split_blocks,
    check_stages,
    default_chunks,
    drafts,
    microbatches_per_step,
    recomputed_blocks,
    resolve_degrees,
)
from zeropp.schedule.program import loop_placement, unordered
from zeropp.schedule.zeropp_order import cap_needs, smallest_cap, unit_size
from zeropp.tune.contender import Contender
from zeropp.tune.space import (
    SearchPoint,
    Space,
    at_degrees,
    choices,
    placement_choices,
    recompute_choices,
    zero_choices,
)


@dataclass(frozen=True, kw_only=True)
class StepKnobs:
    """What a person may set of a ZeroPP step: keywords of ``zeropp.parallelize``, and, with those
    of ``ZeroppKnobs``, keys of the suite's command line and fields of its records.

    A *chunk* is what Megatron-LM calls a virtual stage: a rank holds V of them. A *unit* is a group
    of U microbatches that go through a chunk one after another, so that the chunk's parameters are
    gathered once per unit. A *chunk-activation* is what one microbatch leaves behind in one chunk
    for its backward.
    """

    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks of a ZeRO-3 group (dp_shard)
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # number of such groups (dp_replicate)
    replicate_zero: Literal[0, 1] | Auto = "auto"  # 1: ZeRO-1 over the replicas
    chunks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # model chunks per rank (V)
    unit: Annotated[int | Auto, AT_LEAST_1] = "auto"  # microbatches per scheduling unit (U)
    activation_cap: Annotated[int | Auto, AT_LEAST_1] = "auto"  # live chunk-activations per rank
    recompute: Recompute | Auto = "auto"
    reduce_every: ReduceEvery | Auto = "auto"  # when gradients are reduced over the shards
    reduce_dtype: WireType = "fp32"  # type in which gradients are sent; sums are fp32
    prefetch: Annotated[int, AT_LEAST_0] = 1  # chunks that are gathered ahead of their use
    split_backward: bool = True  # delay weight gradients; False: full backwards
    placement: Placement | Auto = "auto"  # which ranks share a node
    compile: bool = False  # torch.compile every block


@dataclass(frozen=True, kw_only=True)
class ZeroppKnobs(StepKnobs):
    """Settings of ZeroPP in the suite. A knob that is ``auto`` is chosen by the tuner, or by a
    simple rule where the cluster has no prices (CPUs)."""

    name: Literal["zeropp"] = "zeropp"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the first N of every stage
    split_blocks: bool | Auto = "auto"  # a stage may end inside a block; auto: where it is searched

    @property
    def is_open(self) -> bool:
        """Whether any knob is left for the tuner to choose. ``split_blocks`` alone is no reason to
        search."""
        settled = {"split_blocks", "recompute_blocks" if self.recompute == "none" else ""}
        return any(v == "auto" for k, v in vars(self).items() if k not in settled)

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


def size(task: Task, knobs: ZeroppKnobs, microbatch_size: int) -> SizedPlan:
    """A plan of PP x ZeRO-3 (x replicas), with all sizes but without an order of actions.

    Simple rules for what is ``auto``: one pipeline rank per node, two chunks per rank, units of as
    many microbatches as there are pipeline ranks (on CPUs all), a cap of a unit's activations.
    Raises InfeasibleError, whose message is one line.
    """
    _refuse(task, knobs)
    layout = _layout(task, knobs)
    microbatches = microbatches_per_step(task, layout, microbatch_size)
    hides = task.cluster.device.hides_collectives
    unit = unit_size(knobs.unit, layout.pp, microbatches, hides_collectives=hides)
    placement = loop_placement(layout.pp, layout.chunks)
    plan = SizedPlan(
        contender="zeropp",
        shape=task.shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered("zeropp", placement, microbatches, unit),
        cuts=(),
        program="zeropp",
        precision=task.precision,
        recompute=if_auto(knobs.recompute, "none"),
        recomputed=recomputed_blocks(knobs.recompute_blocks, len(placement)),
        reduce_every=if_auto(knobs.reduce_every, "unit"),
        reduce_dtype=knobs.reduce_dtype,
        prefetch=knobs.prefetch,
        split_backward=knobs.split_backward,
        activation_cap=if_auto(knobs.activation_cap, unit * layout.chunks),
        compile=knobs.compile,
    )
    _check_cap(plan)
    cuts = cut_by_cost(plan, task.cluster, split_blocks=_split_blocks(knobs))
    return replace(plan, cuts=cuts)


def _split_blocks(knobs: ZeroppKnobs) -> bool:
    return if_auto(knobs.split_blocks, False)


def _layout(task: Task, knobs: ZeroppKnobs) -> Layout:
    layout = resolve_degrees(task, knobs)
    layout = replace(
        layout,
        chunks=if_auto(knobs.chunks, default_chunks(task, layout)),
        replicate_zero=if_auto(knobs.replicate_zero, 0),
        placement=if_auto(knobs.placement, "dp_inner"),
    )
    check_stages(task, layout, split_blocks=_split_blocks(knobs))
    return layout


def _check_cap(plan: SizedPlan) -> None:
    unit, chunks = plan.schedule.unit, plan.layout.chunks
    smallest = smallest_cap(chunks, plan.num_microbatches, unit)
    if plan.activation_cap < smallest:
        needs = cap_needs(chunks, unit, smallest)
        raise InfeasibleError(f"contender.activation_cap={plan.activation_cap}: {needs}")


def _refuse(task: Task, knobs: ZeroppKnobs) -> None:
    check_split_blocks(task, knobs.split_blocks)
    if knobs.compile and task.shape.dropout > 0:
        raise InfeasibleError(
            f"contender.compile={knobs.compile}: compiled blocks draw dropout masks from a random "
            "generator of their own, which would make runs differ (use false, or model.dropout=0)"
        )


_CHUNKS = (1, 2, 3, 4, 6, 8, 12)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_REDUCE: tuple[ReduceEvery, ...] = ("unit", "step")
_UNITS = (0.5, 1, 2, 4)  # multiples of the pipeline ranks; one unit of the whole step is tried, too
# Multiples of U*V, raised to the smallest cap and lowered to the whole step.
_CAPS = (0.0, 1.0, 1.25, 1.5)


def families(point: SearchPoint[ZeroppKnobs]) -> Iterator[ZeroppKnobs]:
    """All knobs to try at a point, except for unit, cap and when gradients are reduced.

    They are set to what takes the least time: the largest unit, a cap that holds all activations
    of a step, and gradients that are reduced once per step. So the lower bound on a family's step
    time holds for all that ``members`` yields.
    """
    asked, degrees, m = point.asked, point.degrees, point.num_microbatches
    # Chunks of one block each have the smallest buffers.
    most = max(1, point.task.shape.layers // degrees.pp)
    for zero, placement, chunks in product(
        zero_choices(asked.replicate_zero, degrees),
        placement_choices(asked.placement, point),
        choices(asked.chunks, sorted({*_CHUNKS, most})),
    ):
        largest = -(-point.task.shape.layers // (degrees.pp * chunks))
        for recompute, blocks in recompute_choices(
            asked.recompute, asked.recompute_blocks, _RECOMPUTE, largest
        ):
            yield at_degrees(
                asked,
                degrees,
                replicate_zero=zero,
                placement=placement,
                chunks=chunks,
                recompute=recompute,
                recompute_blocks=blocks,
                split_blocks=if_auto(asked.split_blocks, not point.task.shape.dropout),
                unit=if_auto(asked.unit, m),
                activation_cap=m * chunks,
                reduce_every=if_auto(asked.reduce_every, "step"),
            )


def members(asked: ZeroppKnobs, family: ZeroppKnobs, plan: SizedPlan) -> Iterator[ZeroppKnobs]:
    """A family's knobs with every unit, activation cap and choice of when gradients are reduced,
    those with the least memory first."""
    m = plan.num_microbatches
    units = {min(m, max(1, int(plan.layout.pp * factor))) for factor in _UNITS} | {m}
    for unit in choices(asked.unit, sorted(units)):
        unit = min(unit, m)
        reductions = choices(asked.reduce_every, _REDUCE if unit < m else ("step",))
        for cap, reduce_every in product(_caps(asked, unit, plan), reductions):
            yield replace(family, unit=unit, activation_cap=cap, reduce_every=reduce_every)


def _caps(asked: ZeroppKnobs, unit: int, plan: SizedPlan) -> tuple[int, ...]:
    """Activation caps to try, in chunk-activations, ascending."""
    chunks, m = plan.layout.chunks, plan.num_microbatches
    smallest = smallest_cap(chunks, m, unit)
    wanted = {round(unit * chunks * factor) for factor in _CAPS}
    return choices(
        asked.activation_cap, sorted({min(max(cap, smallest), m * chunks) for cap in wanted})
    )


# At least two pipeline ranks, as ZeroPP would otherwise be FSDP; and at least two ranks per ZeRO-3
# group, as it would otherwise be a zero-bubble pipeline without ZeRO-3.
SPACE = Space(families=families, members=members, pipelines=(2, 0), shards=(2, 0))


ZEROPP = Contender(
    name="zeropp",
    label="ZeroPP",
    knobs=ZeroppKnobs,
    size=size,
    orders=drafts,
    space=SPACE,
    left_open=attrgetter("is_open"),
    search_effort=4,
    caveat=(
        "No full configuration of PP x ZeRO-3 with gathers once per unit (ZeroPP) has been found "
        "among published measurements: its simulated step is the sum of parts (kernels, pipeline, "
        "gathers) that are held against measurements."
    ),
    reproduces_dropout=True,
    trainer="zeropp.contender.trainer:build",
)
