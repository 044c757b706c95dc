"""Writes a plan as arguments of another program: Megatron-LM's flags, torchtitan's TOML, or this
suite's overrides."""

from __future__ import annotations

from typing import Any

from benchmarks.explain.torchtitan import SCHEDULES
from benchmarks.specification.command import SpecError
from zeropp.plan import Candidate, SizedPlan
from zeropp.programs import program_named
from zeropp.tune.contender import overrides


def written_as(dialect: str, plan: SizedPlan, candidate: Candidate[Any]) -> str:
    """The plan in a program's own words. Raises SpecError if that program has no word for it, as
    none but this suite has for ZeroPP's."""
    if dialect == "overrides":
        return " ".join(overrides(candidate))
    if plan.contender == "zeropp":
        raise SpecError(f"--as {dialect}: ZeroPP's plans have no counterpart there (use overrides)")
    return _megatron(plan) if dialect == "megatron" else _torchtitan(plan)


def _megatron(plan: SizedPlan) -> str:
    layout, shape = plan.layout, plan.shape
    if layout.shard > 1:
        raise SpecError(f"--as megatron: shard={layout.shard}: Megatron's pipeline has no ZeRO-3")
    schedules = ("1f1b", "interleaved_1f1b")
    if plan.schedule.name not in schedules:
        raise SpecError(f"--as megatron: schedule={plan.schedule.name}: not in Megatron-LM")
    program = program_named(plan.program)
    flags: dict[str, object] = {
        "--num-layers": shape.layers,
        "--hidden-size": shape.hidden,
        "--ffn-hidden-size": shape.ffn,
        "--num-attention-heads": shape.heads,
        "--group-query-attention": shape.kv_heads != shape.heads,
        "--num-query-groups": shape.kv_heads if shape.kv_heads != shape.heads else False,
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
        "--num-virtual-stages-per-pipeline-rank": layout.chunks if layout.chunks > 1 else False,
        "--sequence-parallel": layout.sequence_parallel,
        "--use-distributed-optimizer": layout.replicate_zero == 1,
        "--use-tp-pp-dp-mapping": layout.placement == "pp_inner",
        "--micro-batch-size": plan.microbatch_size,
        "--global-batch-size": plan.global_batch,
        "--bf16": plan.precision == "bf16",
        "--overlap-grad-reduce": program.overlap_reduction,
        "--overlap-param-gather": program.overlap_updated and layout.replicate_zero == 1,
        "--tp-comm-overlap": program.overlap_tensor and layout.sequence_parallel,
        "--cross-entropy-loss-fusion": program.fused_loss,
        "--cross-entropy-fusion-impl": "te" if program.fused_loss else False,
        "--grad-reduce-in-bf16": plan.precision == "bf16" and program.bf16.gradients == 2,
        "--no-gradient-accumulation-fusion": not program.fused_accumulation,
    }
    if plan.recompute == "full":
        some = max(plan.recomputed) if plan.recomputed else None
        flags |= {"--recompute-granularity": "full"}
        flags |= {"--recompute-method": "block" if some else "uniform"}
        flags |= {"--recompute-num-layers": some or 1}
    words = [flag if v is True else f"{flag} {v}" for flag, v in flags.items() if v is not False]
    return " ".join(words)


def _torchtitan(plan: SizedPlan) -> str:
    layout, stages = plan.layout, plan.layout.pp * plan.layout.chunks
    spelled = {ours: theirs for theirs, ours in SCHEDULES.items()}
    if plan.schedule.name not in spelled and layout.pp > 1:
        raise SpecError(f"--as torchtitan: schedule={plan.schedule.name}: not in torch's pipelines")
    if layout.replicate_zero or layout.placement == "pp_inner":
        raise SpecError("--as torchtitan: ZeRO-1 and pipelines inside a node have no key there")
    program = program_named(plan.program)
    compiled = str(program.traffic_factor == 1.0).lower()
    local = plan.microbatch_size * (plan.num_microbatches if layout.pp > 1 else 1)
    lines = [
        "[training]",
        f"local_batch_size = {local}",
        f"global_batch_size = {plan.global_batch}",
        f"seq_len = {plan.shape.seq}",
        "[parallelism]",
        f"data_parallel_replicate_degree = {layout.replicate}",
        f"data_parallel_shard_degree = {layout.shard}",
        f"tensor_parallel_degree = {layout.tp}",
        f"enable_async_tensor_parallel = {str(program.overlap_tensor).lower()}",
        f"pipeline_parallel_degree = {layout.pp}",
    ]
    if layout.pp > 1:
        per_stage = -(-(plan.shape.layers + 2) // stages)
        if -(-(plan.shape.layers + 2) // per_stage) != stages:
            raise SpecError(
                f"--as torchtitan: chunks={layout.chunks}: {plan.shape.layers} layers cannot be "
                f"cut into {stages} stages by pipeline_parallel_layers_per_stage"
            )
        lines += [
            f'pipeline_parallel_schedule = "{spelled[plan.schedule.name]}"',
            f"pipeline_parallel_microbatch_size = {plan.microbatch_size}",
            f"pipeline_parallel_layers_per_stage = {per_stage}",
        ]
    lines += ["[activation_checkpoint]", f'mode = "{plan.recompute}"']
    lines += ['selective_ac_option = "op"'] * (plan.recompute == "selective")
    return "\n".join([*lines, "[compile]", f"enable = {compiled}"])
