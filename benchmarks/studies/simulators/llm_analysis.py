"""llm-analysis (github:cli99/llm-analysis, later than its release 0.2.2, which counts 16·h² FLOPs
for every MLP whatever its width).

Assumptions: 0.5 of the peak FLOP/s and 0.9 of the memory bandwidth, which its README and its
training examples recommend for every GPU; nominal links of the row's machine; GB/s of all NICs of a
node, as its files of GPUs have them. The step is its ``latency_per_iter``, which prices memory,
tensor parallelism and gathers; pipelines have no bubble in it, and schedules make no difference.
What selective recomputation runs again is left out, because its term for it (ATTN_COMPUTE) counts
the attention of all layers once per layer; so its errors are smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

FLOPS_EFFICIENCY, MEMORY_EFFICIENCY = 0.5, 0.9


def refusal(run: Mapping[str, Any]) -> str:
    """Why llm-analysis cannot express a run."""
    if run["dtype"] not in ("bf16", "fp16"):
        return "products that have neither 16 bits nor integers"
    if run["cp"] > 1:
        return "context parallelism"
    if run["recompute"] == "selective" and run["selective"] != "scores":
        return "selective recomputation other than of attention's scores"
    if run["recompute_blocks"] not in (0, run["layers"]):
        return "recomputation of some blocks only"
    if not run["even"]:
        return "stages of unequally many blocks"
    return ""


def model(run: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of its ModelConfig."""
    return {
        "name": "published",
        "num_layers": run["layers"],
        "n_head": run["heads"],
        "hidden_dim": run["hidden"],
        "vocab_size": run["vocab"],
        "max_seq_len": run["seq"],
        "num_key_value_heads": run["kv_heads"],
        "ffn_embed_dim": run["ffn"],
        "mlp_gated_linear_units": run["gated_mlp"],
    }


def parallelism(run: Mapping[str, Any]) -> dict[str, int]:
    """The fields of its ParallelismConfig: ZeRO-3 over a part of the replicas is its HSDP, and all
    else that is data parallel is replicated, because it prices gathers for sharded ranks."""
    group = run["zero3_group"] if run["zero"] == 3 else 1
    return {
        "tp_size": run["tp"],
        "pp_size": run["pp"],
        "dp_size": group,
        "rdp_size": run["dp"] // group,
        "sp_size": run["tp"] if run["sequence_parallel"] else 1,
    }


def step_s(run: Mapping[str, Any]) -> float:
    """Seconds of a step by llm-analysis."""
    analysis, config = (import_module(f"llm_analysis.{name}") for name in ("analysis", "config"))
    gpu = config.GPUConfig(
        name=run["device"],
        mem_per_GPU_in_GB=run["memory_gib"],
        hbm_bandwidth_in_GB_per_sec=run["memory_gb_s"],
        intra_node_bandwidth_in_GB_per_sec=run["link_gb_s"],
        intra_node_min_message_latency=8e-6,
        peak_fp16_TFLOPS=run["peak_tflops"],
        inter_node_bandwidth_in_GB_per_sec=run["node_gb_s"],
    )
    simulator = analysis.LLMAnalysis(
        config.ModelConfig(**model(run)),
        gpu,
        config.DtypeConfig(),
        config.ParallelismConfig(**parallelism(run)),
        flops_efficiency=FLOPS_EFFICIENCY,
        hbm_memory_efficiency=MEMORY_EFFICIENCY,
    )
    again = analysis.ActivationRecomputation
    summary = simulator.training(
        batch_size_per_gpu=run["micro_batch"],
        gradient_accumulation_steps=run["num_microbatches"],
        global_batch_size=run["global_batch"],
        seq_len=run["seq"],
        activation_recomputation=again.FULL if run["recompute"] == "full" else again.NONE,
        ds_zero=analysis.DSZeRO(run["zero"]),
        flash_attn=run["flash"],
    )
    return float(summary["latency_per_iter"])
