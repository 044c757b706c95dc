"""Reads a Hugging Face ``config.json``, which has the sizes of a model and nothing of how it is
trained, and the files of trainers that take a model in this form: nanotron's YAML has it inside,
DeepSpeed's JSON and Accelerate's YAML stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.explain.reading import Keys, Reading, flat, share_of_ranks
from benchmarks.specification import SpecError

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "quantization_config": (None, "no price for quantized weights"),
    "attention_bias": (False, "biases are not priced"),
    "use_mrope": (False, "positions of several dimensions are not priced"),
    "mlp_bias": (False, "biases are not priced"),
    "sliding_window": (None, "attention is priced over the whole sequence"),
}
_HARMLESS = (
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
    _check_dense(values)
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
    reading.code = "llama" if kind == "mistral" else kind  # as these two are written alike
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


_NANOTRON_NEUTRAL: dict[str, tuple[Any, str]] = {
    "parallelism.expert_parallel_size": (1, "experts"),
    "parallelism.moe_layer_recompute": (False, "experts"),
    "parallelism.tp_linear_async_communication": (False, "priced without this overlap"),
    "optimizer.accumulate_grad_in_fp32": (True, "gradients are priced in fp32"),
    "parallelism.tp_recompute_allgather": (True, "gathered inputs are not kept"),
    "parallelism.recompute_layer": (False, "recomputation"),
}
_NANOTRON_MODEL = ("is_", "_fused_", "_attn_implementation", "z_loss", "no_rope_layer", "_use_")
_NANOTRON_HARMLESS = (
    *("checkpoints.", "data_stages", "general.", "lighteval", "logging.", "profiler", "tokenizer."),
    *("optimizer.learning_rate", "optimizer.optimizer_factory", "optimizer.clip_grad"),
    *("optimizer.weight_decay", "model.init_method", "tokens.train_steps", "tokens.val_", "s3_"),
    *("data.", "doremi.", "optimizer.torch_adam", "tokens.limit_"),
    *("model.ddp_bucket_cap_mb", "metrics_logging", "optimizer.adam"),
)
_DEEPSPEED_HALF = ("bf16", "fp16", "torch_autocast")
_DEEPSPEED_NEUTRAL: dict[str, tuple[Any, str]] = {
    "zero_optimization.offload_optimizer.device": ("none", "no price for the host's memory"),
    "zero_optimization.offload_param.device": ("none", "no price for the host's memory"),
    "zero_optimization.overlap_comm": (True, "gradients are priced as sent beside the backward"),
    "zero_optimization.zero_quantized_weights": (False, "weights are sent in bf16"),
    "zero_optimization.zero_quantized_gradients": (False, "gradients are sent in bf16"),
    "torch_autocast.dtype": ("", "priced with bf16 parameters and fp32 masters"),
    "pipeline.partition": ("parameters", "priced with stages of equal cost"),
}
_DEEPSPEED_HARMLESS = (
    *("optimizer.", "scheduler.", "gradient_clipping", "steps_per_print", "wall_clock_breakdown"),
    *(
        "fp16.",
        "bf16.",
        "torch_autocast.lower",
        "zero_allow_untested",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.zero_hpz",  # without stage 3
    ),
    *("zero_optimization.stage3_", "zero_optimization.reduce_", "zero_optimization.allgather_"),
    *("zero_optimization.offload_", "zero_optimization.sub_group_size", "tensorboard.", "wandb."),
    *("flops_profiler.", "comms_logger.", "dump_state", "csv_monitor.", "zero_force_ds_cpu"),
    *("zero_optimization.round_robin", "prescale_gradients", "data_types."),
    *("pipeline.pipe_partitioned", "pipeline.grad_partitioned", "pipeline.seed_layers"),
)
_DEGREES = "parallelism_config.parallelism_config_"
_ACCELERATE_NEUTRAL: dict[str, tuple[Any, str]] = {
    "fsdp_config.fsdp_offload_params": (False, "no price for the host's memory"),
    "fsdp_config.fsdp_forward_prefetch": (False, "gathers are priced in FSDP2's order"),
    "fsdp_config.fsdp_auto_wrap_policy": (
        "TRANSFORMER_BASED_WRAP",
        "priced with a unit per block",
    ),
    "fsdp_config.fsdp_backward_prefetch": ("BACKWARD_PRE", "priced as gathered ahead"),
    "fsdp_config.fsdp_backward_prefetch_policy": ("BACKWARD_PRE", "priced as gathered ahead"),
    "downcast_bf16": ("no", "parameters in another type"),
}
_ACCELERATE_HARMLESS = (
    f"{_DEGREES}dp_shard_size",  # the ranks that the others leave
    *("compute_environment", "debug", "machine_rank", "main_", "rdzv_", "same_network", "tpu_"),
    *("use_cpu", "enable_cpu_affinity", "fsdp_config.fsdp_state_dict", "fsdp_config.fsdp_sync"),
    *("fsdp_config.fsdp_cpu_ram", "fsdp_config.fsdp_use_orig", "gpu_ids", "fsdp_config.fsdp_tr"),
)


def _check_dense(values: Mapping[str, Any], place: str = "") -> None:
    if experts := next((key for key in _EXPERTS if values.get(key)), ""):
        raise SpecError(f"{place}{experts}={values[experts]}: no price for mixtures of experts")


def nanotron(tree: Mapping[str, Any], num_gpus: int | None) -> Reading:
    """What nanotron's YAML says; raises SpecError, in one line, for what has no price."""
    tree = dict(tree)
    tree["model"] = dict(tree.get("model", {}))
    sizes = tree["model"].pop("model_config", {})
    _check_dense(sizes, "model.model_config.")
    config = Keys(sizes, lambda key: f"model.model_config.{key}")
    keys = Keys(flat(tree))
    reading = Reading(dialect="nanotron", contender="megatron_core", program="nanotron")
    degree = {
        name: keys.number(f"parallelism.{name}", 1) or 1
        for name in ("tp", "pp", "dp", "context_parallel_size")
    }
    slices = degree.pop("context_parallel_size")
    engine = str(keys.take("parallelism.pp_engine", "1f1b"))
    if degree["pp"] > 1 and engine != "1f1b":
        raise SpecError(f"parallelism.pp_engine={engine}: no price (use 1f1b)")
    gpus = num_gpus or degree["tp"] * degree["pp"] * degree["dp"] * slices
    replicate = share_of_ranks(gpus, {"tp": degree["tp"], "pp": degree["pp"], "cp": slices})
    size = keys.needed("tokens.micro_batch_size")
    local = size * (keys.number("tokens.batch_accumulation_per_replica", 1) or 1)
    reading.free, reading.batch_per_replica = "replicate", local
    reading.model = llama(config, "llama")
    reading.model["seq"] = keys.needed("tokens.sequence_length")
    config.sort_rest(reading, _NEUTRAL, (*_HARMLESS, *_NANOTRON_MODEL))
    reading.settings = {"num_gpus": gpus, "global_batch": local * replicate}
    reading.settings |= {"microbatch_size": size}
    half = str(keys.take("model.dtype", "bfloat16")) == "bfloat16"
    reading.settings["precision"] = "bf16" if half else "fp32"
    reading.pads = keys.number("model.make_vocab_size_divisible_by", 1)
    scattered = keys.take("parallelism.tp_mode", "ALL_REDUCE") == "REDUCE_SCATTER"
    recompute = keys.take("parallelism.recompute_layer", False)
    reading.knobs = {
        "tp": degree["tp"],
        "pp": degree["pp"],
        "replicate": replicate,
        "replicate_zero": keys.number("optimizer.zero_stage", 0),
        "sequence_parallel": scattered and degree["tp"] > 1,
        "recompute": "full" if recompute else "none",
    }
    # Its engines are ``AllForwardAllBackward`` and ``OneForwardOneBackward`` (pipeline_parallel).
    reading.only = {"chunks": 1, "schedule": "1f1b", "placement": "dp_inner"}
    reading.knobs |= reading.only
    reading.slice_sequences("parallelism.context_parallel_size", slices)
    keys.sort_rest(reading, _NANOTRON_NEUTRAL, _NANOTRON_HARMLESS)
    return reading


def deepspeed(tree: Mapping[str, Any], model: Reading, num_gpus: int | None) -> Reading:
    """What DeepSpeed's JSON says of a ``model`` that was read before; raises SpecError, in one
    line, for what has no price."""
    if num_gpus is None:
        raise SpecError("num_gpus: a DeepSpeed JSON does not say it (give num_gpus=N)")
    # Values that are "auto" are filled in by Hugging Face's Trainer, so they say nothing here.
    said = flat(tree)
    keys = Keys({key: value for key, value in said.items() if value != "auto"})
    reading = model
    stage = keys.number("zero_optimization.stage", 0) or 0
    tp = keys.number("tensor_parallel.autotp_size", 1) or 1
    pp = keys.number("pipeline.stages", 1) or 1
    replicate = share_of_ranks(num_gpus, {"pp": pp, "tp": tp})
    taken = [keys.take(f"{name}.enabled", False) for name in _DEEPSPEED_HALF]
    if (half := any(taken)) or "auto" not in [
        said.get(f"{name}.enabled") for name in _DEEPSPEED_HALF
    ]:
        reading.settings["precision"] = "bf16" if half else "fp32"
    else:
        reading.derived.append("bf16.enabled=auto: priced in bf16 (give precision=fp32)")
    if stage == 3:
        for key, degree in (("tensor_parallel.autotp_size", tp), ("pipeline.stages", pp)):
            if degree > 1:
                raise SpecError(f"{key}={degree}: no price with ZeRO-3 (use 1)")
        reading.contender = "deepspeed_zero3"
        reading.knobs = {"shard": num_gpus, **_stage3(keys, num_gpus)}
    else:
        reading.contender = "deepspeed_3d"
        reading.knobs = {"tp": tp, "pp": pp, "replicate": replicate, "replicate_zero": stage}
        reading.knobs["compile"] = False
    own = reading.settings["precision"]  # DeepSpeed adds and sends in the type of the model
    reading.knobs["grad_accum_dtype"] = keys.take("data_types.grad_accum_dtype", own)
    reading.knobs["reduce_dtype"] = keys.take("communication_data_type", own)
    if bucket := keys.number("zero_optimization.reduce_bucket_size"):
        reading.knobs["reduce_bucket_size"] = bucket
    reading.free = "shard" if stage == 3 else "replicate"
    reading.traits["eager"] = reading.code
    # ``PipelineModule`` recomputes runs of this length; 0: none.
    if keys.number("pipeline.activation_checkpoint_interval", 0):
        reading.knobs["recompute"] = "full"
    else:
        _without_recomputation(reading)
    size = keys.number("train_micro_batch_size_per_gpu")
    steps = keys.number("gradient_accumulation_steps", 1) or 1
    batch = keys.number("train_batch_size")
    if size is not None and batch is None:
        batch, reading.batch_per_replica = size * steps * replicate, size * steps
    if size is None and batch is not None:
        size = batch // (steps * replicate)
    reading.settings |= {"num_gpus": num_gpus}
    reading.settings |= {"global_batch": batch} if batch else {}
    reading.settings |= {"microbatch_size": size} if size else {}
    keys.sort_rest(reading, _DEEPSPEED_NEUTRAL, _DEEPSPEED_HARMLESS)
    return reading


def _stage3(keys: Keys, num_gpus: int) -> dict[str, Any]:
    """What the JSON says of ZeRO-3's gathers, by the contender's names. A second copy over all
    ranks is the first one."""
    names = {
        "stage3_prefetch_bucket_size": "prefetch_bucket_size",
        "stage3_max_live_parameters": "live_parameters",
        "stage3_param_persistence_threshold": "param_persistence_threshold",
        "zero_hpz_partition_size": "zero_hpz_partition_size",
    }
    said = {knob: keys.number(f"zero_optimization.{name}") for name, knob in names.items()}
    if not 0 < (said["zero_hpz_partition_size"] or 0) < num_gpus:
        said["zero_hpz_partition_size"] = None
    return {knob: value for knob, value in said.items() if value is not None}


def accelerate(tree: Mapping[str, Any], model: Reading, num_gpus: int | None) -> Reading:
    """What Accelerate's YAML for FSDP says of a ``model`` that was read before; raises SpecError,
    in one line, for what has no price."""
    keys = Keys(flat(tree))
    if (kind := keys.take("distributed_type")) != "FSDP":
        raise SpecError(
            f"distributed_type={kind}: only FSDP is read (give DeepSpeed's own JSON, or "
            "Megatron-LM's arguments after --)"
        )
    strategies = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
    strategy = str(keys.take("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD"))
    strategy = strategies.get(strategy, strategy)
    again = keys.take("fsdp_config.fsdp_reshard_after_forward", True)
    if strategy not in ("FULL_SHARD", "HYBRID_SHARD") or again in (False, "SHARD_GRAD_OP"):
        raise SpecError(
            f"fsdp_sharding_strategy={strategy}, fsdp_reshard_after_forward={again}: no price "
            "(there is one for FULL_SHARD and HYBRID_SHARD, which gather again in the backward)"
        )
    if keys.take("fsdp_config.fsdp_version", 1) == 1:
        model.named.append("fsdp_version=1: priced as FSDP2")
    machines = keys.number("num_machines", 1) or 1
    gpus = keys.number("num_processes", num_gpus)
    if not (gpus := num_gpus or gpus):
        raise SpecError("num_processes: the file does not say it (give num_gpus=N)")
    own, tp, cp = (
        keys.number(f"{_DEGREES}{name}_size", 1) or 1 for name in ("dp_replicate", "tp", "cp")
    )
    if tp > 1:
        raise SpecError(
            f"{_DEGREES}tp_size={tp}: no price beside Accelerate's FSDP (give "
            f"contender=torchtitan contender.tp={tp} with the config.json alone)"
        )
    replicate = machines if strategy == "HYBRID_SHARD" else own
    model.contender, model.free = "fsdp", "shard"
    shard = share_of_ranks(gpus, {"replicate": replicate, "cp": cp})
    model.knobs = {"shard": shard, "replicate": replicate}
    model.slice_sequences(f"{_DEGREES}cp_size", cp)
    model.knobs["compile"] = keys.take("dynamo_config.dynamo_backend", "NO") not in ("NO", "no")
    model.traits["eager"] = model.code  # where it is not compiled
    if keys.take("fsdp_config.fsdp_activation_checkpointing", False):
        model.knobs["recompute"] = "full"
    else:
        _without_recomputation(model)
    if (precision := str(keys.take("mixed_precision", "no"))) == "no":
        model.derived.append(
            "mixed_precision=no: priced in fp32; if the script says bf16=True, give precision=bf16"
        )
    model.settings |= {"num_gpus": gpus, "precision": "fp32" if precision == "no" else "bf16"}
    if precision == "fp8":
        model.multiply_in_8_bits("mixed_precision=fp8", "tensorwise")
    keys.sort_rest(model, _ACCELERATE_NEUTRAL, (*_ACCELERATE_HARMLESS, "dynamo_config."))
    return model


def _without_recomputation(reading: Reading) -> None:
    reading.knobs["recompute"] = "none"
    reading.derived.append(
        "recomputation: the file does not say it, priced without (give contender.recompute=full)"
    )
