"""A small run that every test can start from: a toy GPT on four ranks of a made-up machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.launch.running import Sweep
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping

SWEEP = Sweep(Path("runs"), Path("report"), "missing", repeats=1, retries=0)


def mapping() -> dict[str, Any]:
    """The toy run on four CPU ranks, as YAML gives it; every call gives a copy of its own."""
    link = {"bandwidth_gb_s": 10.0, "latency_us": 5.0}
    return {
        "model": {
            "name": "toy",
            "family": "gpt",
            "layers": 4,
            "hidden": 64,
            "heads": 4,
            "kv_heads": 4,
            "ffn": 256,
            "vocab": 256,
            "seq": 32,
        },
        "cluster": {
            "name": "here",
            "device": {
                "name": "cpu",
                "memory_gib": 16,
                "memory_bandwidth_gb_s": 20,
                "matmul_bf16_tflops": 0.05,
                "matmul_fp32_tflops": 0.05,
            },
            "gpus_per_node": 8,
            "nics_per_node": 1,
            "intra": link,
            "inter": link,
        },
        "num_gpus": 4,
        "contender": {"name": "zeropp", "pp": 2},
        "global_batch": 8,
        "microbatch_size": 1,
        "precision": "fp32",
        "optimizer": {},
        "data": {"kind": "synthetic"},
        "measure": {},
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """The same with the value at a dotted path (``model.heads``) replaced."""
    values = mapping()
    *parents, last = path.split(".")
    target = values
    for parent in parents:
        target = target[parent]
    target[last] = value
    return values


def spec_of(**changes: Any) -> RunSpec:
    """The toy run on A100s, which no machine of the tests has; ``changes`` replaces whole keys."""
    values = mapping()
    values["cluster"]["device"]["name"] = "A100"
    return spec_from_mapping(values | changes)
