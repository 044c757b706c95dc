"""From a row to the Plan that the simulator prices, by written rules.

Blank degrees are 1, data parallelism is what remains of the GPUs. Blank microbatch: 1 with a
pipeline, else the data-parallel rank's batch, at most 4. Blank global batch: the notes' gradient
accumulation, else eight microbatches a pipeline stage (one without a pipeline), times data
parallelism. Blank chunks of an interleaved schedule: the most up to 4 that divide the layers of a
rank, else the fewest above 1; of the zero-bubble papers', one a layer. Blank schedule: what the
program does by itself. Layers are spread evenly (``even_cuts``). ZeRO-3 without a pipeline gathers
every block for every pass (FSDP).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.specification.compose import preset
from benchmarks.studies.validation.clusters import cluster_of
from benchmarks.studies.validation.programs import (
    interleaves,
    one_layer_chunks,
    program_of,
    splits_sequences,
    spread_of,
)
from benchmarks.studies.validation.rows import (
    Row,
    UnpredictableError,
    number,
    recompute_text,
    shape_of,
)
from zeropp.cluster import Cluster
from zeropp.cost import balanced_cuts
from zeropp.layout import Layout, divisors
from zeropp.literals import Precision, Recompute
from zeropp.plan import Plan
from zeropp.programs import Program, Spread
from zeropp.schedule import build, lower
from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Schedule
from zeropp.shape import ModelShape

_MOST_BLOCKS = 10**6  # a step of a row that is read wrongly could be simulated for ever


@dataclass(frozen=True)
class Case:
    """Everything that a row's prediction depends on; equal cases share one simulation."""

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
    spread: Spread


def case_of(row: Row, cluster_name: str | None = None) -> Case:
    """Understand a row; raises UnpredictableError with the reason."""
    for field in ("cp", "ep"):
        if (number(row, field) or 1) > 1:
            raise UnpredictableError(f"{field}={row[field]}: no price for this parallelism")
    shape = shape_of(row)
    named = preset("cluster", cluster_name, Cluster) if cluster_name else None
    cluster = named or cluster_of(row.get("gpu", ""))
    schedule = schedule_of(row)
    _refuse_offload(row)
    layout = _layout(row, shape, cluster, schedule)
    microbatch, count = _batch(row, layout, shape.seq)
    if shape.layers * count > _MOST_BLOCKS:
        raise UnpredictableError(f"{shape.layers} layers x {count} microbatches: too many")
    if schedule == "interleaved_1f1b" and count % layout.pp:
        raise UnpredictableError(f"interleaved: {count} microbatches on {layout.pp} stages")
    return Case(
        shape=shape,
        cluster=cluster,
        program=program_of(row),
        layout=layout,
        schedule=schedule,
        zero3=_zero_stage(row) == 3,
        microbatch=microbatch,
        num_microbatches=count,
        recompute=_recompute(row),
        precision=_precision(row),
        spread=spread_of(row),
    )


_OFFLOAD = re.compile(
    r"(?<!no )(?<!without )\b(?:cpu|nvme)?[- ]?offload(?!\w*[ =:]*(?:none|no|off|false)\b)"
)


def _refuse_offload(row: Row) -> None:
    """Nothing here prices parameters or optimizer steps on the host."""
    for field in ("zero_stage", "schedule", "recompute", "notes", "table"):
        if _OFFLOAD.search(row.get(field, "").lower()):
            raise UnpredictableError(f"{field}={row[field]!r}: no price for offloading to the host")


def schedule_of(row: Row) -> str:
    """The generator that a row's words mean: one of ``zeropp.schedule``'s names, or ``zb_cap``
    (zero bubble with twice the activations of 1F1B, arXiv 2401.10241's ZB-H2 and ZB-2p)."""
    text = row.get("schedule", "").lower()
    rules = (
        (r"dualpipe|chimera|pipedream|hanayo|bitpipe|v-?half|v-?min|seq1f1b|slimpipe", ""),
        (r"zb-?v|v-?zb|zero.?bubble.?v", "zbv"),
        (r"zb-?(?:h2|2p)", "zb_cap"),
        (r"zb|zero.?bubble", "zb_h1"),
        (r"interleaved_overlap", "1f1b"),
        (r"bfs|breadth|looped", "looped_bfs"),
        (r"gpipe|all.?forward", "gpipe"),
        (r"zeropp", "zeropp"),
        (r"interleav|1f1b-?i|virtual", "interleaved_1f1b"),
    )
    found = next((name for words, name in rules if re.search(words, text)), None)
    if found == "":
        raise UnpredictableError(f"schedule={row['schedule']!r}: no generator")
    if found is None:
        alone = not text.strip() and interleaves(row)
        chunks = number(row, "vp") or (2 if alone else 1)
        found = "interleaved_1f1b" if chunks > 1 else "1f1b"
    return found if (number(row, "pp") or 1) > 1 else "1f1b"


def _layout(row: Row, shape: ModelShape, cluster: Cluster, schedule: str) -> Layout:
    tp, pp = number(row, "tp") or 1, number(row, "pp") or 1
    gpus = number(row, "n_gpus") or tp * pp * (number(row, "dp") or 1)
    dp = number(row, "dp") or max(1, gpus // (tp * pp))
    if tp * pp * dp != gpus:
        raise UnpredictableError(f"tp={tp} x pp={pp} x dp={dp} is not n_gpus={gpus}")
    chunks = _chunks(row, shape, pp, schedule)
    if pp * chunks > shape.num_pieces:
        raise UnpredictableError(f"pp={pp} x vp={chunks}: more stages than layers={shape.layers}")
    shard, zero = 1, _zero_stage(row)
    if zero == 3:
        text = (
            f"{row.get('schedule', '')} {row.get('notes', '')} {row.get('zero_stage', '')}".lower()
        )
        hybrid = "hybrid" in text or "hsdp" in text
        shard = min(dp, cluster.gpus_per_node // tp or 1) if hybrid else dp
    text = recompute_text(row)
    sequence = tp > 1 and "no sp" not in text and bool(re.search(r"sequence|\bsp\b", text))
    sequence = sequence or (tp > 1 and "no sp" not in text and splits_sequences(row))
    one = zero in (1, 2) and program_of(row).zero1_group == 0
    return Layout(pp, tp, shard, dp // shard, chunks, 1 if one else 0, sequence)


def _chunks(row: Row, shape: ModelShape, pp: int, schedule: str) -> int:
    if schedule == "zbv":
        return 2
    if pp == 1 or schedule in ("1f1b", "gpipe", "zb_h1", "zb_cap"):
        return 1
    stated = number(row, "vp")
    if stated is not None:
        return stated
    pieces = shape.layers if shape.layers % pp == 0 else shape.num_pieces
    fits = divisors(max(1, pieces // pp))
    if one_layer_chunks(row):
        return fits[-1]
    return max([v for v in fits if 1 < v <= 4] or fits[1:2] or [1])


def _batch(row: Row, layout: Layout, seq: int) -> tuple[int, int]:
    """(microbatch, microbatches a step); a global batch in tokens is divided by the sequence."""
    total, size = number(row, "global_batch"), number(row, "micro_batch")
    if total is not None and "tok" in row.get("global_batch", "").lower():
        total = max(1, round(total / seq))
    if size is None:
        size = 1 if layout.pp > 1 or total is None else max(1, min(4, total // layout.dp))
    steps = re.search(r"(?:grad_accum|gas|micro_num)\D{0,3}(\d+)", row.get("notes", "").lower())
    if total is None:
        count = int(steps.group(1)) if steps else (8 * layout.pp if layout.pp > 1 else 1)
        return size, count
    if total < size * layout.dp:
        raise UnpredictableError(
            f"global_batch={total} is less than micro_batch={size} x dp={layout.dp}"
        )
    return size, max(1, round(total / (size * layout.dp)))


def _zero_stage(row: Row) -> int:
    text = row.get("zero_stage", "")
    match = re.search(r"\d", text)
    if match:
        return int(match.group())
    words = f"{row.get('schedule', '')} {text}".lower()
    if re.search(r"full_shard|fsdp|fully_shard|zero-?3", words):
        return 3
    return 1 if program_of(row).overlap_updated else 0


def _recompute(row: Row) -> Recompute:
    text = row.get("recompute", "").lower()
    if "no recompute" in text or text in ("no", "false", "off"):
        return "none"
    if "selective" in text:
        return "selective"
    return "full" if re.search(r"full|yes|true|block|checkpoint", text) else "none"


def _precision(row: Row) -> Precision:
    text = row.get("dtype", "").lower()
    for field in ("dtype", "schedule", "table"):
        if re.search(r"(?<!no )\b(?:amp_)?(?:fp8|float8|mxfp8|int8)", row.get(field, "").lower()):
            raise UnpredictableError(f"{field}={row[field]!r}: no rate for 8-bit products")
    return "fp32" if re.search(r"\b(fp32|float32|tf32)\b", text) and "mixed" not in text else "bf16"


@lru_cache(maxsize=4096)
def plan_of(case: Case) -> Plan:
    """The case's Plan; raises UnpredictableError where no schedule of that name fits the sizes."""
    cuts: tuple[int, ...]
    try:
        if case.zero3 and case.layout.pp == 1:
            schedule, cuts = _fsdp_schedule(case.shape, case.num_microbatches)
        else:
            schedule = _pipeline_schedule(case)
            cuts = _cuts(case, schedule.num_stages)
    except ValueError as error:
        raise UnpredictableError(str(error)) from error
    return Plan(
        contender="published",
        shape=case.shape,
        layout=case.layout,
        microbatch_size=case.microbatch,
        schedule=schedule,
        cuts=cuts,
        program=case.program.name,
        precision=case.precision,
        recompute=case.recompute,
    )


def _cuts(case: Case, stages: int) -> tuple[int, ...]:
    if case.spread == "flops":
        return balanced_cuts(case.shape, stages)
    return even_cuts(case.shape, stages, blocks=case.spread == "blocks")


def _pipeline_schedule(case: Case) -> Schedule:
    pp, count = case.layout.pp, case.num_microbatches
    if case.schedule == "zb_cap":
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
    """Every piece a stage: gathered for each forward and each backward, reduced after it."""
    stages = range(shape.num_pieces)
    program: list[Action] = []
    for j in range(count):
        program += [Action(s, Op.FORWARD, j) for s in stages]
        program += [Action(s, Op.FULL_BACKWARD, j) for s in reversed(stages)]
    bare = Schedule("fsdp", count, 1, (0,) * len(stages), (tuple(program),))
    return lower(bare, gather=True, reduce_every="unit"), (*stages, shape.num_pieces)


def even_cuts(shape: ModelShape, stages: int, *, blocks: bool = False) -> tuple[int, ...]:
    """Equal blocks a stage, embedding with the first and head with the last. Where the blocks do
    not divide, both ends count as one each (BLOOM, Llama 3 and arXiv 2401.10241 chose their depths
    for it), unless ``blocks`` alone are spread; the last stages have what is left over."""
    first = 1 if blocks or shape.layers % stages == 0 else 0
    each, more = divmod(shape.num_pieces - 2 * first, stages)
    inner = (first + each * s + max(0, s - (stages - more)) for s in range(1, stages))
    return (0, *inner, shape.num_pieces)
