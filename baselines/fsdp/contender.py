"""The entries of FSDP2, and of Megatron-FSDP, in the registry of contenders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Annotated, Literal

from zeropp.choose.contender import Contender
from zeropp.choose.planner import check_context, one_order, resolve_degrees
from zeropp.choose.space import (
    SearchPoint,
    Space,
    at_degrees,
    choices,
    offload_choices,
    one_member,
    recompute_choices,
    wire_choices,
)
from zeropp.choose.task import Task
from zeropp.price.programs import Program, gathers, program_named
from zeropp.schedule import lower
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import Action, Op, Schedule, ScheduleSizes, unordered
from zeropp.types.frozen import replace
from zeropp.types.layout import InfeasibleError, microbatches_per_step
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
class FSDPKnobs:
    """Settings of FSDP2. A knob that is ``auto`` is chosen by the tuner, or by a simple rule where
    the cluster has no prices (CPUs)."""

    name: Literal["fsdp", "megatron_fsdp"] = "fsdp"
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks of a ZeRO-3 group (dp_shard)
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # number of such groups (dp_replicate)
    context: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks that divide a sequence (a ring)
    recompute: Recompute | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the model's first N
    # Blocks whose tensors the host keeps for their backward (torch's ``offload_wrapper``,
    # torchtune's ``OffloadActivations``), evenly spread.
    offload_blocks: Annotated[int | Auto, AT_LEAST_0] = "auto"
    reduce_every: ReduceEvery | Auto = "auto"  # unit: per microbatch; step: per step
    # Type in which gradients are sent, and in which those of microbatches are added until then.
    reduce_dtype: WireType | Auto = "fp32"
    compile: bool | Auto = "auto"  # torch.compile every block
    reshard_after_forward: bool | Auto = "auto"  # false: parameters stay until the backward
    reshard_after_backward: bool | Auto = "auto"  # false: until the next microbatch's forward

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True, kw_only=True)
class MegatronFSDPKnobs(FSDPKnobs):
    """Settings of Megatron-FSDP, which reduces every microbatch's gradients; Transformer Engine's
    kernels are fused without a compiler. ``offload_blocks`` is ``cpu_offloading_num_layers``, which
    has to leave a layer and cannot be combined with recomputation."""

    name: Literal["megatron_fsdp"] = "megatron_fsdp"
    reduce_every: Literal["unit"] = "unit"
    compile: Literal[False] = False
    reshard_after_forward: Literal[True] = True
    reshard_after_backward: Literal[True] = True


def size(task: Task, knobs: FSDPKnobs, microbatch_size: int) -> SizedPlan:
    """A plan of ZeRO-3 over ``shard`` ranks, ``replicate`` times, with all sizes but without an
    order of actions. By a simple rule ``shard: auto`` is the GPUs of a node. Raises
    InfeasibleError."""
    pieces = task.shape.num_pieces
    layout = replace(resolve_degrees(task, knobs), chunks=pieces, exchange="ring")
    check_context(task.shape, layout)
    if isinstance(knobs, MegatronFSDPKnobs):
        check_cpu_offloading(knobs.offload_blocks, knobs.recompute, task.shape.layers)
    microbatches = microbatches_per_step(task.global_batch, layout, microbatch_size)
    wire = sent_type(task, knobs.reduce_dtype)
    return SizedPlan(
        contender=knobs.name,
        shape=task.shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered_pieces(pieces, microbatches),
        cuts=tuple(range(pieces + 1)),
        program=resharding(
            knobs.name,
            after_forward=if_auto(knobs.reshard_after_forward, True),
            after_backward=if_auto(knobs.reshard_after_backward, True),
        ),
        precision=task.precision,
        recompute=if_auto(knobs.recompute, "none"),
        recomputed=recomputed_pieces(knobs.recompute_blocks, pieces),
        offloaded=offloaded_pieces(if_auto(knobs.offload_blocks, 0), pieces),
        reduce_every=if_auto(knobs.reduce_every, "unit"),
        reduce_dtype=wire,
        sum_dtype=wire if knobs.reduce_every == "step" else "fp32",
        compile=if_auto(knobs.compile, False),
    )


def check_cpu_offloading(blocks: int | Auto, recompute: Recompute | Auto, layers: int) -> None:
    """Raises InfeasibleError for what Megatron-Core refuses beside ``cpu_offloading``
    (transformer_config.py)."""
    sent, again = if_auto(blocks, 0), if_auto(recompute, "none")
    if sent >= layers:
        raise InfeasibleError(
            f"contender.offload_blocks={sent}: Megatron-Core keeps one layer of {layers} on the "
            "device (use fewer)"
        )
    if sent and again != "none":
        raise InfeasibleError(
            f"contender.offload_blocks={sent}: Megatron-Core offloads nothing where it recomputes "
            f"(use 0, or contender.recompute=none for {again})",
            "Megatron-Core offloads nothing where it recomputes",
        )


def resharding(program: str, *, after_forward: bool, after_backward: bool = True) -> str:
    """The program that releases parameters so."""
    program += "" if after_forward else "+reshard_after_forward=false"
    return program + ("" if after_backward else "+reshard_after_backward=false")


def sent_type(task: Task, asked: WireType | Auto) -> WireType:
    """The type in which FSDP2 sends gradients, by a simple rule fp32; raises InfeasibleError for
    one narrower than that of compute."""
    if asked == "bf16" and task.precision == "fp32":
        raise InfeasibleError(
            "contender.reduce_dtype=bf16: gradients of fp32 parameters are sent in fp32 (use fp32, "
            "or precision=bf16)",
            "bf16 gradients need bf16",
        )
    return if_auto(asked, "fp32")


def recomputed_pieces(asked: int | Auto, pieces: int) -> tuple[int, ...]:
    """Recomputed blocks of every stage: 1 for the first ``asked`` blocks, else 0 (each stage is one
    piece, and the first piece is the embedding). ``auto`` gives (), which means all blocks."""
    return () if asked == "auto" else tuple(int(0 < i <= asked) for i in range(pieces))


def offloaded_pieces(count: int, pieces: int) -> tuple[int, ...]:
    """Offloaded blocks of every stage: 1 for ``count`` blocks, evenly spread, from the first one
    on, since the last one's backward follows at once."""
    layers = pieces - 2
    before = [-(-min(count, layers) * block // layers) for block in range(layers + 1)]
    return (0, *(after - sent for sent, after in pairwise(before)), 0) if count else ()


def by_piece(plan: SizedPlan, recompute_blocks: int | Auto) -> SizedPlan:
    """The plan without a pipeline in which every piece of the model is a stage of its own."""
    pieces = plan.shape.num_pieces
    return replace(
        plan,
        layout=replace(plan.layout, chunks=pieces),
        schedule=unordered_pieces(pieces, plan.num_microbatches),
        cuts=tuple(range(pieces + 1)),
        recomputed=recomputed_pieces(recompute_blocks, pieces),
    )


def unordered_pieces(pieces: int, microbatches: int) -> ScheduleSizes:
    """The sizes of gradient accumulation over microbatches. Every piece of the model (embedding,
    block, head) is a stage of its own on the only pipeline rank, because FSDP2 gathers piece by
    piece, for the forward and again for the backward of every microbatch."""
    return unordered("accumulation", (0,) * pieces, microbatches, 1)


def programs(plan: SizedPlan) -> Schedule:
    """The program of a plan, in its one order."""
    return accumulated(
        plan.schedule.num_stages,
        plan.num_microbatches,
        program_named(plan.program),
        gather=gathers(plan),
        reduce_every=plan.reduce_every,
        offloaded=plan.offloaded_stages,
    )


@lru_cache(maxsize=1024)
def accumulated(
    num_stages: int,
    num_microbatches: int,
    program: Program,
    *,
    gather: bool = True,
    reduce_every: ReduceEvery,
    offloaded: tuple[int, ...] = (),
) -> Schedule:
    """``accumulation`` with gathers, releases, reductions and offload, where every piece is a
    stage."""
    released = {
        Op.FORWARD: program.reshard_after_forward,
        Op.FULL_BACKWARD: program.reshard_after_backward,
    }
    kept = frozenset(op for op, is_released in released.items() if not is_released)
    return lower(
        accumulation(num_stages, num_microbatches),
        gather=gather,
        reduce_every=reduce_every,
        kept=kept,
        offloaded=offloaded,
    )


def accumulation(num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of gradient accumulation on one rank: microbatch by microbatch, a forward
    through all stages and then a backward. It has compute actions only."""
    program: list[Action] = []
    for microbatch in range(num_microbatches):
        program += [Action(stage, Op.FORWARD, microbatch) for stage in range(num_stages)]
        program += [
            Action(stage, Op.FULL_BACKWARD, microbatch) for stage in reversed(range(num_stages))
        ]
    return Schedule(
        name="accumulation",
        num_microbatches=num_microbatches,
        unit=1,
        stage_rank=(0,) * num_stages,
        programs=(tuple(program),),
    )


_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "mlp", "full")
_REDUCE: tuple[ReduceEvery, ...] = ("unit", "step")


def families(point: SearchPoint[FSDPKnobs]) -> Iterator[FSDPKnobs]:
    """All knobs to try at a point. A single microbatch has nothing to gain from gradients that are
    summed before they are reduced."""
    asked, degrees, layers = point.asked, point.degrees, point.task.shape.layers
    most = layers - isinstance(asked, MegatronFSDPKnobs)  # which keeps one at least
    recomputed = recompute_choices(asked.recompute, asked.recompute_blocks, _RECOMPUTE, layers)
    # Parameters that are not sharded take no time to gather, and after a single microbatch's
    # backward a release does nothing.
    again = (True, False) if degrees.shards > 1 else (True,)
    for reduce_every, wire, forward, backward, sent, (recompute, blocks) in product(
        choices(asked.reduce_every, _REDUCE if point.num_microbatches > 1 else _REDUCE[:1]),
        wire_choices(asked.reduce_dtype, point.task.precision),
        choices(asked.reshard_after_forward, again),
        choices(asked.reshard_after_backward, again if point.num_microbatches > 1 else (True,)),
        offload_choices(asked.offload_blocks, (most,), point.task.cluster),
        list(recomputed),
    ):
        yield at_degrees(
            asked,
            degrees,
            recompute=recompute,
            recompute_blocks=blocks,
            offload_blocks=sent,
            reduce_every=reduce_every,
            reduce_dtype=wire,
            compile=if_auto(asked.compile, True),
            reshard_after_forward=forward,
            reshard_after_backward=backward,
        )


SPACE = Space(families=families, members=one_member, pipelines=(1, 1), shards=(2, 0), contexts=True)


FSDP = Contender(
    name="fsdp",
    label="FSDP2",
    knobs=FSDPKnobs,
    size=size,
    orders=one_order(programs),
    space=SPACE,
    search_effort=3,
    # torchtitan and PyTorch's tutorial of FSDP2: MixedPrecisionPolicy(reduce_dtype=torch.float32).
    gradient_types={"reduce_dtype": "fp32"},
    published_as=(
        *("fsdp", "torchtitan", "torchtitan_compiled", "fms_fsdp", "fms_fsdp_eager"),
        *("kempnerforge_fsdp", "modalities", "llm_foundry", "huggingface_fsdp"),
    ),
    runs_with={"context": 1},
    trainer="baselines.fsdp.trainer:FsdpTrainer",
    late_imports=("torch.distributed.fsdp",),
    unrecorded="gathers and reductions",
)
# Megatron-FSDP shards as FSDP2 does, in Megatron-Core's wheel (``use_megatron_fsdp``) and under its
# layers. It is priced, but does not run here; with tensor parallelism it is not priced.
MEGATRON_FSDP = Contender(
    name="megatron_fsdp",
    label="Megatron-FSDP",
    knobs=MegatronFSDPKnobs,
    size=size,
    orders=one_order(programs),
    space=SPACE,
    # Megatron-LM's pull request 3067 prints both types; bf16 is faster.
    gradient_types={"reduce_dtype": "bf16"},
    published_as=("megatron_fsdp",),
)
