"""Reads a Hugging Face ``config.json``: the sizes of a model, and nothing of how it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.explain.reading import Keys, Reading
from benchmarks.specification import SpecError

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NEUTRAL: dict[str, tuple[Any, str]] = {
    "quantization_config": (None, "no price for quantized weights"),
    "attention_bias": (False, "biases are not priced"),
    "use_mrope": (False, "positions of several dimensions are not priced"),
    "mlp_bias": (False, "biases are not priced"),
    "sliding_window": (None, "attention is priced over the whole sequence"),
}
HARMLESS = (
    *("rope_", "rms_norm_eps", "layer_norm_epsilon", "initializer_range", "torch_dtype", "dtype"),
    *("use_cache", "bos_", "eos_", "pad_", "transformers_version", "architectures", "summary_"),
    *("pretraining_tp", "task_specific", "reorder_", "scale_attn", "n_ctx", "max_window_layers"),
    *("max_position_embeddings", "n_positions", "use_sliding_window", "layer_types", "gradient_"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "model_type", "head_dim"),
    *("hidden_act", "activation_function", "_name_or_path", "vocab_padding", "output_past"),
)


def read(values: Mapping[str, Any], num_gpus: int | None) -> Reading:
    """What a ``config.json`` says; raises SpecError, in one line, for a model without a price."""
    if "zero_optimization" in values or "train_micro_batch_size_per_gpu" in values:
        raise SpecError("DeepSpeed's file has no model: give its config.json, too")
    kind = values.get("model_type", "")
    if experts := next((key for key in _EXPERTS if values.get(key)), ""):
        raise SpecError(f"{experts}={values[experts]}: no price for mixtures of experts")
    keys = Keys(values)
    reading = Reading(dialect="huggingface", contender="megatron_core")
    if kind in _LLAMA_LIKE:
        reading.model = llama(keys, kind)
        if kind == "qwen2":
            reading.named.append("model_type=qwen2: the biases of its QKV products are not priced")
        if kind == "qwen3":
            reading.named.append("model_type=qwen3: the norms of queries and keys are not priced")
    elif kind == "gpt2":
        reading.model = _gpt2(keys)
    else:
        raise SpecError(
            f"model_type={kind!r}: no price (there is one for {', '.join(_LLAMA_LIKE)}, gpt2)"
        )
    reading.settings = {"precision": "bf16"} | ({"num_gpus": num_gpus} if num_gpus else {})
    if values.get("sliding_window") is None or values.get("use_sliding_window") is False:
        keys.take("sliding_window")  # a window that is not used changes nothing
    if values.get("max_position_embeddings"):
        reading.derived.append(
            f"max_position_embeddings={values['max_position_embeddings']} is a limit, not the "
            "length that is trained: give model.seq"
        )
    keys.sort_rest(reading, NEUTRAL, HARMLESS)
    return reading


def llama(keys: Keys, kind: str) -> dict[str, Any]:
    """The sizes of a model of Llama's kind; raises SpecError where its heads have no price."""
    hidden, heads = keys.needed("hidden_size"), keys.needed("num_attention_heads")
    width = keys.number("head_dim") or hidden // heads
    if width * heads != hidden:
        raise SpecError(
            f"head_dim={width}: this suite's heads are hidden / heads = {hidden // heads} wide, so "
            "this model has no price"
        )
    return {
        "name": f"{kind}_{hidden}",
        "family": "llama",
        "layers": keys.needed("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys.number("num_key_value_heads") or heads,
        "ffn": keys.needed("intermediate_size"),
        "vocab": keys.needed("vocab_size"),
        "tied_embeddings": bool(keys.take("tie_word_embeddings", kind != "llama")),
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.needed("n_embd"), keys.needed("n_head")
    return {
        "name": f"gpt2_{hidden}",
        "family": "gpt",
        "layers": keys.needed("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": keys.number("n_inner") or 4 * hidden,
        "vocab": keys.needed("vocab_size"),
        "tied_embeddings": bool(keys.take("tie_word_embeddings", True)),
    }
