"""dlcalc 0.2.0 (PyPI), its command ``3dtrn``.

Assumptions: its own constant of 0.7 of the peak FLOP/s for products, the nominal memory bandwidth
and links of the row's machine in place of its table of cloud instances, its own latencies; buckets
of gradients of 250 MB, as its example had; a run on less than a node is on a node of so many GPUs.
Where nothing is recomputed it wants "selective", which its time does not depend on. The step is the
sum of the parts that it prints, because it prints the sum in hundredths of a second.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

_BUCKET_BYTES = 250e6
_PARTS = (
    "Transformer Block", "DP All-Gather", "DP Reduce-Scatter", "Pipeline Bubble", "Optimizer Step",
)  # fmt: skip


def refusal(run: Mapping[str, Any]) -> str:
    """Why dlcalc cannot express a run."""
    if run["dtype"] not in ("bf16", "fp16"):
        return "products that do not have 16 bits"
    if run["zero"] > 1:
        return "ZeRO-2 and ZeRO-3"
    if run["zero"] == 0 and run["dp"] * run["cp"] > 1:
        return "data parallelism without a distributed optimizer"
    if run["tp"] > 1 and not run["sequence_parallel"]:
        return "tensor parallelism without sequence parallelism"
    if run["recompute"] == "full":
        return "the time of full recomputation"
    if run["recompute"] == "selective" and run["selective"] != "scores":
        return "selective recomputation other than of attention's scores"
    if run["schedule"] not in ("none", "1f1b", "interleaved_1f1b"):
        return "the schedule"
    if not run["even"]:
        return "stages of unequally many blocks"
    return "unfused attention" if not run["flash"] else ""


def buckets(run: Mapping[str, Any]) -> int:
    """The number of its buckets of parameters per rank."""
    head = run["hidden"] // run["heads"]
    attention = run["hidden"] * (2 * run["hidden"] + 2 * run["kv_heads"] * head)
    mlp = (3 if run["gated_mlp"] else 2) * run["hidden"] * run["ffn"]
    parameters: float = run["layers"] / run["pp"] * (attention + mlp) / run["tp"]
    return max(1, round(4 * parameters / _BUCKET_BYTES))


def config(run: Mapping[str, Any]) -> dict[str, Any]:
    """Its configuration file."""
    return {
        "model": {
            "n_layers": run["layers"],
            "hidden_sz": run["hidden"],
            "inter_sz": run["ffn"],
            "n_q_heads": run["heads"],
            "n_kv_heads": run["kv_heads"],
            "head_dim": run["hidden"] // run["heads"],
            "vocab_sz": -(-run["vocab"] // run["tp"]) * run["tp"],
            "glu": run["gated_mlp"],
            "rotary_embeds": run["rotary"],
            "dropout": False,
            "tie_embeddings": run["tied_embeddings"],
        },
        "parallelism": {
            "tp": run["tp"],
            "cp": run["cp"],
            "pp": run["pp"],
            "dp": run["dp"],
            "vpp": run["chunks"],
            "sp": True,
            "zero_level": 1,
            "n_param_buckets": buckets(run),
        },
        "performance": {"activation_checkpointing_type": "selective"},
        "data": {
            "gbs": run["global_batch"],
            "seqlen": run["seq"],
            "microbatch_sz": run["micro_batch"],
        },
        "hardware": {"node_type": "published"},
    }


def seconds(printed: str) -> float:
    """The sum of the parts of a step in what it prints."""
    told = re.sub(r"\x1b\[[0-9;]*m", "", printed).partition("ITERATION TIME COMPONENTS")[2]
    parts = re.findall(rf"({'|'.join(_PARTS)}) +([0-9.]+) ms", told)
    assert len(parts) == len(_PARTS), printed
    return sum(float(milliseconds) for _, milliseconds in parts) / 1e3


def step_s(run: Mapping[str, Any]) -> float:
    """Seconds of a step by dlcalc."""
    hardware, command = import_module("dlcalc.utils.hardware"), import_module("dlcalc.training_3d")
    machine = hardware.MachineSpec(
        n_devices=min(run["gpus_per_node"], run["num_gpus"]),
        device_spec=hardware.DeviceSpec(
            peak_flops=int(run["peak_tflops"] * 1e12),
            mem_bandwidth_bytes_per_sec=int(run["memory_gb_s"] * 1e9),
            mem_capacity_bytes=int(run["memory_gib"] * 2**30),
        ),
        intra_node_connect=hardware.LinkSpec(int(run["link_gb_s"] * 1e9), 3e-6),
        inter_node_connect=hardware.LinkSpec(int(run["node_gb_s"] * 1e9), hardware.EFA_LATENCY_S),
    )
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        path.write_text(json.dumps(config(run)), encoding="utf-8")  # JSON is YAML
        with (
            mock.patch.object(hardware.MachineSpec, "from_str", return_value=machine),
            mock.patch.object(sys, "argv", ["3dtrn", str(path)]),
            contextlib.redirect_stdout(printed),
        ):
            command.main()
    return seconds(printed.getvalue())
