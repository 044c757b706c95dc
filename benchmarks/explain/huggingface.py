"""Reads a Hugging Face ``config.json``, which has the sizes of a model and nothing of how it is
trained, and the files that stand beside it: DeepSpeed's JSON and Accelerate's YAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any, Literal, NamedTuple

from benchmarks.explain.reading import Keys, Reading, flat, share_of_ranks
from benchmarks.specification import SpecError
from zeropp.price.programs import program_named

_QKV, _QK = "biases of its QKV products", "norms of queries and keys"


class _Kind(NamedTuple):
    """A ``model_type`` of transformers that is a Llama, or GPT-2, except for what is ``unpriced``:
    the eager code to whose kernels its own are nearest, and whether its MLP has a gate and its
    embeddings are tied where the file does not say it."""

    unpriced: str = ""
    code: str = "llama"
    gated: bool = True
    tied: bool = False


KINDS = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "phi3", "glm"), _Kind()),
    "granite": _Kind(),  # with scales of embeddings, residuals and logits
    **dict.fromkeys(("gemma", "smollm3", "ernie4_5"), _Kind(tied=True)),
    **dict.fromkeys(("qwen2", "qwen2_5_vl_text", "seed_oss"), _Kind(_QKV, code="qwen2")),
    **dict.fromkeys(("qwen3", "qwen3_vl_text", "exaone4"), _Kind(_QK, code="qwen3")),
    **dict.fromkeys(("olmo2", "olmo3"), _Kind(_QK, code="qwen3")),  # norms behind, not before
    "gemma2": _Kind("norms behind attention and MLP", tied=True),
    "gemma3_text": _Kind(f"{_QK} and those behind attention and MLP", code="qwen3", tied=True),
    "glm4": _Kind("norms behind attention and MLP"),
    "cohere2": _Kind("common norm of attention and MLP, and the order of both,", tied=True),
    **dict.fromkeys(("nemotron", "arcee"), _Kind(gated=False)),
    "apertus": _Kind(_QK, code="qwen3", gated=False),
    "starcoder2": _Kind("biases", gated=False, tied=True),
    "gpt2": _Kind(code="gpt2", gated=False, tied=True),
}
# What transformers takes where the text of a model with vision leaves it out.
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}
_WIDTHS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256}  # of heads, where the file has none
_WIDTHS |= dict.fromkeys(("qwen3", "qwen3_vl_text", "glm", "glm4", "seed_oss"), 128)
_WIDTHS |= dict.fromkeys(("ministral3", "ernie4_5"), 128)
# Layers, hidden size and heads, in Llama's spelling and in GPT-2's.
_SIZES = (
    ("num_hidden_layers", "n_layer"),
    ("hidden_size", "n_embd"),
    ("num_attention_heads", "n_head"),
)
_STATES = "state-space and linear-attention layers"
_ATTEND = {"attention", "full_attention", "sliding_attention"}
# Beginnings of keys that only layers without a price have.
_REFUSED = {
    **dict.fromkeys(("num_local_experts", "n_routed_experts"), "mixtures of experts"),
    **dict.fromkeys(("num_experts", "moe_"), "mixtures of experts"),
    "kv_lora_rank": "latent attention",
    **dict.fromkeys(
        ("mamba_", "ssm_", "state_size", "linear_conv", "lru_width", "conv_L", "layers_block_type"),
        _STATES,
    ),
}
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "quantization_config": (None, "quantized weights cannot be simulated"),
    "attention_bias": (False, "biases are not simulated"),
    "use_mrope": (False, "positions of several dimensions are not simulated"),
    "mlp_bias": (False, "biases are not simulated"),
    "use_bias": (False, "biases are not simulated"),
    "attention_out_bias": (False, "biases are not simulated"),
    "post_norm": (False, "norms behind attention and MLP are not simulated"),
    "qk_norm": (False, "the norms of queries and keys are not simulated"),
    "residual_dropout": (0.0, "dropout is not simulated"),
    "sliding_window": (None, "attention is simulated over the whole sequence"),
    "attn_logit_softcapping": (None, "the cap of attention's logits is not simulated"),
    "final_logit_softcapping": (None, "the cap of the head's logits is not simulated"),
}
_HARMLESS = (
    *("rope_", "rms_norm_eps", "layer_norm_epsilon", "initializer_range", "torch_dtype", "dtype"),
    *("use_cache", "bos_", "eos_", "pad_", "transformers_version", "architectures", "summary_"),
    *("pretraining_tp", "task_specific", "reorder_", "scale_attn", "n_ctx", "max_window_layers"),
    *("max_position_embeddings", "n_positions", "use_sliding_window", "layer_types", "gradient_"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"),
    *("model_type", "no_rope"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logit"),
    *("partial_rotary", "query_pre_attn", "original_max", "auto_map", "norm_eps", "layer_norm_eps"),
    *(
        "sliding_window_pattern",
        "cache_implementation",
        "_sliding_window_pattern",
        "use_bidirectional",
        "hidden_activation",
        "tokenizer_class",
    ),
    *("hidden_act", "activation_function", "_name_or_path", "vocab_padding", "output_past"),
)


def read(values: Mapping[str, Any], num_gpus: int | None) -> Reading:
    """What a ``config.json`` says; raises SpecError, in one line, for a model without a price."""
    if "zero_optimization" in values or "train_micro_batch_size_per_gpu" in values:
        raise SpecError("DeepSpeed's file has no model: give its config.json, too")
    reading = Reading(dialect="huggingface", contender="megatron_core")
    if isinstance(text := values.get("text_config"), Mapping):
        reading.named.append(f"model_type={values.get('model_type')}: its text alone is simulated")
        values = {
            **(_GEMMA3 if text.get("model_type") == "gemma3_text" else {}),
            **{key: values[key] for key in ("tie_word_embeddings",) if key in values},
            **text,
        }
    kind = str(values.get("model_type", ""))
    all_attend = {*re.findall(r"\w+", str(values.get("layer_types")))} <= _ATTEND
    for start, what in _REFUSED.items():
        if all_attend and what == _STATES:
            continue  # the file has sizes of layers that its model has not
        if key := next((key for key in values if key.startswith(start) and values[key]), ""):
            raise SpecError(f"{key}={values[key]}: {what} cannot be simulated (model_type={kind})")
    if not kind:
        raise SpecError(
            "model_type: missing, so this is no config.json of Hugging Face, as Meta's params.json "
            "is none (give the model's config.json)"
        )
    if kind not in KINDS:
        raise SpecError(
            f"model_type={kind!r}: cannot be simulated (known: {', '.join(sorted(KINDS))}; where "
            "its layers are a Llama's, write one of these)"
        )
    keys = Keys(values)
    reading.model = _model(keys, kind)
    if unpriced := KINDS[kind].unpriced:
        reading.named.append(f"model_type={kind}: the {unpriced} are not simulated")
    reading.code = KINDS[kind].code
    reading.settings = {"precision": "bf16"} | ({"num_gpus": num_gpus} if num_gpus else {})
    if values.get("sliding_window") is None or values.get("use_sliding_window") is False:
        keys.take("sliding_window")  # a window that is not used changes nothing
    if values.get("max_position_embeddings"):
        reading.derived.append(
            f"max_position_embeddings={values['max_position_embeddings']} is a limit, not the "
            "length that is trained: give model.seq"
        )
    keys.sort_rest(reading, _NEUTRAL, _HARMLESS)
    return reading


def _model(keys: Keys, kind: str) -> dict[str, Any]:
    """The sizes of a model."""
    is_gpt = kind == "gpt2"
    layers, hidden, heads = (keys.count(names[is_gpt]) for names in _SIZES)
    width = keys.number("head_dim") or _WIDTHS.get(kind)
    return {
        "name": f"{kind}_{hidden}",
        "family": "gpt" if is_gpt else "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys.number("num_key_value_heads") or heads,
        "ffn": keys.number("n_inner") or 4 * hidden if is_gpt else keys.count("intermediate_size"),
        "vocab": keys.count("vocab_size"),
        "tied_embeddings": bool(keys.take("tie_word_embeddings", KINDS[kind].tied)),
        "gated_mlp": KINDS[kind].gated,
        "head_width": None if width is None or width * heads == hidden else width,
    }


_EAGER_TRAFFIC = program_named("huggingface_fsdp").traffic_factor
_DEEPSPEED_HALF = ("bf16.enabled", "fp16.enabled", "torch_autocast.enabled")
_DEEPSPEED_DEGREES = ("tensor_parallel.autotp_size", "pipeline.stages")
_DEEPSPEED_STEP = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BUCKET = "zero_optimization.reduce_bucket_size"
_TYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}
_SEQUENTIAL = "zero_optimization.stage3_allgather_sequential"
_STAGE3 = {  # keys of ZeRO-3's gathers: the contender's names, and DeepSpeed's defaults
    "zero_optimization.stage3_prefetch_bucket_size": ("prefetch_bucket_size", 50_000_000),
    "zero_optimization.stage3_param_persistence_threshold": (
        *("param_persistence_threshold", 100_000),
    ),
    "zero_optimization.stage3_max_live_parameters": ("live_parameters", 1_000_000_000),
    "zero_optimization.zero_hpz_partition_size": ("zero_hpz_partition_size", 1),
}
_DEEPSPEED_NEUTRAL: dict[str, tuple[Any, str]] = {
    "zero_optimization.offload_optimizer.device": (
        "none",
        "simulated without offloading",
    ),
    "zero_optimization.offload_param.device": (
        "none",
        "simulated without offloading",
    ),
    "zero_optimization.overlap_comm": (True, "gradients are simulated as sent beside the backward"),
    "zero_optimization.zero_quantized_weights": (False, "weights are sent in bf16"),
    "zero_optimization.zero_quantized_gradients": (False, "gradients are sent in bf16"),
    "optimizer.type": (("Adam", "AdamW", "adam", "adamw"), "simulated with Adam's states"),
    **dict.fromkeys(
        (
            *("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
            "fp16.fp16_master_weights_and_grads",
        ),
        (False, "simulated with fp32 masters and states of the optimizer"),
    ),
    "torch_autocast.dtype": ("", "simulated with bf16 parameters and fp32 masters"),
    "pipeline.partition": ("parameters", "simulated with stages of equal cost"),
}
_DEEPSPEED_HARMLESS = (
    *("optimizer.", "scheduler.", "gradient_clipping", "steps_per_print", "wall_clock_breakdown"),
    *(
        "fp16.",
        "bf16.",
        "torch_autocast.lower",
        "torch_autocast.enabled",
        "zero_allow_untested",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.zero_hpz",  # without stage 3
    ),
    *("zero_optimization.stage3_", "zero_optimization.reduce_", "zero_optimization.allgather_"),
    *("zero_optimization.offload_", "zero_optimization.sub_group_size", "tensorboard.", "wandb."),
    *("zero_stage", "zero3_", "deepspeed_", "offload_"),  # of Accelerate's section
    *("flops_profiler.", "comms_logger.", "dump_state", "csv_monitor.", "zero_force_ds_cpu"),
    *("zero_optimization.round_robin", "prescale_gradients", "data_types."),
    *("pipeline.pipe_partitioned", "pipeline.grad_partitioned", "pipeline.seed_layers"),
)
# As texts, as pydantic reads them.
_SWITCHES = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(
    ("false", "no", "off"), False
)
_DEGREES = "parallelism_config.parallelism_config_"
_MIXED = {
    "no": "simulated in fp32; if the script says bf16=True, give precision=bf16",
    "fp16": "simulated as bf16, whose kernels and bytes are the same",
}
_ACCELERATE_NEUTRAL: dict[str, tuple[Any, str]] = {
    "fsdp_config.fsdp_offload_params": (False, "simulated without offloading"),
    "fsdp_config.fsdp_forward_prefetch": (False, "gathers are simulated in FSDP2's order"),
    "fsdp_config.fsdp_auto_wrap_policy": (
        "TRANSFORMER_BASED_WRAP",
        "simulated with a unit per block",
    ),
    "fsdp_config.fsdp_backward_prefetch": ("BACKWARD_PRE", "simulated as gathered ahead"),
    "fsdp_config.fsdp_backward_prefetch_policy": ("BACKWARD_PRE", "simulated as gathered ahead"),
    **dict.fromkeys(
        [f"{_DEGREES}{name}_size" for name in ("dp_replicate", "tp", "cp", "sp")],
        (1, "simulated without"),
    ),
    "downcast_bf16": (False, "parameters in another type"),
}
_ACCELERATE_HARMLESS = (
    f"{_DEGREES}dp_shard_size",  # the ranks that the others leave
    f"{_DEGREES}cp_comm_strategy",  # of a ring
    "dynamo_config.",
    *("compute_environment", "debug", "machine_rank", "main_", "rdzv_", "same_network", "tpu_"),
    *("use_cpu", "enable_cpu_affinity", "fsdp_config.fsdp_state_dict", "fsdp_config.fsdp_sync"),
    *("fsdp_config.fsdp_cpu_ram", "fsdp_config.fsdp_use_orig", "gpu_ids", "fsdp_config.fsdp_tr"),
)


def deepspeed(tree: Mapping[str, Any], reading: Reading, num_gpus: int | None) -> Reading:
    """What DeepSpeed's JSON says beside the ``reading`` of its model; raises SpecError, in one
    line, for what has no price."""
    if num_gpus is None:
        raise SpecError("num_gpus: a DeepSpeed JSON does not say it (give num_gpus=N)")
    # Values that are "auto" are filled in by Hugging Face's Trainer: sizes of buckets by the model,
    # all others by its arguments, so they say nothing here.
    said, hidden = _flat_deepspeed(tree), reading.model["hidden"]
    by_model = (hidden**2, int(0.9 * hidden**2), 10 * hidden)
    filled = dict(zip((_BUCKET, *_STAGE3), by_model, strict=False))
    said |= {key: size for key, size in filled.items() if said.get(key) == "auto"}
    keys = Keys({key: value for key, value in said.items() if value != "auto"})
    stage = keys.number("zero_optimization.stage", least=0) or 0
    if stage > 3:
        raise SpecError(f"zero_optimization.stage={stage}: must be 0, 1, 2 or 3")
    degrees = {key: keys.number(key, least=0) or 1 for key in _DEEPSPEED_DEGREES}
    tp, pp = degrees.values()
    context = keys.count("sequence_parallel_size", 1)  # of Ulysses
    replicate = share_of_ranks(num_gpus, {"pp": pp, "tp": tp, "context": context})
    own = _type_of(said, reading)
    if stage == 3:
        if others := [f"{key}={degree}" for key, degree in degrees.items() if degree > 1]:
            raise SpecError(f"{others[0]}: cannot be simulated with ZeRO-3 (use 1)")
        reading.contender, reading.free = "deepspeed_zero3", "shard"
        reading.knobs = {"shard": replicate, "context": context}
        reading.knobs |= {
            knob: keys.number(key, default, least=0) for key, (knob, default) in _STAGE3.items()
        }
        if not (reading.knobs["prefetch_bucket_size"] and reading.knobs["live_parameters"]):
            reading.knobs |= {"prefetch_bucket_size": 1, "live_parameters": 1}
            reading.derived.append("a tensor is gathered when it is used, and none ahead of it")
        reading.knobs["allgather_sequential"] = bool(keys.take(_SEQUENTIAL, False))
        if not 0 < reading.knobs["zero_hpz_partition_size"] < replicate:
            reading.knobs["zero_hpz_partition_size"] = 1  # a copy over all ranks is the first one
    elif context > 1:
        raise SpecError(f"sequence_parallel_size={context}: simulated with ZeRO-3 alone (use 1)")
    else:
        reading.contender, reading.free = "deepspeed", "replicate"
        reading.knobs = {"tp": tp, "pp": pp, "replicate": replicate, "replicate_zero": stage}
        reading.knobs["use_multi_rank_bucket_allreduce"] = bool(
            keys.take("zero_optimization.use_multi_rank_bucket_allreduce", True)
        )
    reading.knobs["compile"] = bool(keys.take("compile.deepcompile", False))
    # DeepSpeed adds and sends in the type of the model.
    for key, knob in (
        ("data_types.grad_accum_dtype", "grad_accum_dtype"),
        ("communication_data_type", "reduce_dtype"),
    ):
        kind = str(keys.take(key) or own)
        if (plain := kind.lower().removeprefix("torch.")) not in _TYPES:
            raise SpecError(f"{key}={kind}: must be among {', '.join(_TYPES)}")
        reading.knobs[knob] = _TYPES[plain]
    reading.knobs["reduce_bucket_size"] = keys.number(_BUCKET, 500_000_000, least=1)
    reading.traits |= {"eager": reading.code, "traffic_factor": _EAGER_TRAFFIC}
    # ``PipelineModule`` recomputes runs of this length; 0: none.
    _recompute(reading, stated=bool(keys.number("pipeline.activation_checkpoint_interval")))
    is_open = said.get(_DEEPSPEED_STEP[1]) == "auto"
    batch, size = _batch_of(keys, reading, replicate, is_open=is_open)
    settings = {"global_batch": batch, "microbatch_size": size, "num_gpus": num_gpus}
    reading.settings |= {key: value for key, value in settings.items() if value}
    reading.settings["precision"] = own
    keys.sort_rest(reading, _DEEPSPEED_NEUTRAL, _DEEPSPEED_HARMLESS)
    return reading


def _type_of(said: Mapping[str, Any], reading: Reading) -> Literal["bf16", "fp32"]:
    """The type in which a DeepSpeed JSON's model computes."""
    half = [said.get(key, False) for key in _DEEPSPEED_HALF]
    for key, value in zip(_DEEPSPEED_HALF, half, strict=True):
        if value not in (True, False, "auto"):
            raise SpecError(f"{key}={value!r}: must be true or false")
    if not any(half):
        reading.derived.append("bf16.enabled: not set, simulated in fp32 (give precision=bf16)")
        return "fp32"
    if True not in half:
        reading.derived.append("bf16.enabled=auto: simulated in bf16 (give precision=fp32)")
    reading.derived += [f"fp16.enabled: {_MIXED['fp16']}"] * (said.get("fp16.enabled") is True)
    return "bf16"


def _flat_deepspeed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted keys; raises SpecError for a plain value in the place of an object."""
    said = flat({"bf16" if key == "bfloat16" else key: value for key, value in tree.items()})
    known = ("zero_optimization.stage", *_DEEPSPEED_HALF, *_DEEPSPEED_DEGREES, *_DEEPSPEED_NEUTRAL)
    for key, value in said.items():
        inside = [name.split(".")[-1] for name in known if name.startswith(f"{key}.")]
        if inside and value is not None:
            raise SpecError(f'{key}={value}: must be an object, as in {{"{inside[0]}": ...}}')
    return _switched(said)


def _switched(said: Mapping[str, Any]) -> dict[str, Any]:
    """The values, where the texts of switches are true and false."""
    return {key: _SWITCHES.get(str(value).lower(), value) for key, value in said.items()}


def _batch_of(
    keys: Keys, reading: Reading, replicate: int, *, is_open: bool
) -> tuple[int | None, int | None]:
    """Sequences per step and per microbatch, as far as the file says them; ``is_open``: not how
    many microbatches a step has. Raises SpecError where they do not fit each other."""
    batch = keys.number("train_batch_size", least=1)
    given = {key: number for key in _DEEPSPEED_STEP if (number := keys.number(key, least=1))}
    size, whole = given.get(_DEEPSPEED_STEP[0]), prod(given.values()) * replicate
    if batch and (batch % whole or (len(given) == 2 and batch != whole)):
        numbers = "".join(f"{key}={number} x " for key, number in given.items())
        raise SpecError(
            f"train_batch_size={batch}: is not {numbers}{replicate} data-parallel ranks"
            f"{' x N' * (len(given) < 2)}, so DeepSpeed refuses it (take one of these keys out, or "
            "give the file's own num_gpus)"
        )
    if not is_open:
        if batch is None and size:
            batch, reading.batch_per_replica = whole, whole // replicate
        elif size is None and batch:
            size = batch // whole
        elif size is None:
            reading.accumulates = given.get(_DEEPSPEED_STEP[1], 0)
    return batch, size


def accelerate(tree: Mapping[str, Any], model: Reading, num_gpus: int | None) -> Reading:
    """What Accelerate's YAML for FSDP or DeepSpeed says of a ``model`` that was read before; raises
    SpecError, in one line, for what has no price."""
    keys = Keys(_switched(flat(tree)))
    machines = keys.number("num_machines", 1) or 1
    gpus = keys.number("num_processes", num_gpus)
    backends = [keys.take(f"{section}dynamo_backend") for section in ("dynamo_config.", "")]
    keys.take("distributed_type")
    if (kind := tree.get("distributed_type")) == "DEEPSPEED":
        deepspeed(_deepspeed_json(tree, keys), model, num_gpus or gpus)
        model.knobs["compile"] |= any(backends)
        keys.sort_rest(model, _ACCELERATE_NEUTRAL, (*_ACCELERATE_HARMLESS, f"{_DEGREES}sp_"))
        return model
    if kind != "FSDP":
        raise SpecError(
            f"distributed_type={kind}: only FSDP and DEEPSPEED are read (give Megatron-LM's "
            "arguments after --, or for plain data parallelism the config.json alone with "
            "contender=fsdp contender.shard=1)"
        )
    strategies = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
    strategy = str(keys.take("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD"))
    strategy = strategies.get(strategy, strategy)
    again = keys.take("fsdp_config.fsdp_reshard_after_forward", True)
    if strategy not in ("FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP"):
        raise SpecError(
            f"fsdp_sharding_strategy={strategy}: cannot be simulated (use FULL_SHARD, "
            "HYBRID_SHARD or SHARD_GRAD_OP)"
        )
    if keys.take("fsdp_config.fsdp_version", 1) == 1:
        model.named.append("fsdp_version=1: simulated as FSDP2")
    if not (gpus := num_gpus or gpus):
        raise SpecError("num_processes: the file does not say it (give num_gpus=N)")
    own, tp, cp = (keys.count(f"{_DEGREES}{name}_size", 1) for name in ("dp_replicate", "tp", "cp"))
    if tp > 1:
        raise SpecError(
            f"{_DEGREES}tp_size={tp}: cannot be simulated beside Accelerate's FSDP (give "
            f"contender=torchtitan contender.tp={tp} with the config.json alone)"
        )
    replicate = machines if strategy == "HYBRID_SHARD" else own
    model.contender, model.free = "fsdp", "shard"
    model.knobs = {
        "shard": share_of_ranks(gpus, {"replicate": replicate, "cp": cp}),
        "replicate": replicate,
        "reduce_every": "step",  # ``Accelerator.no_sync``
        "reshard_after_forward": "SHARD_GRAD_OP" not in (strategy, again) and again is not False,
        "reshard_after_backward": True,
    }
    model.slice_sequences(f"{_DEGREES}cp_size", cp)
    model.knobs["compile"] = any(backends)
    # Where it is not compiled.
    model.traits |= {"eager": model.code, "traffic_factor": _EAGER_TRAFFIC}
    _recompute(model, stated=bool(keys.take("fsdp_config.fsdp_activation_checkpointing")))
    if words := _MIXED.get(precision := str(keys.take("mixed_precision") or "no")):
        model.derived.append(f"mixed_precision={precision}: {words}")
    half = "fp32" if precision == "no" else "bf16"
    model.settings |= {"num_gpus": gpus, "precision": half}
    model.knobs["reduce_dtype"] = half  # Accelerate's policy sends in the type of compute
    if precision == "fp8":
        model.multiply_in_8_bits("mixed_precision=fp8", "tensorwise")
    keys.sort_rest(model, _ACCELERATE_NEUTRAL, _ACCELERATE_HARMLESS)
    return model


def _deepspeed_json(tree: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The JSON that Accelerate makes of its section for DeepSpeed (``DeepSpeedPlugin``), which it
    takes out of the ``keys``; raises SpecError for a file, and a type without a price."""
    said = tree.get("deepspeed_config") or {}
    if file := said.get("deepspeed_config_file") if isinstance(said, dict) else said:
        raise SpecError(f"deepspeed_config: give {file} in place of this file")
    for key in flat({"deepspeed_config": said}):
        keys.take(key)
    if (precision := str(keys.take("mixed_precision") or "no")) not in ("no", "bf16", "fp16"):
        raise SpecError(
            f"mixed_precision={precision}: cannot be simulated beside DeepSpeed (use bf16)"
        )
    return {
        "sequence_parallel_size": keys.count(f"{_DEGREES}sp_size", 1),
        **said,
        **{name: {"enabled": precision == name} for name in ("bf16", "fp16")},
        "zero_optimization": {"stage": said.get("zero_stage", 2)}
        | {
            f"offload_{part}": {"device": said.get(f"offload_{part}_device", "none")}
            for part in ("optimizer", "param")
        },
    }


def _recompute(reading: Reading, *, stated: bool) -> None:
    reading.knobs["recompute"] = "full" if stated else "none"
    if not stated:
        reading.derived.append(
            "recomputation: the file does not say it, simulated without (give "
            "contender.recompute=full)"
        )
