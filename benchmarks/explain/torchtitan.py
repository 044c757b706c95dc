"""Reads a torchtitan TOML (``torchtitan/config/job_config.py`` up to v0.2.2) or a function of 0.3's
``config_registry``, and writes plans as words on 0.3's command line.

Sizes of flavors are those of ``torchtitan/models/{llama3,qwen3}/__init__.py``; the width of an MLP
follows ``FeedForward`` in ``models/llama3/model``. Data parallelism that is -1 takes the ranks that
are left (``distributed/parallel_dims.py``).
"""

from __future__ import annotations

import importlib
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from benchmarks.explain.reading import Keys, Reading, flat, share_of_ranks
from benchmarks.specification import SpecError
from zeropp.price.programs import Scaling, program_named
from zeropp.schedule.plan import SizedPlan

# name: hidden, layers, heads, key/value heads, ffn, vocabulary, tied embeddings, and the width of
# heads where it is not hidden / heads
_LLAMA3: dict[str, tuple[Any, ...]] = {
    "debugmodel": (256, 6, 16, 16, 768, 2048, False),
    "1B": (2048, 16, 32, 8, 8192, 128256, True),
    "3B": (3072, 28, 24, 8, 8192, 128256, True),
    "8B": (4096, 32, 32, 8, 14336, 128256, False),
    "70B": (8192, 80, 64, 8, 28672, 128256, False),
    "405B": (16384, 126, 128, 8, 53248, 128256, False),
}
_QWEN3: dict[str, tuple[Any, ...]] = {
    "0.6B": (1024, 28, 16, 8, 3072, 151936, True, 128),
    "1.7B": (2048, 28, 16, 8, 6144, 151936, True),
    "4B": (2560, 36, 32, 8, 9728, 151936, True, 128),
    "8B": (4096, 36, 32, 8, 12288, 151936, False),
    "14B": (5120, 40, 40, 8, 17408, 151936, False),
    "32B": (5120, 64, 64, 8, 25600, 151936, False, 128),
}
_EXPERTS = ("deepseek_v3", "llama4", "gpt_oss")
_SCHEDULES = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
_LEAST_CHUNKS = {"1f1b": 1}  # stages per rank where nothing is said; 2 with all other schedules
# Where the degrees stood until February 2025.
_OLD = re.compile(
    r"^(training|experimental)\.(?=(data|tensor|pipeline|context)_parallel_|enable_async_tensor)"
)
_POLICIES = {"FullAC": "full", "SelectiveAC": "selective"}
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "model.norm_type": ("rmsnorm", "simulated as RMSNorm"),
    "optimizer.name": (("Adam", "AdamW"), "simulated with Adam's states"),
    "optimizer.implementation": ("fused", "temporaries of the optimizer's step"),
    "optimizer.early_step_in_backward": (False, "no gradients are kept"),
    "training.enable_cpu_offload": (False, "simulated without offloading"),
    "training.dtype": ("float32", "other bytes per parameter"),
    "training.mixed_precision_reduce": ("float32", "gradients are sent in another type"),
    "parallelism.disable_loss_parallel": (False, "every rank gathers all logits"),
    "parallelism.module_fqns_per_model_part": (None, "stages by hand; simulated with equal stages"),
    "parallelism.pipeline_parallel_schedule_csv": ("", "a schedule of one's own"),
    "parallelism.pipeline_parallel_split_points": (
        [],
        "stages by hand; simulated with equal stages",
    ),
    "parallelism.enable_fsdp_symm_mem": (False, "gathers are simulated as NCCL's own"),
    "parallelism.expert_parallel_degree": (1, "experts"),
    "parallelism.expert_tensor_parallel_degree": (1, "experts"),
    "activation_checkpoint.memory_budget": (0.5, "recomputation by a memory budget"),
    "fault_tolerance.enable": (False, "another data parallelism"),
    "experimental.custom_import": ("", "another model"),
    "debug.deterministic": (False, "slower kernels"),
}
_HARMLESS = (
    *("job.", "profiling.", "metrics.", "lr_scheduler.", "checkpoint.", "comm.", "optimizer."),
    *("validation.", "debug.", "memory_estimation.", "experimental.", "training.max_norm"),
    *(
        "training.steps",
        "training.data",
        "dataset.",
        "training.gc_freq",
        "training.seed",
        "quantize.",
    ),
    *("float8.", "compile.backend", "model.hf_assets_path", "training.warm"),
    *("model.tokenizer_path", "model.print_after_conversion", "fault_tolerance."),
    *("parallelism.spmd_backend", "training.disable_cuda_graphs", "training.gc_debug"),
    *("parallelism.context_parallel_", "activation_checkpoint.", "training.debug_moe"),
    # Left where there is no pipeline.
    *(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")),
    "parallelism.pipeline_parallel_layers_per_stage",
)


def read(text: str, num_gpus: int | None) -> Reading:
    """What a TOML says; raises SpecError, in one line, for a model that has no price here."""
    try:
        values = flat(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"not a TOML file: {error}") from None
    if not any(key.startswith(("model.", "training.")) for key in values):
        raise SpecError("a TOML without [model] and [training], so it is not torchtitan's")
    moved = {_OLD.sub("parallelism.", key): v for key, v in values.items()}
    # The loss of slices is 0.3's; before February 2025 torch's own was not compiled.
    return _read(moved, text, num_gpus, loss="torch" if moved.keys() == values.keys() else "eager")


def read_registered(name: str, arguments: Sequence[str], num_gpus: int | None) -> Reading:
    """What a function such as ``llama3:llama3_8b`` (module, function) of torchtitan 0.3's
    ``config_registry`` returns, with the words that its command line would have behind it. Imports
    torchtitan; raises SpecError, in one line, without it."""
    module, _, function = name.partition(":")
    try:
        manager = importlib.import_module("torchtitan.config").ConfigManager()
        config = manager.parse_args(["--module", module, "--config", function, *arguments])
    except (ImportError, ValueError) as error:
        raise SpecError(
            f"{name}: torchtitan's configuration cannot be made here: {error} (give a module and "
            "a function of its config_registry, where torchtitan 0.3 is installed)"
        ) from None
    spec = config.model_spec
    values: dict[str, Any] = {"model.name": spec.name, "model.flavor": spec.flavor}
    for section in ("training", "parallelism", "compile", "debug"):
        values |= flat({section: asdict(getattr(config, section))})
    policy = config.activation_checkpoint
    kind = "none" if policy is None else type(policy).__qualname__.split(".")[-2]
    values["activation_checkpoint.mode"] = _POLICIES.get(kind, kind)
    values["activation_checkpoint.selective_ac_option"] = "op"
    shown = repr(spec.model)
    if eight := next((word for word in ("Float8", "MXFP8", "NVFP4") if word in shown), ""):
        values["model.converters"] = [eight]
    return _read(values, "", num_gpus, loss="sliced")


def _read(
    values: dict[str, Any],
    text: str,
    num_gpus: int | None,
    *,
    loss: Literal["eager", "torch", "sliced"],
) -> Reading:
    keys = Keys(values)
    reading = Reading(dialect="torchtitan", contender="torchtitan")
    reading.model = {"seq": keys.number("training.seq_len", 2048), **_model(keys, reading)}
    if num_gpus is None and (preset := re.search(r"preset for (\d+) (\w+) GPUs", text)):
        num_gpus = int(preset[1])
        reading.derived.append(f"num_gpus={num_gpus}, from the comment {preset[0]!r}")
    _degrees(keys, reading, num_gpus)
    _recompute(keys, reading)
    compiled = keys.take("compile.enable", keys.take("training.compile", False))
    asynchronous = any(
        keys.take(f"{section}.enable_async_tensor_parallel", False)
        for section in ("parallelism", "compile")
    )
    if not compiled:
        reading.eager = True
        reading.traits["traffic_factor"] = 2.11
        reading.derived.append(
            "compile.enable=false: simulated with torch's own element-wise kernels"
        )
    parts = keys.names("compile.components", ["model", "loss"])
    reading.traits["fused_loss"] = bool(compiled) and loss != "eager" and "loss" in parts
    reading.traits["loss_gradient"] = "sliced" if loss == "sliced" else "torch"
    reading.traits["overlap_tensor"] = bool(asynchronous and compiled)
    wanted = keys.take("training.mixed_precision_param", "bfloat16")
    reading.settings["precision"] = "bf16" if wanted == "bfloat16" else "fp32"
    _eight_bits(keys, reading)
    keys.sort_rest(reading, _NEUTRAL, _HARMLESS)
    return reading


def _eight_bits(keys: Keys, reading: Reading) -> None:
    """Converters to 8-bit products (``components/quantization``), and their scaling."""
    sections = ("float8", "quantize.linear.float8")
    recipe, gathers = (
        next(filter(None, [keys.take(f"{section}.{key}") for section in sections]), None)
        for key in ("recipe_name", "enable_fsdp_float8_all_gather")
    )
    by_row = str(recipe).startswith("rowwise")
    reading.traits["gathers_casts"] = bool(gathers) and not by_row
    for name in [
        *keys.names("model.converters"),
        *["float8"] * bool(keys.take("float8.enable_float8_linear", False)),
    ]:
        kind = name.lower().removeprefix("quantize.linear.")
        if kind not in ("float8", "mx", "mxfp8"):
            reading.named.append(f"model.converters={name}: simulated in bf16")
        elif kind == "float8" and by_row:
            reading.multiply_in_8_bits(f"model.converters={name}, {recipe}", "rowwise")
        else:
            scaling: Scaling = "tensorwise" if kind == "float8" else "mx"
            reading.multiply_in_8_bits(f"model.converters={name}", scaling)


def _model(keys: Keys, reading: Reading) -> dict[str, Any]:
    name = str(keys.take("model.name", "llama3"))
    flavor = str(keys.take("model.flavor", "debugmodel"))
    plain = re.sub(r"_(flex|varlen)(_\w+)?$", "", flavor)
    if name in _EXPERTS or re.search(r"moe|A\d+B$", plain):
        raise SpecError(
            f"model.name={name!r}, model.flavor={flavor!r}: mixtures of experts cannot be simulated"
        )
    reading.named += [f"model.flavor={flavor}: simulated with flash attention"] * (plain != flavor)
    named = {"name": f"{name}_{plain}".lower(), "family": "llama"}
    known = {"llama3": _LLAMA3, "qwen3": _QWEN3}.get(name, {})
    if plain not in known:
        reading.unknown = (
            f"model.name={name!r}, model.flavor={flavor!r}: cannot be simulated (known: llama3 "
            f"with {', '.join(_LLAMA3)} and qwen3 with {', '.join(_QWEN3)})"
        )
        if not known:
            raise SpecError(reading.unknown)
        return named  # a company's own
    if name == "qwen3":
        reading.named.append("model.name=qwen3: the norms of queries and keys are not simulated")
    sizes = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings")
    return named | dict(zip((*sizes, "head_width"), known[plain], strict=False))


def _degrees(keys: Keys, reading: Reading, num_gpus: int | None) -> None:
    """Degrees, microbatches and the schedule."""
    axes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
    tp, pp, cp, replicate = (keys.count(f"parallelism.{axis}_degree", 1) for axis in axes)
    shard = keys.number("parallelism.data_parallel_degree", -1)  # of 2024
    shard = keys.number("parallelism.data_parallel_shard_degree", shard)
    reading.slice_sequences("context_parallel_degree", cp)
    others = {"pp": pp, "tp": tp, "cp": cp, "replicate": replicate}
    if num_gpus is None:
        if shard < 1:
            raise SpecError(
                "num_gpus: the file does not say it, since its data_parallel_shard_degree takes "
                "the ranks that are left (give num_gpus=N)"
            )
        num_gpus = shard * math.prod(others.values())
        reading.derived.append(f"num_gpus={num_gpus}, the product of the file's degrees")
    left = share_of_ranks(num_gpus, others)
    shard = left if shard is None or shard == -1 else shard
    if shard != left:
        way = f"change num_gpus to {num_gpus // left * shard}" if shard > 0 else "use -1"
        raise SpecError(
            f"data_parallel_shard_degree={shard}: {num_gpus} GPUs leave {left} ranks for it ({way})"
        )
    local = keys.count("training.local_batch_size", keys.count("training.batch_size", 8))
    batch = keys.number("training.global_batch_size")
    if batch is None or batch < 0:
        batch, reading.batch_per_replica = local * replicate * shard, local
    reading.free = "shard"
    microbatch = keys.count("parallelism.pipeline_parallel_microbatch_size", 1)
    asked = keys.take("parallelism.pipeline_parallel_schedule", "1F1B")
    schedule, chunks = "1f1b", 1
    if pp > 1:
        schedule = {name.lower(): known for name, known in _SCHEDULES.items()}.get(
            str(asked).lower(), ""
        )
        if not schedule:
            raise SpecError(
                f"pipeline_parallel_schedule={asked!r}: cannot be simulated (use one of "
                f"{', '.join(_SCHEDULES)})"
            )
        chunks = _chunks(keys, reading.model.get("layers"), pp, schedule)
        if batch != local * replicate * shard:
            reading.named.append(
                "training.global_batch_size: the pipeline drains between accumulation steps; "
                "simulated as one pass"
            )
    sequence = keys.take("parallelism.enable_sequence_parallel", True)
    reading.knobs |= {"tp": tp, "pp": pp, "shard": shard, "replicate": replicate}
    reading.knobs |= {"chunks": chunks, "schedule": schedule, "placement": "dp_inner"}
    reading.knobs["sequence_parallel"] = bool(sequence) and tp > 1
    released = keys.take("parallelism.fsdp_reshard_after_forward", "default")
    if released == "always" and pp > 1:
        reading.named.append("fsdp_reshard_after_forward=always: simulated as never in a pipeline")
    is_kept = released == "never" and pp == 1  # with a pipeline, never is the default
    reading.knobs["fsdp_reshard_after_forward"] = "never" if is_kept else "default"
    size = microbatch if pp > 1 else local
    reading.settings |= {"num_gpus": num_gpus, "global_batch": batch, "microbatch_size": size}


def _chunks(keys: Keys, layers: int | None, pp: int, schedule: str) -> int:
    """Virtual stages per rank, as ``distributed/pipeline_parallel.py`` counts them."""
    least = _LEAST_CHUNKS.get(schedule, 2)
    ends = [
        keys.number(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1) or 0
        for end in ("first", "last")
    ]
    per_stage: int | None = keys.number("parallelism.pipeline_parallel_layers_per_stage")
    if not per_stage:
        return least
    if layers is None:
        raise SpecError(
            f"pipeline_parallel_layers_per_stage={per_stage}: no stages of a flavor of one's own "
            "(take it out, and give contender.chunks=N)"
        )
    stages = math.ceil((layers + sum(ends)) / per_stage)
    if stages % pp or (stages // pp == 1) != (least == 1):
        raise SpecError(
            f"pipeline_parallel_layers_per_stage={per_stage}: {layers} layers become {stages} "
            f"stages, which torchtitan refuses for {schedule} on {pp} pipeline ranks (use "
            f"{math.ceil((layers + sum(ends)) / (least * pp))})"
        )
    return stages // pp


def _recompute(keys: Keys, reading: Reading) -> None:
    mode = keys.take("activation_checkpoint.mode", "selective")
    option = str(keys.take("activation_checkpoint.selective_ac_option", "2"))
    if mode not in ("none", "selective", "full"):
        raise SpecError(
            f"activation_checkpoint.mode={mode!r}: cannot be simulated (use none, selective or "
            "full)"
        )
    if mode == "selective" and option not in ("op", "1", "2"):
        reading.named.append(f"selective_ac_option={option}: simulated as every second block")
    reading.knobs["recompute"] = "full" if (mode, option) == ("selective", "1") else mode
    reading.knobs["recompute_blocks"] = "auto"  # all, however many there are


def written(plan: SizedPlan) -> str:
    """A plan as words on the command line of torchtitan 0.3; raises SpecError if it has none."""
    layout, stages = plan.layout, plan.layout.pp * plan.layout.chunks
    program = program_named(plan.program)
    spelled = {name: spelling for spelling, name in _SCHEDULES.items()}
    if plan.schedule.name not in spelled and layout.pp > 1:
        raise SpecError(f"--as torchtitan: schedule={plan.schedule.name}: not in torch's pipelines")
    if layout.replicate_zero or layout.placement == "pp_inner":
        raise SpecError("--as torchtitan: ZeRO-1 and pipelines inside a node have no key there")
    if plan.recompute != "none" and plan.recomputed_per_stage != plan.blocks:
        raise SpecError(
            "--as torchtitan: it recomputes all blocks or none (give contender.recompute_blocks="
            f"{plan.shape.layers})"
        )
    local = plan.microbatch_size * (plan.num_microbatches if layout.pp > 1 else 1)
    keys: dict[str, object] = {
        "training.local_batch_size": local,
        "training.global_batch_size": plan.global_batch,
        "training.seq_len": plan.shape.seq,
        "parallelism.data_parallel_replicate_degree": layout.replicate,
        "parallelism.data_parallel_shard_degree": layout.shard,
        "parallelism.context_parallel_degree": layout.context,
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.pipeline_parallel_degree": layout.pp,
    }
    if layout.pp > 1:
        keys |= {
            "parallelism.pipeline_parallel_schedule": spelled[plan.schedule.name],
            "parallelism.pipeline_parallel_microbatch_size": plan.microbatch_size,
        }
    if layout.pp > 1 and layout.chunks != _LEAST_CHUNKS.get(plan.schedule.name, 2):
        per_stage = -(-(plan.shape.layers + 2) // stages)
        if -(-(plan.shape.layers + 2) // per_stage) != stages:
            raise SpecError(
                f"--as torchtitan: chunks={layout.chunks}: no pipeline_parallel_layers_per_stage "
                f"cuts {plan.shape.layers} layers into {stages} stages (name them in a file's "
                "parallelism.module_fqns_per_model_part, which has no words on a command line)"
            )
        keys["parallelism.pipeline_parallel_layers_per_stage"] = per_stage
    if not program.reshard_after_forward:
        keys["parallelism.fsdp_reshard_after_forward"] = "never"
    flags = {
        "training.disable_cuda_graphs": layout.pp > 1,  # which torchtitan asks of pipelines
        "parallelism.no_enable_sequence_parallel": layout.tp > 1 and not layout.sequence_parallel,
        "compile.enable": program.traffic_factor == 1.0,
        "compile.enable_async_tensor_parallel": program.overlap_tensor,
    }
    words = [f"--{key} {value}" for key, value in keys.items()]
    words += [f"--{flag}" for flag, given in flags.items() if given]
    return " ".join([*words, f"activation-checkpoint:{plan.recompute}"])
