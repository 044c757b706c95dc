"""What is assumed of the program behind a row: by its source's words, never by its value.

Rules, in order: a word of the row (source, table, gpu, schedule, notes) picks the program; where
none fits, fused attention and overlapped reductions on H100-class devices (both were usual by
then), Megatron-LM as published in 2021 on older ones.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from benchmarks.studies.validation.rows import Row
from zeropp.cost.software import Software

Spread = Literal["pieces", "blocks", "flops"]

MEGATRON_2021 = Software(
    parameter_bytes=2,
    gradient_bytes=4,
    optimizer_bytes=12,
    flash=False,
    dropout_masks=True,
    split_boundary=True,
    blocking_transfers=True,
    reduce_bytes=4,
    fused_accumulation=False,
)
MEGATRON_CORE = replace(
    MEGATRON_2021,
    flash=True,
    dropout_masks=False,
    overlap_reduction=True,  # Megatron-Core's README: data, tensor and pipeline traffic overlapped
    overlap_updated=True,
    overlap_tensor=True,
    blocking_transfers=False,
    reduce_bytes=2,
    fused_accumulation=True,
)
DEEPSPEED = replace(MEGATRON_2021, reduce_bytes=2, launch_factor=2.56)
FSDP = Software(
    parameter_bytes=4,
    gradient_bytes=4,
    optimizer_bytes=8,
    overlap_reduction=True,
    attention_factor=0.7,
    traffic_factor=2.11,
    selective="half",
)
MOSAIC = replace(FSDP, fused_loss=True)  # llm-foundry's ``loss_fn: fused_crossent``
TORCHTITAN = Software(
    *(4, 4, 8),
    overlap_reduction=True,
    shard_copies=True,
    traffic_factor=2.11,
    program="fsdp",
    selective="half",
)
INTERNEVO = replace(
    MEGATRON_CORE,
    gradient_bytes=2,
    # Master and moments, and what a step makes in single pieces that no freed activation's memory
    # can hold (hybrid_zero_optim.py, ``_step``): the flat gradient in 16 bits and in fp32, and the
    # two temporaries of torch 1.13's ``AdamW`` on it (``exp_avg_sq.sqrt() / ...``).
    optimizer_bytes=12 + 2 + 4 + 8,
    fused_accumulation=False,
    updated="broadcasts",  # hybrid_zero_optim.py, ``broadcast_params``
    overlap_updated=False,
    fused_loss=True,  # ``FlashGPTLMLoss``
    overlap_tensor=False,  # configs/7B_sft.py: mode "mtp", without sequence parallelism
    attention_factor=0.7,
    traffic_factor=2.11,
)
NANOTRON = replace(
    MEGATRON_CORE,
    reduce_bytes=4,
    overlap_reduction=False,
    updated="slices",  # ``distributed.py``, ``all_gather_coalesced``
    overlap_updated=False,
    overlap_tensor=False,
    fused_accumulation=False,
)

# arXiv 2401.10241 ran Megatron-LM's own kernels (``examples/pretrain_zbh1.sh``: no flash
# attention), 2405.15362 added flash attention and the distributed optimizer
# (``examples/pretrain_zero_bubble.sh``); both fp16, sends beside compute, and optimizer steps that
# no rank waits for (section 4 of the first).
ZERO_BUBBLE = replace(
    MEGATRON_2021, fused_accumulation=True, blocking_transfers=False, post_validation=True
)
CONTROLLABLE_MEMORY = replace(ZERO_BUBBLE, flash=True)

_BY_WORD = (
    ("vtrain", DEEPSPEED),
    ("deepspeed", DEEPSPEED),
    ("internevo", INTERNEVO),
    ("nanotron", NANOTRON),
    ("ultra-scale", NANOTRON),
    ("llm-foundry", MOSAIC),
    ("torchtitan", TORCHTITAN),
    ("fsdp2", TORCHTITAN),
    ("fully_shard", TORCHTITAN),
    ("fsdp", FSDP),
    ("zero bubble", ZERO_BUBBLE),
    ("zero-bubble", ZERO_BUBBLE),
    ("2401.10241", ZERO_BUBBLE),
    ("controllable memory", CONTROLLABLE_MEMORY),
    ("2405.15362", CONTROLLABLE_MEMORY),
    ("megatron-core", MEGATRON_CORE),
    ("megatron core", MEGATRON_CORE),
    ("2104.04473", MEGATRON_2021),
    ("2205.05198", replace(MEGATRON_2021, fused_accumulation=True)),
    ("libai", replace(MEGATRON_2021, traffic_factor=1.5)),
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
    """What a program spreads evenly over stages: FLOPs (nanotron's ``get_block_compute_costs``),
    blocks (InternEvo's ``partition_uniform``), else blocks and ends (BLOOM's
    ``type:transformer|embedding``)."""
    text = _text(row)
    if re.search("nanotron|ultra-scale", text):
        return "flops"
    return "blocks" if "internevo" in text else "pieces"


def interleaves(row: Row) -> bool:
    """Whether a program interleaves where a row names no schedule: Megatron-Core's pipeline
    traffic is overlapped in the interleaved schedule alone (``megatron/training/arguments.py``)."""
    return program_of(row) == MEGATRON_CORE


def program_of(row: Row) -> Software:
    """The program that made a row."""
    text = _text(row)
    found = next((program for word, program in _BY_WORD if word in text), None)
    if found is None:
        found = MEGATRON_CORE if re.search(r"h[128]00", text) else MEGATRON_2021
    if "flash" in text:
        found = replace(found, flash=True)
    if "compile" in text:
        found = replace(found, traffic_factor=1.0)  # element-wise chains become one kernel
    if re.search(r"async[ -]?(?:tp|tensor)", text):
        found = replace(found, overlap_tensor=True)
    if "no overlap of gradient" in text:
        found = replace(found, overlap_reduction=False)
    if "mp_mode pure" in text:
        found = replace(found, reduce_bytes=2)
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
