"""Published runs as plain numbers, which is all that the adapters of other simulators see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from benchmarks.studies.validation.cases import Case, case_of
from benchmarks.studies.validation.errors import first_of_runs
from benchmarks.studies.validation.predict import Prediction
from benchmarks.studies.validation.rows import Line, PublishedRow, UnpredictableError
from benchmarks.studies.validation.stated import measured_s

_PEAK_FP16_TFLOPS = {"v100": 125.0}  # its preset has no peak of bf16, which it does not compute
TIMED = ("time", "rate", "flops", "utilization")  # kinds of metrics that say how long a step takes


class Run(TypedDict):
    """One published run. Degrees, batch and types are the columns of docs/published_rows.md; what a
    row leaves blank has the value that the suite's own simulator uses."""

    place: str  # table and line
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int  # tokens of a whole sequence, also with context parallelism
    gated_mlp: bool
    tied_embeddings: bool
    rotary: bool
    # The machine: nominal rates, of one direction.
    device: str
    memory_gib: float
    memory_gb_s: float
    peak_tflops: float  # dense, of 16-bit products
    gpus_per_node: int
    link_gb_s: float  # of one GPU inside its node
    node_gb_s: float  # of all NICs of a node
    # The layout.
    num_gpus: int
    tp: int
    pp: int
    chunks: int
    dp: int
    cp: int
    zero: int
    zero3_group: int
    sequence_parallel: bool
    schedule: str
    even: bool  # whether stages have equally many blocks, whatever embedding and head cost
    micro_batch: int
    num_microbatches: int
    global_batch: int
    recompute: str
    selective: str  # what selective recomputation runs again; see zeropp/price/programs.py
    recompute_blocks: int  # of the whole model; 0: none or, with recomputation, all
    dtype: str
    flash: bool
    overlap_gradients: bool


def run_of(place: str, row: PublishedRow, case: Case) -> Run:
    """The run of a row that has a price."""
    cluster, program = case.cluster, case.program
    stages = row.pp * row.chunks
    return Run(
        place=place,
        layers=row.layers, hidden=row.hidden, heads=row.heads, kv_heads=row.kv_heads, ffn=row.ffn,
        vocab=row.vocab, seq=row.seq, gated_mlp=row.gated_mlp,
        tied_embeddings=row.tied_embeddings, rotary=row.family == "llama",
        device=row.device,
        memory_gib=cluster.device.memory_gib,
        memory_gb_s=cluster.device.memory_bandwidth_gb_s,
        peak_tflops=cluster.device.peak_bf16_tflops
        or _PEAK_FP16_TFLOPS.get(row.device, 0.0),
        gpus_per_node=cluster.gpus_per_node,
        link_gb_s=cluster.intra.bandwidth_gb_s,
        node_gb_s=cluster.inter.bandwidth_gb_s * cluster.nics_per_node,
        num_gpus=row.num_gpus, tp=row.tp, pp=row.pp, chunks=row.chunks, dp=row.dp, cp=row.cp,
        zero=row.zero, zero3_group=row.zero3_group or row.dp,
        sequence_parallel=row.sequence_parallel,
        schedule=row.schedule,
        even=row.cuts is None and row.layers % stages == 0,
        micro_batch=row.micro_batch,
        num_microbatches=case.num_microbatches,
        global_batch=row.global_batch,
        recompute=row.recompute,
        selective=program.selective,
        recompute_blocks=row.recompute_blocks or 0,
        dtype=row.dtype,
        flash=program.flash,
        overlap_gradients=program.overlap_reduction,
    )  # fmt: skip


def timed_runs(lines: Iterable[Line]) -> dict[str, tuple[Run, float]]:
    """By place, the runs whose step was timed and can be priced, and the seconds that were
    measured. A run that is printed in several units counts once, by its first row, and repeated
    runs count each, as in ``benchmarks.validate``."""
    cases: dict[int, tuple[str, Case]] = {}
    rows = []
    for line in lines:
        if line.row is None or line.row.measure.kind not in TIMED:
            continue
        try:
            case = case_of(line.row)
        except UnpredictableError:
            continue
        rows.append(Prediction(line.row, 0.0))
        cases[id(line.row)] = (line.place, case)
    found = {}
    for prediction in first_of_runs(rows):
        place, case = cases[id(prediction.row)]
        seconds = measured_s(prediction.row, case.cluster.device)
        found[place] = (run_of(place, prediction.row, case), seconds)
    return found
