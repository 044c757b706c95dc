"""What is assumed of the program behind a row: by its source's words, never by its value.

Rules, in order: a word of the row (source, table, gpu, schedule, notes) picks the program; where
none fits, fused attention and overlapped reductions on H100-class devices (both were usual by
then), Megatron-LM as published in 2021 on older ones.
"""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.studies.validation.rows import Row
from zeropp.programs import Program, Spread, program_named

_BY_WORD = (
    ("vtrain", "megatron_deepspeed_2022"),
    ("deepspeed", "megatron_deepspeed_2022"),
    ("internevo", "internevo"),
    ("nanotron", "nanotron"),
    ("ultra-scale", "nanotron"),
    ("llm-foundry", "llm_foundry"),
    ("torchtitan", "torchtitan"),
    ("fsdp2", "torchtitan"),
    ("fully_shard", "torchtitan"),
    ("fsdp", "llm_foundry"),
    ("zero bubble", "zero_bubble"),
    ("zero-bubble", "zero_bubble"),
    ("2401.10241", "zero_bubble"),
    ("controllable memory", "controllable_memory"),
    ("2405.15362", "controllable_memory"),
    ("megatron-core", "megatron_core_r0.8"),
    ("megatron core", "megatron_core_r0.8"),
    ("2104.04473", "megatron_lm_2021"),
    ("2205.05198", "megatron_lm_2022"),
    ("libai", "libai"),
)


def _text(row: Row) -> str:
    return " ".join(row.get(k, "") for k in ("source", "table", "gpu", "schedule", "notes")).lower()


def splits_sequences(row: Row) -> bool:
    """Whether the program of a row uses sequence parallelism with TP unless the row says no."""
    # nanotron's tp_mode REDUCE_SCATTER; torchtitan's plan of every Llama (``parallelize.py``)
    always = re.search("nanotron|ultra-scale|torchtitan", _text(row))
    return program_of(row).overlap_tensor or always is not None


def one_layer_chunks(row: Row) -> bool:
    """Whether a program interleaves single layers (``--num-layers-per-virtual-pipeline-stage 1``
    in ``examples/pretrain_zero_bubble.sh``)."""
    return re.search("zero[ -]bubble|2401.10241|2405.15362", _text(row)) is not None


def spread_of(row: Row) -> Spread:
    """What the program spreads evenly over stages."""
    return program_of(row).spread


def interleaves(row: Row) -> bool:
    """Whether a program interleaves where a row names no schedule: Megatron-Core's pipeline
    traffic is overlapped in the interleaved schedule alone (``megatron/training/arguments.py``)."""
    return program_of(row).name == "megatron_core_r0.8"


def program_of(row: Row) -> Program:
    """The program that made a row."""
    text = _text(row)
    name = next((program for word, program in _BY_WORD if word in text), None)
    if name is None:
        name = "megatron_core_r0.8" if re.search(r"h[128]00", text) else "megatron_lm_2021"
    found = program_named(name)
    if "flash" in text:
        found = replace(found, flash=True)
    if "compile" in text:
        found = replace(found, traffic_factor=1.0)  # element-wise chains become one kernel
    if re.search(r"async[ -]?(?:tp|tensor)", text):
        found = replace(found, overlap_tensor=True)
    if "no overlap of gradient" in text:
        found = replace(found, overlap_reduction=False)
    if "mp_mode pure" in text:
        found = replace(found, bf16=replace(found.bf16, reduced=2))
    group = re.search(r"shard group (\d+)", row.get("zero_stage", ""))
    return replace(found, zero1_group=int(group.group(1))) if group else found


def counts_recomputation(row: Row) -> bool:
    """Whether a row's FLOP/s counts what recomputation runs again: where the metric or a note says
    so; else in Megatron-LM until 2022 and Megatron-DeepSpeed, whose formula has a factor of 4/3
    (arXiv 2104.04473, eq. 3; ``checkpoint_activations_factor``)."""
    metric, notes = row.get("metric", "").lower(), row.get("notes", "").lower()
    if metric.startswith(("hw", "hfu", "pct", "aggregate", "hardware")):
        return True
    if "mfu" in metric or "model" in metric:
        return False
    if re.search(r"(?:count|includ)\w* (?:full-?)?(?:re-?comput|checkpoint|activation)", notes):
        return True
    return not program_of(row).fused_accumulation and program_of(row).dropout_masks


def prints_gib(row: Row) -> bool:
    """Whether "GB" of memory is 2**30 bytes: nanotron (``helpers.py``) and InternEvo
    (``gputest.py``) divide by 1024**3."""
    return re.search("nanotron|ultra-scale|internevo", _text(row)) is not None


def reserved_share(row: Row) -> float:
    """Memory that a row reports over what its tensors take. Where that is what torch's allocator
    reserved, a share of it is fragments: 15 % on average over eight language models on A100
    (GMLake, arXiv 2401.08156), nearly none in expandable segments, which torchtitan uses."""
    text = f"{row.get('metric', '')} {_text(row)}".lower()
    if "expandable" in text or "allocated" in text:
        return 1.0
    return 1 / 0.85 if re.search("reserved|nvidia-smi|nanotron|ultra-scale", text) else 1.0
