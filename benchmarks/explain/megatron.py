"""Reads Megatron-LM's arguments (``megatron/training/arguments.py``, core_v0.15.0) and the YAML of
Megatron-Bridge, and writes plans as such arguments.

Defaults are Megatron's own: tied embeddings, learned positions, dropout of 0.1, no overlap, no
ZeRO-1. Overlaps and fusions are traits of the priced program, which the arguments switch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import gcd
from pathlib import Path
from shlex import quote
from typing import Any, get_args

import yaml

from baselines.public_3d import EXCHANGES, CpCommType
from benchmarks.explain.arguments import (
    Arguments,
    arguments_of_log,
    arguments_of_script,
)
from benchmarks.explain.logs import GPUS
from benchmarks.explain.reading import UNKNOWN, Keys, Reading, share_of_ranks
from benchmarks.specification import SpecError
from zeropp.price.programs import program_named
from zeropp.schedule.plan import SizedPlan

_TOKENIZERS = {"GPT2BPETokenizer": 50257}
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "--fp4-format": (None, "4-bit products are simulated in bf16"),
    "--transformer-impl": ("transformer_engine", "simulated with Transformer Engine's layers"),
    "--mtp-num-layers": (None, "the prediction of more tokens is not simulated"),
    "--window-size": (None, "attention is simulated over the whole sequence"),
    "--reset-attention-mask": (None, "attention is simulated across documents (model.document=N)"),
    "--rampup-batch-size": (None, "simulated with the last batch"),
    "--distribute-saved-activations": (None, "saved activations are split over tensor parallelism"),
    "--deepspeed": (None, "simulated with Megatron-Core's engine and layers, not DeepSpeed's"),
    "--deterministic-mode": (None, "slower kernels"),
    "--optimizer-cpu-offload": (None, "simulated without offloading"),
    "--use-legacy-models": (None, "kernels of an older program"),
    "--fp32-residual-connection": (None, "residuals in fp32"),
    "--no-rope-fusion": (None, "rotary embedding is simulated as one kernel"),
    "--no-bias-swiglu-fusion": (None, "SwiGLU is simulated as one kernel"),
    "--no-bias-dropout-fusion": (None, "dropout is simulated as one kernel"),
    "--no-bias-gelu-fusion": (None, "GELU is simulated as one kernel"),
    "--optimizer": ("adam", "simulated with Adam's states"),
    "--decoder-first-pipeline-num-layers": (None, "simulated with equal stages"),
    "--decoder-last-pipeline-num-layers": (None, "simulated with equal stages"),
    "--account-for-embedding-in-pipeline-split": (None, "simulated with stages of equal cost"),
    "--account-for-loss-in-pipeline-split": (None, "simulated with stages of equal cost"),
    "--defer-embedding-wgrad-compute": (None, "the head's weight gradient is not deferred"),
    "--delay-wgrad-compute": (None, "weight gradients are not delayed"),
    "--use-precision-aware-optimizer": (None, "other bytes per parameter"),
    "--qk-layernorm": (None, "the norms of queries and keys are not simulated"),
    "--add-qkv-bias": (None, "the biases of QKV products are not simulated"),
    "--cuda-graph-impl": ("none", "launches are simulated without CUDA graphs"),
    "--enable-cuda-graph": (None, "launches are simulated without CUDA graphs"),
}
_HYBRID = (
    *("--is-hybrid-model", "--hybrid-attention-ratio", "--hybrid-override-pattern"),
    "--hybrid-layer-pattern",
)
_REFUSED = {
    "--num-experts": "mixtures of experts cannot be simulated",
    "--img-h": "models with vision cannot be simulated",
    "--multi-latent-attention": "latent attention cannot be simulated",
    "--experimental-attention-variant": "linear and sparse attention cannot be simulated",
    "--peft": "adapters cannot be simulated",
    "--rollout-batch-size": "slime's own steps and defaults cannot be simulated (give the "
    "arguments of its training, Megatron-LM's, after --)",
    "--use-megatron-fsdp": "cannot be simulated in Megatron-LM (use contender=megatron_fsdp with "
    "the model's config.json)",
    "--use-torch-fsdp2": "FSDP2 under Megatron's pipeline cannot be simulated (use contender=fsdp)",
    **dict.fromkeys(_HYBRID, "state-space layers cannot be simulated"),
}
_HARMLESS = (
    *("--save", "--load", "--log", "--lr", "--min-lr", "--eval", "--tensorboard", "--wandb"),
    *("--data", "--split", "--train-", "--exit-", "--adam-", "--weight-decay", "--init-method-std"),
    *("--tokenizer", "--vocab-file", "--merge-file", "--distributed-", "--ckpt", "--dist-ckpt"),
    *("--async-save", "--seed", "--num-workers", "--mock-data", "--decoupled-", "--clip-grad"),
    *("--rotary-", "--norm-epsilon", "--layernorm-epsilon", "--no-save", "--no-load", "--profile"),
    *("--manual-gc", "--no-create-attention-mask", "--no-mmap", "--use-mcore-models", "--start-"),
    *("--use-checkpoint", "--override-opt", "--finetune", "--initial-loss-scale", "--loss-scale"),
    *("--timing-log", "--tiktoken", "--apply-layernorm-1p", "--no-position-embedding", "--legacy"),
    *("--calculate-per-token-loss", "--max-position-embeddings", "--attention-softmax-in-fp32"),
    *("--no-masked-softmax-fusion", "--use-persistent", "--hysteresis", "--no-check-for-nan"),
    *("--empty-unused-memory", "--fp8-amax", "--fp8-margin", "--fp8-interval"),
    *("--deepspeed_config", "--deepspeed-activation", "--checkpoint-num-layers", "--no-pipeline"),
    *("--auto-detect-ckpt", "--position-embedding", "--bias-", "--reset-", "--use-flash-attn"),
    *("--expert-", "--moe-"),  # of a dense model
    *(
        "--eod-mask",
        "--num-experts",
        "--use-rope",
        "--rope-",
        "--world-size",
        "--no-log",
        "--use-pytorch-profiler",
    ),
)


def read(
    text: str, num_gpus: int | None, folder: Path = Path(), own: Sequence[str] = ()
) -> Reading:
    """What a script, a command line, a log or the YAML of a test says; ``folder`` has what a script
    sources, ``own`` are its own arguments. Raises SpecError, in one line, for what has no price."""
    world, named = None, list[str]()
    if logged := (values := arguments_of_log(text)):
        *_, world = None, *map(int, GPUS.findall(text))
    if not values and "MODEL_ARGS:" in text:  # the YAML of Megatron-LM's functional tests
        try:
            given: Mapping[str, Any] = yaml.safe_load(text)["MODEL_ARGS"]
        except (yaml.YAMLError, TypeError, KeyError) as error:
            raise SpecError(f"not a YAML file with MODEL_ARGS: {error}") from None
        values = {flag: value for flag, value in given.items() if value is not False}
    elif not values:
        values, world, named = arguments_of_script(text, folder, num_gpus, own)
    reading = read_arguments(values, num_gpus or world, stated=num_gpus is not None)
    reading.named += named
    if logged:
        _count_unknown(reading)
    return reading


def _count_unknown(reading: Reading) -> None:
    """Only count the unknown keys of a file that has nearly all of them, with their defaults."""
    unknown = [line for line in reading.named if line.endswith(UNKNOWN)]
    reading.named = [line for line in reading.named if line not in unknown]
    reading.harmless += [line.partition(":")[0] for line in unknown]
    if unknown:
        reading.named.append(f"{len(unknown)} keys are {UNKNOWN} (-v lists them)")


_GATED = ("swiglu", "quick-geglu", "geglu", "gelu-tanh")  # the last two of MindSpeed-LLM
_OFFLOADED = ("qkv_linear", "core_attn", "attn_proj")  # all modules that a dense block can offload


def read_arguments(values: Arguments, num_gpus: int | None, *, stated: bool) -> Reading:
    """What Megatron's flags say; ``stated``: the user has given the number of GPUs."""
    for flag, why in _REFUSED.items():
        if values.get(flag) and str(values[flag]) != "1":  # one expert is a dense MLP
            raise SpecError(f"{flag}={values[flag]}: {why}")
    keys = Keys(values)
    reading = Reading(dialect="megatron", contender="megatron_core")
    _degrees(keys, reading, num_gpus, stated=stated)
    reading.model = _model(keys, reading)
    _recompute(keys, reading)
    fine, modules = (
        keys.take(key) for key in ("--fine-grained-activation-offloading", "--offload-modules")
    )
    if fine and not all(module in str(modules) for module in _OFFLOADED):
        reading.named.append(
            f"--offload-modules={modules}: simulated with all of {', '.join(_OFFLOADED)} offloaded"
        )
    reading.knobs |= {
        "offload_blocks": keys.number("--cpu-offloading-num-layers") or 0,
        "offload_modules": "attention" if fine else "none",
        "bucket_size": keys.number("--ddp-bucket-size") or 0,
    }
    _traits(keys, reading)
    half = bool(keys.take("--bf16"))
    if keys.take("--fp16"):
        half = True
        reading.derived.append("--fp16: simulated as bf16, whose kernels and bytes are the same")
    reading.settings["precision"] = "bf16" if half else "fp32"
    recipe, gathers = keys.take("--fp8-recipe", "delayed"), keys.take("--fp8-param-gather")
    if eight := keys.take("--fp8-format"):
        reading.multiply_in_8_bits(f"--fp8-format={eight} --fp8-recipe={recipe}")
        reading.traits["gathers_casts"] = bool(gathers)
    keys.sort_rest(reading, _NEUTRAL, _HARMLESS)
    return reading


def _degrees(keys: Keys, reading: Reading, num_gpus: int | None, *, stated: bool) -> None:
    tp = keys.count("--tensor-model-parallel-size", 1)
    pp = keys.count("--pipeline-model-parallel-size", 1)
    ulysses = keys.count("--ds-sequence-parallel-size", 1)  # of Megatron-DeepSpeed
    cp = ulysses if ulysses > 1 else keys.count("--context-parallel-size", 1)
    if num_gpus is None:
        raise SpecError("num_gpus: these arguments do not say it (give num_gpus=N)")
    if not stated:
        reading.derived.append(f"num_gpus={num_gpus}, as the file starts them")
    replicate = share_of_ranks(num_gpus, {"tp": tp, "pp": pp, "cp": cp})
    reading.slice_sequences(
        "--ds-sequence-parallel-size" if ulysses > 1 else "--context-parallel-size", cp
    )
    # Of every layer, or of each.
    way = str(keys.given("--cp-comm-type") or ("a2a" if ulysses > 1 else "p2p")).split()[0]
    if cp > 1 and way not in get_args(CpCommType):
        raise SpecError(
            f"--cp-comm-type={way}: cannot be simulated (use {', '.join(get_args(CpCommType))})"
        )
    reading.knobs["cp_comm_type"] = way if cp > 1 else "p2p"
    size = keys.number("--micro-batch-size", least=1)
    growing = str(keys.take("--step-batch-size-schedule") or "")  # such as 0:384 200B:768
    if growing:
        reading.named.append(f"--step-batch-size-schedule={growing}: simulated with the last batch")
    batch = keys.number("--global-batch-size", *map(int, re.findall(r":(\d+)$", growing)))
    if batch is None and size:
        batch, reading.batch_per_replica = size * replicate, size
    layers = keys.count("--num-layers")
    per_chunk = keys.number("--num-layers-per-virtual-pipeline-stage")
    chunks = keys.number("--num-virtual-stages-per-pipeline-rank")
    chunks = chunks or (layers // pp // per_chunk if per_chunk else 1)
    if layout := keys.given("--pipeline-model-parallel-layout"):
        # Virtual stages of a layout such as Et|(tt|)*3,tL
        whole = re.sub(r"\((.*?)\)\*(\d+)", lambda m: m[1] * int(m[2]), str(layout))
        chunks = (whole.replace(",", "").strip("|").count("|") + 1) // pp
        reading.named.append(
            "--pipeline-model-parallel-layout: simulated with stages of equal cost"
        )
    reading.model = {"layers": layers}
    reading.free = "replicate"
    reading.settings |= {"num_gpus": num_gpus, "global_batch": batch}
    reading.settings["microbatch_size"] = size or "auto"
    reading.knobs |= {"tp": tp, "pp": pp, "replicate": replicate, "chunks": chunks}
    reading.knobs["schedule"] = "interleaved_1f1b" if chunks > 1 else "1f1b"
    reading.knobs["sequence_parallel"] = bool(keys.take("--sequence-parallel")) and tp > 1
    stage = keys.number("--zero-stage", 0) or 0  # of Megatron-DeepSpeed
    if stage > 1:
        raise SpecError(
            f"--zero-stage={stage}: cannot be simulated in Megatron's pipeline (use 0 or 1)"
        )
    zero1 = bool(keys.take("--use-distributed-optimizer")) or stage == 1
    inner = keys.take("--use-tp-pp-dp-mapping")
    reading.knobs |= {
        "replicate_zero": int(zero1),
        "placement": "pp_inner" if inner else "dp_inner",
    }


def _model(keys: Keys, reading: Reading) -> dict[str, Any]:
    hidden, heads = keys.count("--hidden-size"), keys.count("--num-attention-heads")
    of_deepspeed = keys.number("--num-key-value-heads")  # as Megatron-DeepSpeed has it
    groups = keys.number("--num-query-groups", of_deepspeed or heads)
    grouped = keys.take("--group-query-attention") or of_deepspeed
    rope = any(
        [
            keys.given("--position-embedding-type") == "rope",
            keys.take("--use-rotary-position-embeddings"),
        ]
    )
    norm = keys.given("--normalization", "LayerNorm")
    if rope != (str(norm).lower() == "rmsnorm"):
        reading.named.append(
            f"--normalization={norm} with {'rotary' if rope else 'learned'} positions: simulated "
            + ("as Llama's layers" if rope else "as GPT's layers")
        )
    biases = not keys.take("--disable-bias-linear")
    if rope and biases:
        reading.named.append(
            "--disable-bias-linear: not given, but Llama's layers are simulated without biases "
            "(--as megatron writes it)"
        )
    if not rope and not biases:
        reading.named.append("--disable-bias-linear: GPT's layers are simulated with biases")
    gates = {name for name in _GATED if keys.take(f"--{name}")}
    keys.take("--squared-relu"), keys.take("--openai-gelu")
    ffn = keys.number("--ffn-hidden-size")
    ffn = ffn or (int(4 * hidden * 2 / 3 / 64) * 64 if "swiglu" in gates else 4 * hidden)
    channels = keys.number("--kv-channels")
    family = "llama" if rope else "gpt"
    return reading.model | {
        "name": f"{family}_{reading.model['layers']}x{hidden}",
        "family": family,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": groups if grouped else heads,
        "ffn": ffn,
        "gated_mlp": bool(gates),
        "vocab": _vocabulary(keys, reading),
        "seq": keys.number("--seq-length") or keys.number("--encoder-seq-length"),
        "tied_embeddings": not keys.take("--untie-embeddings-and-output-weights", False),
        "dropout": max(
            keys.number(f"--{of}-dropout", 0.1, kind=float) for of in ("attention", "hidden")
        ),
        "head_width": None if channels is None or channels * heads == hidden else channels,
    }


def _vocabulary(keys: Keys, reading: Reading) -> int | None:
    """The vocabulary, and to what it is padded (``training/tokenizer``); None if only the
    tokenizer's file has it. NullTokenizer adds one token."""
    padded: int | None = keys.number("--padded-vocab-size")
    kind, size = keys.given("--tokenizer-type", ""), keys.number("--vocab-size")
    reading.pads = keys.number("--make-vocab-size-divisible-by", 128) or 1
    if padded is not None:
        reading.pads = 1
        return padded
    size = size or _TOKENIZERS.get(str(kind))
    return size + 1 if size and kind == "NullTokenizer" else size


def _recompute(keys: Keys, reading: Reading) -> None:
    kind = keys.given("--recompute-granularity") or "none"
    if keys.take("--recompute-activations"):
        kind = "selective"
    old = keys.take("--checkpoint-activations"), keys.given("--activations-checkpoint-method")
    kind = "full" if any(old) else kind  # Megatron-LM of before 2023
    method, count = keys.given("--recompute-method"), keys.number("--recompute-num-layers")
    if method == "uniform" and count not in (None, 1):
        reading.named.append(f"--recompute-num-layers={count}, uniform: simulated with 1")
    modules = set(re.findall(r"\w+", str(keys.given("--recompute-modules", "core_attn"))))
    if kind == "selective" and "mlp" not in modules:
        kind = "none"
        reading.derived.append(
            "selective recomputation drops attention scores, which fused attention never keeps"
        )
    if others := modules - {"core_attn", "mlp"}:
        reading.named.append(
            f"--recompute-modules {' '.join(sorted(others))}: their recomputation is not simulated"
        )
    reading.knobs["recompute"] = kind
    if kind == "full" and method == "block" and count:
        reading.knobs["recompute_blocks"] = count


def _traits(keys: Keys, reading: Reading) -> None:
    """Overlaps, fusions and the bytes of gradients."""
    fusion = bool(keys.take("--cross-entropy-loss-fusion"))
    fused = keys.given("--cross-entropy-fusion-impl", "native") == "te"
    if fusion and not fused:
        reading.named.append(
            "--cross-entropy-loss-fusion: simulated without (only the implementation te is known)"
        )
    backend = keys.given("--attention-backend", "auto")
    reading.traits |= {
        "overlap_reduction": bool(keys.take("--overlap-grad-reduce")),
        "overlap_updated": bool(keys.take("--overlap-param-gather")),
        "overlap_tensor": bool(keys.take("--tp-comm-overlap")),
        "fused_loss": fusion and fused,
        "fused_accumulation": not keys.take("--no-gradient-accumulation-fusion", False),
        "flash": str(backend).removeprefix("AttnBackend.") not in ("unfused", "local"),
        "dropout_masks": reading.model["dropout"] > 0,
    }
    keys.take("--accumulate-allreduce-grads-in-fp32")
    main = str(keys.take("--main-grads-dtype"))  # a log has torch.bfloat16
    if keys.take("--grad-reduce-in-bf16") or main.endswith("16"):
        reading.traits |= {"bf16.gradients": 2, "bf16.reduced": 2}


_BRIDGE = {  # keys of Megatron-Bridge whose flag has another name
    "bucket_size": "--ddp-bucket-size",
    "num_moe_experts": "--num-experts",
    "gated_linear_unit": "--swiglu",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "fp8": "--fp8-format",
}
# Of the section that decides over the model's and the data parallelism's own keys.
_BRIDGE_MIXED = ("bf16", "fp16", "fp8", "fp8_recipe", "fp8_param_gather", "grad_reduce_in_fp32")
_BRIDGE_OFF = {  # keys that Megatron-LM has a flag against
    "add_bias_linear": "--disable-bias-linear",
    "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "grad_reduce_in_fp32": "--grad-reduce-in-bf16",
}


def read_bridge(tree: Mapping[str, Any], num_gpus: int | None) -> Reading:
    """What a ``run_config.yaml`` of Megatron-Bridge says, which ``cfg.to_yaml`` writes of a recipe.
    Its keys are those of Megatron-Core's classes, nearly all of them with every default."""
    sections = {name: part for name, part in tree.items() if isinstance(part, dict)}
    model, mixed, rows = (
        sections.get(name, {}) for name in ("model", "mixed_precision", "dataset")
    )
    if isinstance(said := tree.get("mixed_precision"), str):  # such as bf16_mixed
        mixed = {said[:4]: True, "fp8": said if "fp8" in said else None}
    given = {
        key: value
        for name in ("dist", "optimizer", "model", "train", "ddp", "comm_overlap")
        for key, value in sections.get(name, {}).items()
    }
    given |= {key: mixed[key] for key in _BRIDGE_MIXED if mixed.get(key) is not None}
    given["peft"] = bool(tree.get("peft"))
    if "num_layers" not in given and not given["peft"]:
        raise SpecError(
            "model.num_layers: missing, as in a file of changes to a recipe (give the "
            "run_config.yaml that cfg.to_yaml writes)"
        )
    # The length of the rows is trained; a model may allow for more.
    lengths = (rows.get("sequence_length"), rows.get("seq_length"), model.get("seq_length"))
    given["seq_length"] = next(filter(None, lengths), None)
    values: Arguments = {}
    for key, value in given.items():
        if key in _BRIDGE_OFF or key[0] == "_" or isinstance(value, dict):
            continue
        if isinstance(value, list):  # as text; the stages of a pipeline as in Megatron's layout
            parts = ("".join(map(str, p)) if isinstance(p, list) else str(p) for p in value)
            value = ("|" if any(isinstance(part, list) for part in value) else " ").join(parts)
        values[_BRIDGE.get(key, f"--{key.replace('_', '-')}")] = value
    values |= {flag: given.get(key) is False for key, flag in _BRIDGE_OFF.items()}
    values["--group-query-attention"] = bool(model.get("num_query_groups"))
    values = {flag: v for flag, v in values.items() if v is not None and v is not False}
    reading = read_arguments(values, num_gpus, stated=True)
    _count_unknown(reading)
    reading.dialect = "bridge"
    return reading


def written(plan: SizedPlan) -> str:
    """A plan as flags of Megatron-LM; raises SpecError if it has none for it."""
    layout, shape = plan.layout, plan.shape
    equal = len(set(plan.blocks)) == 1 or layout.pp == 1
    if layout.shard > 1:
        raise SpecError(f"--as megatron: shard={layout.shard}: Megatron's pipeline has no ZeRO-3")
    if plan.schedule.name not in ("1f1b", "interleaved_1f1b", "accumulation"):
        raise SpecError(f"--as megatron: schedule={plan.schedule.name}: not in Megatron-LM")
    program, multiple = program_named(plan.program), gcd(shape.vocab, 128 * layout.tp)
    ways = {exchange: way for way, exchange in EXCHANGES.items()}
    flags: dict[str, object] = {
        "--num-layers": shape.layers,
        "--hidden-size": shape.hidden,
        "--ffn-hidden-size": shape.ffn,
        "--num-attention-heads": shape.heads,
        "--kv-channels": shape.head_width or False,
        "--group-query-attention": shape.kv_heads != shape.heads,
        "--num-query-groups": shape.kv_heads != shape.heads and shape.kv_heads,
        "--vocab-size": shape.vocab - 1,  # to which this tokenizer adds one
        "--tokenizer-type": "NullTokenizer",
        "--make-vocab-size-divisible-by": multiple != 128 * layout.tp and multiple // layout.tp,
        "--seq-length": shape.seq,
        "--max-position-embeddings": shape.seq,
        "--position-embedding-type": "rope" if shape.family == "llama" else "learned_absolute",
        "--normalization": "RMSNorm" if shape.family == "llama" else "LayerNorm",
        "--disable-bias-linear": shape.family == "llama",
        "--swiglu": shape.gates == 2,
        "--untie-embeddings-and-output-weights": not shape.tied_embeddings,
        "--attention-dropout": shape.dropout,
        "--hidden-dropout": shape.dropout,
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.context > 1 and layout.context,
        "--cp-comm-type": layout.context > 1 and ways[layout.exchange],
        "--num-virtual-stages-per-pipeline-rank": layout.pp > 1
        and layout.chunks > 1
        and equal
        and layout.chunks,
        "--pipeline-model-parallel-layout": not equal
        and f"E{'|'.join('t' * blocks for blocks in plan.blocks)}L",
        "--sequence-parallel": layout.sequence_parallel,
        "--use-distributed-optimizer": layout.replicate_zero == 1,
        "--use-tp-pp-dp-mapping": layout.placement == "pp_inner",
        "--micro-batch-size": plan.microbatch_size,
        "--global-batch-size": plan.global_batch,
        "--bf16": plan.precision != "fp32",
        "--fp8-format": plan.precision == "fp8" and "hybrid",
        "--fp8-recipe": plan.precision == "fp8" and "tensorwise",
        "--fp8-param-gather": plan.precision == "fp8" and program.gathers_casts,
        "--overlap-grad-reduce": program.overlap_reduction,
        "--overlap-param-gather": program.overlap_updated and layout.replicate_zero == 1,
        "--ddp-bucket-size": program.updated_bucket or False,
        "--tp-comm-overlap": program.overlap_tensor and layout.sequence_parallel,
        "--cross-entropy-loss-fusion": program.fused_loss,
        "--cross-entropy-fusion-impl": program.fused_loss and "te",
        "--grad-reduce-in-bf16": plan.precision != "fp32" and program.bf16.gradients == 2,
        "--no-gradient-accumulation-fusion": not program.fused_accumulation,
    }
    flags |= _memory_flags(plan)
    given = {flag: v for flag, v in flags.items() if v is not False}
    return " ".join(flag if v is True else f"{flag} {quote(str(v))}" for flag, v in given.items())


def _memory_flags(plan: SizedPlan) -> dict[str, object]:
    """The flags of what is recomputed, and of what waits in the host's memory."""
    flags: dict[str, object] = {}
    if plan.recompute != "none":
        flags["--recompute-granularity"] = plan.recompute
    if plan.recompute == "full":
        recomputed = plan.recomputed_per_stage
        number = sum(recomputed) if plan.layout.pp == 1 else max(recomputed)
        some = number if recomputed != plan.blocks else None
        flags["--recompute-method"] = "block" if some else "uniform"
        flags["--recompute-num-layers"] = some or 1
    if plan.recompute == "selective":
        flags["--recompute-modules"] = "mlp"
    if plan.offloads == "attention":
        flags["--fine-grained-activation-offloading"] = True
        flags["--offload-modules"] = " ".join(_OFFLOADED)
    elif plan.offload_blocks:
        flags["--cpu-offloading-num-layers"] = plan.offload_blocks
    return flags
