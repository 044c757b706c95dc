"""Calculon (github:calculon-ai/calculon; the package of this name on PyPI is another program).

Assumptions: its own files of the A100 (``a100_80g``, the one of its validation) and of the H100
with their efficiencies, for other boards of the same chip, too; only the rates of the row's links
and the size of its node take the place of theirs. Memory is not limited. A gated MLP of width f is
one of width 1.5 f without a gate, which has the same FLOPs and parameters. 16-bit types are its
float16. Sequence parallelism is its rs_ag, with the gather redone in the backward but under full
recomputation, as in its validation; data parallelism overlaps as the row's program does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SYSTEMS = {
    "a100": "a100_80g", "a800": "a100_80g", "h100": "h100_80g_nvl8", "h800": "h100_80g_nvl8",
    "h200": "h100_80g_nvl8",
}  # fmt: skip


def refusal(run: Mapping[str, Any]) -> str:
    """Why Calculon cannot express a run."""
    if run["device"] not in SYSTEMS:
        return "the GPU: no file of it"
    if run["dtype"] not in ("bf16", "fp16"):
        return "products that do not have 16 bits"
    if run["flash"]:
        return "fused attention"
    if run["kv_heads"] not in (run["heads"], 1):
        return "grouped-query attention"
    if run["zero"] > 1:
        return "ZeRO-2 and ZeRO-3"
    if run["cp"] > 1:
        return "context parallelism"
    if run["schedule"] not in ("none", "1f1b", "interleaved_1f1b"):
        return "the schedule"
    if run["recompute"] == "selective" and run["selective"] != "scores":
        return "selective recomputation other than of attention's scores"
    if run["recompute_blocks"] not in (0, run["layers"]):
        return "recomputation of some blocks only"
    return ""


def application(run: Mapping[str, Any]) -> dict[str, int]:
    """Its description of the model, which has no vocabulary."""
    return {
        "hidden": run["hidden"],
        "feedforward": run["ffn"] * 3 // 2 if run["gated_mlp"] else run["ffn"],
        "seq_size": run["seq"],
        "attn_heads": run["heads"],
        "attn_size": run["hidden"] // run["heads"],
        "num_blocks": run["layers"],
    }


def execution(run: Mapping[str, Any]) -> dict[str, Any]:
    """Its description of how the model is trained. Network 0 is inside a node."""
    node, tp, dp = run["gpus_per_node"], run["tp"], run["dp"]
    inner = tp * dp <= node  # ranks of one pipeline stage are neighbours, as in Megatron-LM
    return {
        "num_procs": run["num_gpus"],
        "tensor_par": tp,
        "pipeline_par": run["pp"],
        "data_par": dp,
        "tensor_par_net": int(tp > node),
        "pipeline_par_net": int(run["num_gpus"] > node),
        "data_par_net": int(not inner),
        "batch_size": run["global_batch"],
        "microbatch_size": run["micro_batch"],
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multiquery" if run["kv_heads"] < run["heads"] else "multihead",
        "activation_recompute": {"none": "none", "selective": "attn_only", "full": "full"}[
            run["recompute"]
        ],
        "pipeline_interleaving": run["chunks"],
        "optimizer_sharding": run["zero"] > 0 and dp > 1,
        "tensor_par_comm_type": "rs_ag" if run["sequence_parallel"] else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": run["sequence_parallel"] and run["recompute"] != "full",
        "data_par_overlap": run["overlap_gradients"] and dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def system(run: Mapping[str, Any], shipped: Mapping[str, Any]) -> dict[str, Any]:
    """One of its files of machines, with the row's links and node."""
    inside, outside = shipped["networks"]
    nic = run["node_gb_s"] / run["gpus_per_node"]
    return {
        **shipped,
        "mem1": {**shipped["mem1"], "GiB": 1e6},
        "networks": [
            {**inside, "bandwidth": run["link_gb_s"], "size": run["gpus_per_node"]},
            {**outside, "bandwidth": nic},
        ],
    }


@cache
def _shipped(name: str) -> dict[str, Any]:
    root = Path(import_module("calculon").__file__ or "").parents[1]
    found: dict[str, Any] = json.loads((root / "systems" / f"{name}.json").read_text("utf-8"))
    return found


def step_s(run: Mapping[str, Any]) -> float:
    """Seconds of a step by Calculon."""
    llm, systems = import_module("calculon.llm").Llm, import_module("calculon.system")
    machine = systems.System(system(run, _shipped(SYSTEMS[run["device"]])))
    simulator = llm(llm.Application(application(run)), logging.getLogger())
    simulator.compile(machine, llm.Execution.from_json(execution(run)))
    simulator.run(machine)
    return float(simulator.get_total_time())
