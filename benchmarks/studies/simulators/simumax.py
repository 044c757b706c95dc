"""SimuMax v1.2 (github:MooreThreads/SimuMax), its analytical ``perf``.

Assumptions: its own measured files of the A100 (``a100_pcie``) and the B200, whose tables of
kernels it recommends over those of other machines; other GPUs have none. For an A100 with NVLink
the networks are those of the template in its docs/system.md (half of the nominal rate, 10 and 30
us) at the row's rates, as that page advises. Its default node-to-node spread is on. Megatron's
selective recomputation is its ``sdp_only``; interleaved pipelines are its synchronous ones, the
only ones whose time it tells. 16-bit types are its bf16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SYSTEMS = {"a100": "a100_pcie", "a800": "a100_pcie", "b200": "b200_bf16_ceperm"}
_OPERATIONS = {
    "all_reduce": {"scale": 2, "offset": -1},
    "all_gather": {"scale": 1, "offset": -1},
    "reduce_scatter": {"scale": 1, "offset": -1},
    "p2p": {"scale": 1, "offset": 0},
    "all2all": {"scale": 1, "offset": -1},
}


def refusal(run: Mapping[str, Any]) -> str:
    """Why SimuMax cannot express a run."""
    if run["device"] not in SYSTEMS:
        return "the GPU: no file of it"
    if run["dtype"] not in ("bf16", "fp16"):
        return "products that do not have 16 bits"
    if run["zero"] > 1:
        return "ZeRO-2 and ZeRO-3"
    if run["schedule"] not in ("none", "1f1b", "interleaved_1f1b"):
        return "the schedule"
    if run["recompute"] == "selective" and run["selective"] != "scores":
        return "selective recomputation other than of attention's scores"
    if run["recompute_blocks"] % (run["pp"] * run["chunks"]):
        return "unequally many recomputed blocks per stage"
    return "stages of unequally many blocks" if not run["even"] else ""


def strategy(run: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of its StrategyConfig."""
    recomputed = {"none": None, "selective": "sdp_only", "full": "full_block"}[run["recompute"]]
    blocks = (run["recompute_blocks"] or run["layers"]) // (run["pp"] * run["chunks"])
    return {
        "seq_len": run["seq"],
        "micro_batch_size": run["micro_batch"],
        "micro_batch_num": run["num_microbatches"],
        "dtype": "bf16",
        "world_size": run["num_gpus"],
        "tp_size": run["tp"],
        "cp_size": run["cp"],
        "pp_size": run["pp"],
        "interleaving_size": run["chunks"],
        "pp_comm_async": run["chunks"] == 1,
        "enable_sequence_parallel": run["sequence_parallel"],
        "zero_state": run["zero"],
        "use_flash_sdp": run["flash"],
        "use_math_sdp": not run["flash"],
        "enable_recompute": recomputed is not None,
        "recompute_granularity": recomputed,
        "recompute_layer_num": blocks if recomputed else 0,
    }


def model(run: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of its ModelConfig."""
    return {
        "model_name": "published",
        "hidden_size": run["hidden"],
        "head_num": run["heads"],
        "kv_head_num": run["kv_heads"],
        "head_size": run["hidden"] // run["heads"],
        "intermediate_size": run["ffn"],
        "layer_num": run["layers"],
        "vocab_size": run["vocab"],
        "use_swiglu": run["gated_mlp"],
    }


def system(run: Mapping[str, Any], shipped: Mapping[str, Any]) -> dict[str, Any]:
    """One of its files of machines; an A100's with the row's links."""
    if run["device"] == "b200":
        return dict(shipped)
    return {
        **shipped,
        "num_per_node": run["gpus_per_node"],
        "networks": {
            "intra_with_pcie": False,
            "low_intra_node": _network(run["link_gb_s"], 10),
            "high_intra_node": _network(run["link_gb_s"], 10),
            "inter_node": _network(run["node_gb_s"], 30),
        },
    }


def _network(rate: float, latency_us: float) -> dict[str, Any]:
    reached = {"efficient_factor": 0.5, "gbps": rate, "latency_us": latency_us}
    return {"processor_usage": 0.0, "bandwidth": reached, "op": _OPERATIONS}


@cache
def _shipped(name: str) -> dict[str, Any]:
    root = Path(import_module("simumax").__file__ or "").parents[1]
    found: dict[str, Any] = json.loads(
        (root / "configs" / "system" / f"{name}.json").read_text("utf-8")
    )
    return found


def step_s(run: Mapping[str, Any]) -> float:
    """Seconds of a step by SimuMax."""
    config, perf = (import_module(f"simumax.core.{name}") for name in ("config", "perf_llm"))
    machine = system(run, _shipped(SYSTEMS[run["device"]]))
    simulator = perf.PerfLLM()
    simulator.configure(
        strategy_config=config.StrategyConfig(**strategy(run)),
        model_config=config.ModelConfig(**model(run)),
        system_config=config.SystemConfig.init_from_dict(machine),
    )
    simulator.run_estimate()
    tokens_per_s_per_gpu = simulator.analysis_cost().data["throughput_per_accelerator"]
    return float(run["global_batch"] * run["seq"] / run["num_gpus"] / tokens_per_s_per_gpu)
