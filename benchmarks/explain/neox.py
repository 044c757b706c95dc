"""Reads a configuration of GPT-NeoX (``megatron/neox_arguments``, v2.0): keys of Megatron-LM and of
DeepSpeed, spelled with hyphens or underscores, by Megatron's flags of the same meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.explain import megatron
from benchmarks.explain.reading import Reading
from benchmarks.specification import SpecError

_FLAGS = {
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "seq_length": "--seq-length",  # the last that must be there
    "pipe_parallel_size": "--pipeline-model-parallel-size",
    "model_parallel_size": "--tensor-model-parallel-size",
    "num_kv_heads": "--num-key-value-heads",
    "checkpoint_activations": "--checkpoint-activations",
    "no_weight_tying": "--untie-embeddings-and-output-weights",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by",
    "tokenizer_type": "--tokenizer-type",
    "moe_num_experts": "--num-experts",
}
_PRICED = {  # keys that change a price, unless they are off
    "gpt_j_residual": "priced with the MLP behind attention, not beside it",
    "sequence_parallel": "priced without",
    "use_qk_layernorm": "the norms of queries and keys are not priced",
}


def read(tree: Mapping[str, Any], num_gpus: int | None) -> Reading:
    """What the file says; raises SpecError, in one line, for what has no price."""
    given = {key.replace("-", "_"): value for key, value in tree.items()}
    for key in list(_FLAGS)[:5]:
        if type(given.get(key)) is not int:
            raise SpecError(f"{key}={given.get(key)}: must be a number (join the files into one)")
    kinds = set(re.findall(r"[a-z_]+", str(given.get("attention_config", "")).lower()))
    if (others := kinds - {"flash", "global", "none"}) or given.get("context_parallel_size", 1) > 1:
        raise SpecError(f"GPT-NeoX with {' '.join(others) or 'sliced sequences'}: no price")
    values = {flag: given[key] for key, flag in _FLAGS.items() if given.get(key)}
    values |= {f"--{of}-dropout": given.get(f"{of}_dropout", 0) for of in ("attention", "hidden")}
    size = given.get("intermediate_size") or 4 * given["hidden_size"]
    if gated := given.get("activation") in ("swiglu", "geglu"):
        multiple = given.get("mlp_multiple_of", 1)  # ``ParallelMLP`` halves two thirds of it
        size = -(-(size // 3) // multiple) * multiple
    values |= {
        "--zero-stage": (given.get("zero_optimization") or {}).get("stage", 0),
        "--ffn-hidden-size": size,
        "--swiglu": gated,
        "--fp16": (given.get("fp16") or {}).get("enabled") or given.get("precision") == "fp16",
        "--bf16": (given.get("bf16") or {}).get("enabled") or given.get("precision") == "bfloat16",
        "--position-embedding-type": "rope" if given.get("pos_emb") == "rotary" else "learned",
        "--normalization": "RMSNorm" if "rms" in given.get("norm", "") else "LayerNorm",
        "--disable-bias-linear": not given.get("use_bias_in_mlp", True),
    }
    reading = megatron.read_arguments(values, num_gpus, stated=True)
    reading.dialect, reading.contender = "neox", "megatron_deepspeed"
    del reading.knobs["context"], reading.knobs["cp_comm_type"]
    dropout = reading.model["dropout"] > 0
    reading.traits = {"flash": "flash" in kinds, "dropout_masks": dropout}
    local = reading.settings["microbatch_size"] * (given.get("gradient_accumulation_steps") or 1)
    batch = given.get("train_batch_size")
    reading.batch_per_replica = None if batch else local
    reading.settings["global_batch"] = batch or local * reading.knobs["replicate"]
    reading.named += [f"{key}={given[key]}: {w}" for key, w in _PRICED.items() if given.get(key)]
    reading.harmless += sorted(given.keys() - _FLAGS.keys() - _PRICED.keys())
    return reading
