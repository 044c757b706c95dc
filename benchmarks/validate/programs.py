"""What is assumed of the program behind a row: by its source's words, never by its value.

Rules, in order: a word of the row (source, table, gpu, schedule, notes) picks the program; where
none fits, fused attention and overlapped reductions on H100-class devices (both were usual by
then), Megatron-LM as published in 2021 on older ones.
"""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.validate.rows import Row
from zeropp.cost.software import Software

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
    overlap_reduction=True,
    overlap_tensor=True,  # Megatron-Core's README: data, tensor and pipeline traffic overlapped
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
)
TORCHTITAN = Software(4, 4, 8, overlap_reduction=True, shard_copies=True, traffic_factor=2.11)
INTERNEVO = replace(
    MEGATRON_CORE,
    gradient_bytes=2,
    optimizer_bytes=16,  # hybrid_zero_optim.py: a flat fp32 gradient beside master and moments
    fused_accumulation=False,
    overlap_tensor=False,  # configs/7B_sft.py: mode "mtp", without sequence parallelism
    attention_factor=0.7,
    traffic_factor=2.11,
)
NANOTRON = replace(
    MEGATRON_CORE,
    reduce_bytes=4,
    overlap_reduction=False,
    overlap_tensor=False,
    fused_accumulation=False,
)

_BY_WORD = (
    ("vtrain", DEEPSPEED),
    ("deepspeed", DEEPSPEED),
    ("internevo", INTERNEVO),
    ("nanotron", NANOTRON),
    ("ultra-scale", NANOTRON),
    ("torchtitan", TORCHTITAN),
    ("fsdp2", TORCHTITAN),
    ("fully_shard", TORCHTITAN),
    ("fsdp", FSDP),
    ("zero bubble", replace(MEGATRON_CORE, overlap_reduction=False, overlap_tensor=False)),
    ("zero-bubble", replace(MEGATRON_CORE, overlap_reduction=False, overlap_tensor=False)),
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
    nanotron = re.search("nanotron|ultra-scale", _text(row))  # tp_mode REDUCE_SCATTER
    return program_of(row).overlap_tensor or nanotron is not None


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
    if "no overlap of gradient" in text:
        found = replace(found, overlap_reduction=False)
    if "mp_mode pure" in text:
        found = replace(found, reduce_bytes=2)
    group = re.search(r"shard group (\d+)", row.get("zero_stage", ""))
    return replace(found, zero1_group=int(group.group(1))) if group else found
