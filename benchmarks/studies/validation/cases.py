"""From a published row to the Plan that the simulator prices.

All of it comes from the columns of the row; if a column is blank, the registered program's value is
used. ZeRO-3 without a pipeline gathers every block for each forward and backward, as FSDP does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from baselines.fsdp.contender import accumulation
from benchmarks.specification.compose import preset
from benchmarks.studies.validation.rows import POWER_W, PublishedRow, UnpredictableError
from zeropp.cluster import Cluster, Device
from zeropp.contender.contender import ZEROPP, ZeroppKnobs
from zeropp.cost import balanced_cuts, cut_by_cost, model_flops_per_token, parameter_count
from zeropp.cost.flops import block_forward_flops
from zeropp.layout import Layout
from zeropp.literals import Precision, Recompute
from zeropp.plan import Candidate, Plan, Task
from zeropp.programs import Program, StateBytes, program_named
from zeropp.schedule import build, lower
from zeropp.schedule.program import Schedule
from zeropp.shape import ModelShape

# The cluster of a row: its device's preset in ``conf/cluster``, with the numbers of the row.
#
# ``device=stated`` is an A100 that is scaled to the row's peak, memory and memory bandwidth.
# ``power_w`` changes the clocks: the rate of products changes with the square root of the power,
# because power grows with frequency and voltage.


# One direction of 16 PCIe lanes: generation 3 and 4 in these devices, 5 in all later ones.
_PCIE_GB_S = {"v100": 15.5, "a100": 31.0, "a800": 31.0, "stated": 31.0}
_PCIE_5_GB_S = 63.0


def cluster_of(row: PublishedRow) -> Cluster:
    """The cluster that a row describes."""
    cluster = _base(row.device)
    device = cluster.device
    if row.peak_bf16_tflops:
        device = with_peak(device, row.peak_bf16_tflops)
    if row.power_w:
        device = at_rate(device, (row.power_w / POWER_W[row.device]) ** 0.5)
    stated = {"memory_gib": row.memory_gib, "memory_bandwidth_gb_s": row.memory_bandwidth_gb_s}
    device = replace(device, **_given(stated))
    intra, inter = cluster.intra, cluster.inter
    if row.intra_link == "pcie":
        intra = replace(intra, bandwidth_gb_s=_PCIE_GB_S.get(row.device, _PCIE_5_GB_S))
    if row.intra_gb_s:
        intra = replace(intra, bandwidth_gb_s=row.intra_gb_s)
    if row.nic_gbit_s:
        inter = replace(inter, bandwidth_gb_s=row.nic_gbit_s / 8)
    gpus = row.gpus_per_node or cluster.gpus_per_node
    nics = row.nics_per_node or min(cluster.nics_per_node, gpus)
    return replace(
        cluster, device=device, intra=intra, inter=inter, gpus_per_node=gpus, nics_per_node=nics
    )


def _given(values: dict[str, float | None]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def at_rate(device: Device, factor: float) -> Device:
    """The device with products that run ``factor`` times as fast."""
    newer = device.newer
    if newer is not None:
        newer = replace(newer, matmul_bf16_tflops=newer.matmul_bf16_tflops * factor)
    return replace(
        device,
        newer=newer,
        matmul_bf16_tflops=device.matmul_bf16_tflops * factor,
        matmul_fp32_tflops=device.matmul_fp32_tflops * factor,
    )


def with_peak(device: Device, tflops: float) -> Device:
    """The device with another dense 16-bit peak in TFLOP/s, of which it reaches the same share.
    Raises UnpredictableError where the device's own peak is not known."""
    if device.peak_bf16_tflops is None:
        raise UnpredictableError(f"peak_bf16_tflops={tflops:g}: {device.name}'s own is not known")
    scaled = at_rate(device, tflops / device.peak_bf16_tflops)
    return replace(scaled, peak_bf16_tflops=tflops)


@lru_cache(maxsize=16)
def _base(name: str) -> Cluster:
    """A device's preset; of a stated device, the A100's."""
    cluster: Cluster = preset("cluster", "a100" if name == "stated" else name, Cluster)
    if name == "stated":
        cluster = replace(cluster, name=name, device=replace(cluster.device, name=name))
    return cluster


# FLOPs as the source of a row counts them, and the peak of which its utilisation is a share.
#
# The formulas are those of arXiv 2104.04473 (eq. 3) and 2205.05198 (appendix). Attention counts in
# full, or half if the row's source counts only the causal half.


def flops_per_token(row: PublishedRow) -> float:
    """FLOPs per token of one step, with those of recomputation if the row's metric has them."""
    shape = row.shape
    attention = 4 * shape.seq * shape.hidden  # of one block's forward
    left_out = attention / 2 if row.attention_flops == "causal" else 0.0
    again = {"none": 0.0, "full": block_forward_flops(shape) - left_out, "selective": attention}
    counted = model_flops_per_token(shape) - 3 * shape.layers * left_out
    blocks = row.recompute_blocks or shape.layers
    return counted + (blocks * again[row.recompute] if row.measure.hardware else 0.0)


def peak_flops(row: PublishedRow, device: Device) -> float:
    """The FLOP/s of one GPU of which the row's utilisation is a share: those that the row states,
    or the dense peak of ``device``. Raises UnpredictableError if neither is known."""
    known = device.peak_fp32_tflops if row.dtype == "fp32" else device.peak_bf16_tflops
    peak = row.utilization_peak_tflops or known
    if peak is None:
        raise UnpredictableError(
            f"utilization_peak_tflops='': no peak of device={row.device} is known"
        )
    return peak * 1e12


# Refuses numbers that the row's own devices cannot have reached: they are in another unit, of all
# GPUs instead of one, or of one GPU instead of all.


# The slowest of the 2,900 committed rows reaches 0.8 % of its devices' peak.
_LEAST_SHARE = 0.002
_OVER_PRODUCTS = 1.25  # a peak that is not known, over the rate that products were seen to reach
_OVER_MEMORY = {"peak": 1.1, "activation": 10.0, "state": 10.0}  # the latter are also of formulas
# Dense peaks of narrower types over that of 16 bits: 8 bits on H100 and B200, 4 bits on B300.
_OVER_16_BIT = {"fp8": 2, "mxfp8": 2, "int8": 2, "fp4": 6, "nvfp4": 6, "mxfp4": 6}
_PASSES = {"layer_forward_time": 1, "layer_backward_time": 2, "layer_time": 3}


# A board of a device may differ by these factors from the preset: A100 of 40 GB, H100 on PCIe.
_OF_PRESET = (0.4, 1.25)
# Programs that shard parameters and divide nothing else.
_SHARD_ALONE = ("fsdp", "fms_fsdp", "fms_fsdp_eager", "llm_foundry")


def check_plausible(row: PublishedRow) -> None:
    """Raise UnpredictableError, in one line, if the row's machine, its program's degrees or its
    number cannot be right."""
    impossible = _machine(row)
    if impossible:
        raise UnpredictableError(impossible)
    device, kind = cluster_of(row).device, row.measure.kind
    if kind == "limit":
        return
    wrong = _memory(row, device) if kind == "memory" else _speed(row, device)
    if wrong:
        raise UnpredictableError(
            f"value={row.value}: {row.metric} in {row.unit} would be {wrong} (another unit, or of "
            "one GPU instead of all?)"
        )


def _machine(row: PublishedRow) -> str:
    """What is wrong with the devices, the nodes, or the degrees for this program."""
    cluster = _base(row.device)
    nominal = {name: getattr(cluster.device, name) for name in _OF_THE_BOARD}
    nominal |= {"power_w": POWER_W.get(row.device)}
    for name, whole in nominal.items():
        stated = getattr(row, name)
        if stated and whole and row.device != "stated":
            low, high = (whole * factor for factor in _OF_PRESET)
            if not low <= stated <= high:
                return f"{name}={stated:g}: a {row.device} has {whole:g} (from {low:g} to {high:g})"
    gpus = row.gpus_per_node or cluster.gpus_per_node
    if gpus % row.tp and row.tp % gpus:
        return f"gpus_per_node={gpus}: neither divides tp={row.tp} nor is divided by it"
    if row.program in _SHARD_ALONE and row.tp * row.pp > 1:
        return f"program={row.program}: shards parameters alone, not tp={row.tp} or pp={row.pp}"
    return ""


_OF_THE_BOARD = ("memory_gib", "memory_bandwidth_gb_s", "peak_bf16_tflops")


def _speed(row: PublishedRow, device: Device) -> str:
    """What is wrong with a speed: the work that it needs at least, over the devices' peak."""
    peak = max(
        device.peak_bf16_tflops or _OVER_PRODUCTS * device.matmul_bf16_tflops,
        device.peak_fp32_tflops or 0.0,
    )
    peak *= _OVER_16_BIT.get(row.dtype, 1)
    share = _least_flops(row) / measured_s(row, device) / (peak * 1e12)
    if share > 1:
        return f"{share:.3g} times the peak of {row.device}"
    return f"{share:.2%} of the peak of {row.device}" if share < _LEAST_SHARE else ""


def _least_flops(row: PublishedRow) -> float:
    """FLOPs of one GPU in a step, or in a block's pass: attention counts its causal half, and
    nothing is recomputed."""
    half = 2 * row.seq * row.hidden  # per token, of one block's forward
    if row.measure.kind == "layer":
        tokens = row.micro_batch * row.seq / row.tp
        return tokens * _PASSES[row.metric] * (block_forward_flops(row.shape) - half)
    each = model_flops_per_token(row.shape) - 3 * row.layers * half
    return row.global_batch * row.seq * each / row.num_gpus


def measured_s(row: PublishedRow, device: Device) -> float:
    """The time of a step, or of a block's pass, that the row's number says."""
    kind, number = row.measure.kind, row.measured / row.measure.units[row.unit]
    if kind in ("time", "layer"):
        return number
    each = row.num_gpus if row.measure.per_gpu else 1
    if kind == "rate":
        counted = {"steps": 1, "samples": row.global_batch, "tokens": row.global_batch * row.seq}
        return counted[row.metric.partition("_")[0]] / (number * each)
    if kind == "utilization":
        number, each = number * peak_flops(row, device), row.num_gpus
    return row.global_batch * row.seq * flops_per_token(row) / (number * each)


def _memory(row: PublishedRow, device: Device) -> str:
    """What is wrong with an amount of memory: it is less than 16-bit parameters or one boundary of
    a stage take, or more than the device has."""
    stated, least = row.measured / row.measure.units[row.unit], 2.0 * parameter_count(row.shape)
    least /= row.num_gpus
    what = "16-bit parameters, spread over all GPUs"
    if row.metric == "activation_memory":
        least = 2.0 * row.micro_batch * row.seq * row.hidden / row.tp
        what = "the input of one block"
    if stated < least:
        return f"{stated / 2**30:.3g} GiB, less than the {least / 2**30:.3g} GiB of {what}"
    most = _OVER_MEMORY[row.metric.partition("_")[0]] * device.memory_gib
    if stated > most * 2**30:
        return f"{stated / 2**30:.4g} GiB, and {row.device} has {device.memory_gib:g} GiB"
    return ""


_MOST_BLOCKS = 250_000  # blocks x microbatches; a wrong row could otherwise take for ever
_UNPRICED_SCHEDULES = ("dualpipe", "dualpipev", "chimera", "hanayo", "v_half", "v_min", "seq1f1b")
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
EIGHT_BIT = ("fp8", "mxfp8")  # of the products of blocks; all else has 16 bits


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything on which a row's prediction depends; equal cases share one simulation."""

    shape: ModelShape
    cluster: Cluster
    program: Program
    layout: Layout
    schedule: str
    zero3: bool
    microbatch: int
    num_microbatches: int
    recompute: Recompute
    precision: Precision
    recompute_blocks: int | None = None  # of the whole model; None: all
    cuts: tuple[float, ...] | None = None  # None: by the program's rule
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
    precision = _precision(row)  # peaks of other types are not known, so no share of them is either
    check_plausible(row)
    return Case(
        shape=replace(row.shape, seq=row.seq // row.cp),
        cluster=preset("cluster", cluster_name, Cluster) if cluster_name else cluster_of(row),
        program=program_of(row),
        layout=_layout(row),
        schedule="1f1b" if row.schedule == "none" else row.schedule,
        zero3=row.zero == 3,
        microbatch=row.micro_batch,
        num_microbatches=count,
        recompute=row.recompute,
        precision=precision,
        recompute_blocks=row.recompute_blocks,
        cuts=row.cuts,
        knobs=row.knobs,
    )


def _refuse_what_has_no_price(row: PublishedRow) -> None:
    if row.ep > 1:
        raise UnpredictableError(f"ep={row.ep}: no price for this kind")
    if row.offload != "none":
        raise UnpredictableError(f"offload={row.offload}: no price for the host's memory")
    if row.schedule in _UNPRICED_SCHEDULES:
        raise UnpredictableError(f"schedule={row.schedule}: no generator")
    stages = row.pp * row.chunks
    if row.recompute_blocks and row.recompute_blocks % stages:
        raise UnpredictableError(
            f"recompute_blocks={row.recompute_blocks}: no price where they do not divide over "
            f"pp={row.pp} x chunks={row.chunks} stages"
        )
    if row.schedule == "zeropp" and (row.tp > 1 or row.zero in (1, 2)):
        raise UnpredictableError(
            f"schedule=zeropp: no price with tp={row.tp}, zero={row.zero} (tp=1, zero=0 or 3; "
            "ZeRO-1 over replicas is knobs=replicate_zero=1)"
        )
    if row.zero == 3 and not program_named(row.program).zero3:
        raise UnpredictableError(f"program={row.program}: no price for its ZeRO-3")


def _precision(row: PublishedRow) -> Precision:
    if row.dtype == "fp32":
        return "fp32"
    eight_bit = row.dtype in EIGHT_BIT and _base(row.device).device.eight_bit_gain is not None
    if row.dtype in ("fp16", "bf16") or eight_bit:
        return "bf16"
    raise UnpredictableError(f"dtype={row.dtype}: no rate for products of this type")


def _layout(row: PublishedRow) -> Layout:
    ranks = row.dp * row.cp  # gradients are summed over the slices of a sequence, too
    shard = (row.zero3_group or ranks) if row.zero == 3 else 1
    return Layout(
        pp=row.pp,
        tp=row.tp,
        shard=shard,
        replicate=ranks // shard,
        chunks=row.chunks,
        replicate_zero=1 if row.zero in (1, 2) and row.zero1_group is None else 0,
        sequence_parallel=row.sequence_parallel,
    )


def program_of(row: PublishedRow) -> Program:
    """The registered program, with the traits that the row states differently."""
    program, state = program_named(row.program), program_named(row.program).state(_precision(row))
    if row.gradient_dtype:
        state = replace(state, gradients=_BYTES[row.gradient_dtype])
    if row.reduce_dtype:
        state = replace(state, reduced=_BYTES[row.reduce_dtype])
    stated = {
        "flash": None if row.attention is None else row.attention == "flash",
        "overlap_reduction": row.overlap_gradients,
        "overlap_tensor": row.overlap_tensor,
        "traffic_factor": 1.0 if row.compiled else None,  # element-wise chains are one kernel
        "zero1_group": row.zero1_group,
        "eight_bit": row.dtype in EIGHT_BIT or None,
        "slices": row.cp,
    }
    changed = {name: value for name, value in stated.items() if value is not None}
    return replace(_with_state(program, state, _precision(row)), **changed)  # type: ignore[arg-type]


def _with_state(program: Program, state: StateBytes, precision: Precision) -> Program:
    return replace(program, bf16=state) if precision == "bf16" else replace(program, fp32=state)


def _cuts(case: Case, stages: int) -> tuple[float, ...]:
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
    cuts: tuple[float, ...]
    try:
        if case.schedule == "zeropp":
            return _zeropp_plan(case)
        if case.zero3 and case.layout.pp == 1:
            schedule, cuts = _fsdp_schedule(case.shape, case.num_microbatches)
        else:
            schedule = _pipeline_schedule(case)
            cuts = _cuts(case, schedule.num_stages)
    except ValueError as error:
        raise UnpredictableError(str(error)) from error
    plan = Plan(
        contender=case.program.name,
        shape=case.shape,
        layout=case.layout,
        microbatch_size=case.microbatch,
        schedule=schedule,
        cuts=cuts,
        program=case.program.name,
        precision=case.precision,
        recompute=case.recompute,
        recomputed=_recomputed(case, cuts),
    )
    if case.program.spread == "cost" and case.layout.pp > 1 and not case.cuts:
        return replace(plan, cuts=cut_by_cost(plan, case.cluster, case.program))
    return plan


def _zeropp_plan(case: Case) -> Plan:
    """The plan that ZeroPP's own planner makes of the case, with the case's program."""
    layout, stages = case.layout, case.layout.pp * case.layout.chunks
    blocks = case.recompute_blocks
    knobs = replace(
        case.knobs or ZeroppKnobs(),
        pp=layout.pp,
        shard=layout.shard,
        replicate=layout.replicate,
        chunks=layout.chunks,
        recompute=case.recompute,
        recompute_blocks="auto" if blocks is None else blocks // stages,
    )
    batch = case.microbatch * case.num_microbatches * layout.dp
    task = Task(
        shape=case.shape,
        cluster=case.cluster,
        num_gpus=layout.world,
        global_batch=batch,
        precision=case.precision,
    )
    plan = ZEROPP.plan(task, Candidate(knobs, case.microbatch))
    return replace(plan, program=case.program.name)


def _recomputed(case: Case, cuts: tuple[float, ...]) -> tuple[int, ...]:
    """The number of blocks that each stage recomputes; empty if all blocks are. Every stage has the
    same number, except where every piece is a stage: then these are the model's first blocks."""
    blocks, stages = case.recompute_blocks, len(cuts) - 1
    if blocks is None:
        return ()
    if stages == case.shape.num_pieces:
        return tuple(int(0 < stage <= blocks) for stage in range(stages))
    return (blocks // stages,) * stages


def _pipeline_schedule(case: Case) -> Schedule:
    pp, count = case.layout.pp, case.num_microbatches
    if case.schedule == "zb_h2":
        made = build(
            "zeropp", num_ranks=pp, chunks=1, num_microbatches=count, unit=count,
            activation_cap=2 * pp,
        )  # fmt: skip
    else:
        made = build(case.schedule, num_ranks=pp, chunks=case.layout.chunks, num_microbatches=count)
    if pp == 1 and not case.zero3:
        return made
    return lower(made, gather=case.zero3, reduce_every="step")


@lru_cache(maxsize=1024)
def _fsdp_schedule(shape: ModelShape, count: int) -> tuple[Schedule, tuple[int, ...]]:
    """A schedule in which every piece is a stage, which is gathered for each forward and backward
    and reduced after the backward."""
    order = accumulation(shape.num_pieces, count)
    return lower(order, gather=True, reduce_every="unit"), tuple(range(shape.num_pieces + 1))


def even_cuts(shape: ModelShape, stages: int, *, blocks: bool = False) -> tuple[int, ...]:
    """Cuts with equally many blocks per stage; the embedding is in the first, the head in the last.

    If the blocks do not divide, embedding and head count as one block each (BLOOM, Llama 3 and
    arXiv 2401.10241 chose their depths for this), unless ``blocks`` is true. The last stages get
    the remainder.
    """
    first = 1 if blocks or shape.layers % stages == 0 else 0
    each, more = divmod(shape.num_pieces - 2 * first, stages)
    inner = (first + each * s + max(0, s - (stages - more)) for s in range(1, stages))
    return (0, *inner, shape.num_pieces)


def module_cuts(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Cuts with equally many modules per stage: embedding, blocks, final norm and head, of which
    the last two are one piece. The first stages get the remainder."""
    modules = shape.num_pieces + 1
    if modules < 2 * stages:
        raise ValueError(f"{stages} stages for {modules} modules: the head would be a stage alone")
    each, more = divmod(modules, stages)
    return (*(each * s + min(s, more) for s in range(stages)), shape.num_pieces)
