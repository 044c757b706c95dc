"""The gate passes every contender as it is, and finds every fault that is injected into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.gloo.gate_faults import FAULTS, find
from tests.gloo.world import World
from tests.unit.toy_spec import mapping

TIED = {"tied_embeddings": True}
ALL = {"dp", "tp", "tied"}
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


DROPOUT = TIED | {"dropout": 0.1}
ZEROPP = {"pp": 2, "shard": 2}
FSDP = {"shard": 2, "replicate": 2}
DEEPSPEED = {"pp": 1, "tp": 2, "replicate": 2, "replicate_zero": 1}
# Contender, precision, ranks, knobs, model, and what it has of what faults need. In fp32 on all
# axes at once; in bf16 on four ranks, because more processes find nothing more.
CASES: list[tuple[str, str, int, dict[str, Any], dict[str, Any], set[str]]] = [
    ("zeropp", "fp32", 4, ZEROPP, DROPOUT, {"dp", "tied", "dropout"}),
    ("zeropp", "bf16", 4, ZEROPP, DROPOUT, {"dp", "tied", "dropout"}),
    ("torch_pp", "fp32", 8, {"pp": 2, "tp": 2, "shard": 2, "schedule": "1f1b"}, TIED, ALL),
    ("torch_pp", "bf16", 4, {"pp": 2, "tp": 2, "schedule": "1f1b"}, TIED, {"tp", "tied"}),
    ("fsdp", "fp32", 4, FSDP, {}, {"dp"}),
    ("fsdp", "bf16", 4, FSDP, {}, {"dp"}),
    ("deepspeed_3d", "fp32", 8, {"pp": 2, "tp": 2, "replicate_zero": 1}, TIED, ALL),
    ("deepspeed_3d", "bf16", 4, DEEPSPEED, TIED, {"dp", "tp"}),
]


@pytest.mark.parametrize(
    ("contender", "precision", "ranks", "knobs", "model", "has"),
    CASES,
    ids=[f"{contender}-{precision}" for contender, precision, *_ in CASES],
)
def test_the_gate_finds_every_fault(
    world: World,
    contender: str,
    precision: str,
    ranks: int,
    knobs: dict[str, Any],
    model: dict[str, Any],
    has: set[str],
) -> None:
    faults = [name for name in FAULTS if NEEDS.get(name) in {None, *has}]
    if precision == "bf16":
        faults = [name for name in faults if name not in HIDDEN_IN_BF16]
    spec = spec_of(ranks, {"name": contender, **knobs}, precision, **model)
    layout = spec.plan().layout
    assert has >= {axis for axis, size in (("dp", layout.dp), ("tp", layout.tp)) if size > 1}
    assert all(size > 1 for axis, size in (("dp", layout.dp), ("tp", layout.tp)) if axis in has)
    for found in world.run(find, spec, faults, size=ranks, timeout_s=240):
        assert found.pop("none") == []
        assert [name for name, failed in found.items() if not failed] == []
