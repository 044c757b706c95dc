"""From a published row to the Plan that the simulator prices.

All of it comes from the columns of the row; if a column is blank, the registered program's value is
used. ZeRO-3 without a pipeline gathers every block for each forward and backward, as FSDP does.
ZeRO-2 of such a program is FSDP's ``SHARD_GRAD_OP``, which gathers a block for a forward and keeps
it until its backward has ended; that of others shards sums of gradients alone, as DeepSpeed does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from baselines.fsdp.contender import accumulated, offloaded_pieces, recomputed_pieces
from baselines.torch_pp.contender import torch_schedule
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks.specification import DTYPES
from benchmarks.specification.reading import preset
from benchmarks.validation.rows import PublishedRow, UnpredictableError
from benchmarks.validation.stated import cluster_of, preset_of
from zeropp.choose.planner import recomputed_blocks
from zeropp.choose.task import Candidate, Task
from zeropp.price import balanced_cuts, cut_by_cost
from zeropp.price.cluster import Cluster
from zeropp.price.memory import zero1_ranks
from zeropp.price.programs import Program, program_as_run, program_named
from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.passes import with_step_end
from zeropp.schedule.plan import Plan, SizedPlan
from zeropp.schedule.program import Schedule
from zeropp.types.layout import Layout
from zeropp.types.literals import PRECISIONS, Auto, Precision, Recompute, ReduceEvery, ReplicateZero
from zeropp.types.shape import ModelShape

_MOST_BLOCKS = 250_000  # blocks x microbatches; a wrong row could otherwise take for ever
_UNPRICED_SCHEDULES = ("dualpipe", "dualpipev", "chimera", "hanayo", "v_half", "v_min", "seq1f1b")
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything on which a row's prediction depends; equal cases share one simulation."""

    shape: ModelShape
    cluster: Cluster
    program: Program
    layout: Layout
    schedule: str
    gathers: bool  # parameters are sharded, and gathered piece by piece
    microbatch: int
    num_microbatches: int
    recompute: Recompute
    precision: Precision
    recompute_blocks: int | Auto = "auto"  # the first N of every stage; auto: all
    offload_blocks: int = 0
    cuts: tuple[int, ...] | None = None  # None: by the program's rule
    knobs: ZeroppKnobs | None = None  # of schedule=zeropp; None: all at their defaults


def case_of(row: PublishedRow, cluster_name: str | None = None) -> Case:
    """The case of a row, on the cluster preset ``cluster_name`` if one is given. Raises
    UnpredictableError if the case has no price."""
    _refuse_what_has_no_price(row)
    count = row.global_batch // (row.micro_batch * row.dp)
    if row.layers * count > _MOST_BLOCKS:
        raise UnpredictableError(f"layers={row.layers} x {count} microbatches: too many")
    if row.schedule in ("interleaved_1f1b", "interleaved_zb") and count % row.pp:
        raise UnpredictableError(
            f"global_batch={row.global_batch}: {count} microbatches do not divide into groups of "
            f"pp={row.pp}, as schedule={row.schedule} needs"
        )
    cluster = preset("cluster", cluster_name, Cluster) if cluster_name else cluster_of(row)
    program = program_of(row)
    # With a pipeline ZeRO-2 is ZeRO-1: programs keep the sums of microbatches in flight whole. With
    # ZeRO-2 parameters are sharded, too, where the program has no buffers for gradients that stay
    # on their rank, as FSDP has none.
    zero = 1 if row.zero == 2 and row.pp > 1 else row.zero
    sharded = zero == 3 or (zero == 2 and program.zero3 and not program.bf16.bucket)
    shard = (row.zero3_group or row.dp) if sharded else 1
    return Case(
        shape=replace(row.shape, document=row.document or 0),
        cluster=cluster,
        program=program,
        layout=Layout(
            pp=row.pp,
            tp=row.tp,
            context=row.cp,
            shard=shard,
            replicate=row.dp // shard,
            context_copies=not sharded,
            exchange="ring",
            chunks=row.chunks,
            replicate_zero=0 if sharded or row.zero1_group else cast("ReplicateZero", zero),
            sequence_parallel=row.sequence_parallel,
        ),
        schedule="1f1b" if row.schedule == "none" else row.schedule,
        gathers=sharded and not program.live_parameters,
        microbatch=row.micro_batch,
        num_microbatches=count,
        recompute=row.recompute,
        precision=_precision(row),
        recompute_blocks=(row.recompute_blocks or 0) // (row.pp * row.chunks) or "auto",
        offload_blocks=row.offload_blocks or 0,
        cuts=row.cuts,
        knobs=row.knobs,
    )


def _refuse_what_has_no_price(row: PublishedRow) -> None:
    if row.ep > 1:
        raise UnpredictableError(f"ep={row.ep}: cannot be simulated")
    by_block = row.zero == 3 and row.pp == 1 and not program_named(row.program).live_parameters
    if row.offload != "none" and not (by_block and row.offload_blocks):
        raise UnpredictableError(
            f"offload={row.offload}: the host's memory cannot be simulated, except "
            "offload_blocks with ZeRO-3 that gathers block by block"
        )
    if row.schedule in _UNPRICED_SCHEDULES:
        raise UnpredictableError(f"schedule={row.schedule}: no generator")
    if row.recompute_blocks and row.recompute_blocks % (row.pp * row.chunks):
        raise UnpredictableError(
            f"recompute_blocks={row.recompute_blocks}: cannot be simulated where they do not "
            f"divide over pp={row.pp} x chunks={row.chunks} stages"
        )
    if row.schedule == "zeropp" and (row.tp > 1 or row.zero in (1, 2)):
        raise UnpredictableError(
            f"schedule=zeropp: cannot be simulated with tp={row.tp}, zero={row.zero} (tp=1, "
            "zero=0 or 3; ZeRO-1 over replicas is knobs=replicate_zero=1)"
        )
    if row.zero == 3 and not program_named(row.program).zero3:
        raise UnpredictableError(f"program={row.program}: its ZeRO-3 cannot be simulated")


def _precision(row: PublishedRow) -> Precision:
    precision = next((name for name in PRECISIONS if row.dtype in DTYPES[name]), None)
    if precision and (precision != "fp8" or preset_of(row.device).device.eight_bit_gain):
        return precision
    raise UnpredictableError(f"dtype={row.dtype}: no rate for products of this type")


def program_of(row: PublishedRow) -> Program:
    """The registered program, with the traits that the row states differently."""
    program = program_as_run(
        row.program, compiled=bool(row.compiled), rotates=row.family == "llama"
    )
    precision = _precision(row)
    state, own = program.state(precision), program.scaling
    if row.gradient_dtype:
        state = replace(state, gradients=_BYTES[row.gradient_dtype])
    if row.reduce_dtype:
        state = replace(state, reduced=_BYTES[row.reduce_dtype])
    stated = {
        "flash": None if row.attention is None else row.attention == "flash",
        "overlap_reduction": row.overlap_gradients,
        "reshard_after_forward": False if row.zero == 2 else None,
        "overlap_tensor": row.overlap_tensor,
        "traffic_factor": 1.0 if row.compiled else None,  # element-wise chains are one kernel
        "zero1_group": row.zero1_group,
        "scaling": row.scaling or ("mx" if row.dtype == "mxfp8" and own != "fused" else None),
    }
    changed = {name: value for name, value in stated.items() if value is not None}
    return replace(program, **changed, **{"fp32" if precision == "fp32" else "bf16": state})  # type: ignore[arg-type]


def _cuts(case: Case, stages: int) -> tuple[int, ...]:
    """Where the model is cut into stages: as the row says, or by rules that need no prices."""
    if case.cuts:
        return case.cuts
    if case.program.spread == "flops":
        return balanced_cuts(case.shape, stages)
    if case.program.spread == "modules":
        return module_cuts(case.shape, stages)
    return even_cuts(case.shape, stages, blocks=case.program.spread == "blocks")


@lru_cache(maxsize=4096)
def plan_of(case: Case) -> Plan:
    """The case's Plan; raises UnpredictableError if its schedule does not exist for the sizes."""
    every: ReduceEvery = "unit"
    recomputed = recomputed_blocks(case.recompute_blocks, case.layout.pp * case.layout.chunks)
    offloaded: tuple[int, ...] = ()
    try:
        if case.schedule == "zeropp":
            return _zeropp_plan(case)
        if case.gathers and case.layout.pp == 1:
            every = "step" if case.program.reduces_once else "unit"
            pieces, count = case.shape.num_pieces, case.num_microbatches
            offloaded = offloaded_pieces(case.offload_blocks, pieces)
            schedule = accumulated(
                pieces,
                count,
                case.program,
                reduce_every=every,
                offloaded=tuple(s for s, blocks in enumerate(offloaded) if blocks),
            )
            cuts = tuple(range(pieces + 1))
            recomputed = recomputed_pieces(case.recompute_blocks, pieces)
        else:
            schedule = _pipeline_schedule(case)
            cuts = _cuts(case, schedule.num_stages)
    except ValueError as error:
        raise UnpredictableError(str(error)) from error
    plan = SizedPlan(
        contender=case.program.name,
        shape=case.shape,
        layout=case.layout,
        microbatch_size=case.microbatch,
        schedule=schedule,
        cuts=cuts,
        program=case.program.name,
        precision=case.precision,
        recompute=case.recompute,
        recomputed=recomputed,
        offloaded=offloaded,
        reduce_every=every,
    )
    if case.program.spread == "cost" and case.layout.pp > 1 and not case.cuts:
        plan = replace(plan, cuts=cut_by_cost(plan, case.cluster, case.program))
    # ZeRO-1 may be over a part of the replicas, which a layout cannot say.
    end = replace(plan.step_end, gathers_updated=zero1_ranks(case.layout, case.program) > 1)
    return plan.with_programs(with_step_end(schedule, end))


def _zeropp_plan(case: Case) -> Plan:
    """The plan that ZeroPP's own planner makes of the case, with the case's program."""
    layout = case.layout
    knobs = replace(
        case.knobs or ZeroppKnobs(),
        pp=layout.pp,
        context=layout.context,
        shard=layout.shard,
        replicate=layout.replicate,
        chunks=layout.chunks,
        recompute=case.recompute,
        recompute_blocks=case.recompute_blocks,
    )
    task = Task(
        shape=case.shape,
        cluster=case.cluster,
        num_gpus=layout.world,
        global_batch=case.microbatch * case.num_microbatches * layout.dp,
        precision=case.precision,
    )
    plan = ZEROPP.plan(task, Candidate(knobs, case.microbatch))
    return replace(plan, program=case.program.name)


def _pipeline_schedule(case: Case) -> Schedule:
    pp, count = case.layout.pp, case.num_microbatches
    if pp > 1 and case.program.torch_stages:
        return torch_schedule(
            case.schedule,
            num_ranks=pp,
            chunks=case.layout.chunks,
            num_microbatches=count,
            gathered=case.gathers,
        )
    if case.schedule == "zb_h2":
        made = build(
            "zeropp", num_ranks=pp, chunks=1, num_microbatches=count, unit=count,
            activation_cap=2 * pp,
        )  # fmt: skip
    else:
        made = build(case.schedule, num_ranks=pp, chunks=case.layout.chunks, num_microbatches=count)
    if pp == 1 and not case.gathers:
        return made
    return lower(made, gather=case.gathers, reduce_every="step")


def even_cuts(shape: ModelShape, stages: int, *, blocks: bool = False) -> tuple[int, ...]:
    """Cuts with equally many blocks per stage; the embedding is in the first, the head in the last.

    If the blocks do not divide, embedding and head count as one block each (BLOOM, Llama 3 and
    arXiv 2401.10241 chose their depths for this), unless ``blocks`` is true. The last stages get
    the remainder.
    """
    first = 1 if blocks or shape.layers % stages == 0 else 0
    per_stage, more = divmod(shape.num_pieces - 2 * first, stages)
    inner = (first + per_stage * s + max(0, s - (stages - more)) for s in range(1, stages))
    return (0, *inner, shape.num_pieces)


def module_cuts(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Cuts with equally many modules per stage: embedding, blocks, final norm and head. The last
    two are one piece. The first stages get the remainder."""
    modules = shape.num_pieces + 1
    if modules < 2 * stages:
        raise ValueError(f"{stages} stages for {modules} modules: the head would be a stage alone")
    per_stage, more = divmod(modules, stages)
    return (*(per_stage * s + min(s, more) for s in range(stages)), shape.num_pieces)
