"""The gate passes every contender as it is, and finds every fault that is injected into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.gloo.gate_faults import FAULTS, find
from tests.gloo.world import World
from tests.unit.test_spec import mapping

TIED = {"tied_embeddings": True}
# Faults that need something which not every configuration has.
NEEDS = {
    "one data-parallel rank never updated": "dp",
    "one data-parallel rank's batch left out": "dp",
    "one reduction dropped": "dp",
    "one tensor-parallel rank never updated": "tp",
    "tied weights summed twice": "tied",
    "tied weights not summed": "tied",
    "other dropout masks": "dropout",
}
# 5 % of a gradient is within what bf16 rounds.
HIDDEN_IN_BF16 = {"a quarter of the gradients times 1.05", "a norm's gradient times 1.05"}


def spec_of(num_gpus: int, contender: dict[str, Any], precision: str, **model: Any) -> RunSpec:
    values = mapping()
    values["model"] |= {"layers": 4, "hidden": 32, "ffn": 64, "vocab": 64, "seq": 16, **model}
    values["cluster"] = yaml.safe_load(Path("conf/cluster/cpu_gloo.yaml").read_text())
    values["data"] = {"kind": "synthetic"}
    values |= {"num_gpus": num_gpus, "contender": contender, "precision": precision}
    return spec_from_mapping(values | {"global_batch": 8})


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], set[str]]] = {
    "zeropp": (4, {"pp": 2, "shard": 2}, TIED | {"dropout": 0.1}, {"dp", "tied", "dropout"}),
    "torch_pp": (8, {"pp": 2, "tp": 2, "shard": 2, "schedule": "1f1b"}, TIED, {"dp", "tp", "tied"}),
    "fsdp": (4, {"shard": 2, "replicate": 2}, {}, {"dp"}),
    "deepspeed_3d": (8, {"pp": 2, "tp": 2, "replicate_zero": 1}, TIED, {"dp", "tp", "tied"}),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("contender", CASES)
def test_the_gate_finds_every_fault(world: World, contender: str, precision: str) -> None:
    ranks, knobs, model, has = CASES[contender]
    faults = [name for name in FAULTS if NEEDS.get(name) in {None, *has}]
    if precision == "bf16":
        faults = [name for name in faults if name not in HIDDEN_IN_BF16]
    spec = spec_of(ranks, {"name": contender, **knobs}, precision, **model)
    for found in world.run(find, spec, faults, size=ranks, timeout_s=240):
        assert found.pop("none") == []
        assert [name for name, failed in found.items() if not failed] == []
