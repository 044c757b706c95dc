"""Ten configurations of the engine that differ in what its streams do."""

from __future__ import annotations

from tests.streams.emulation import Case

_BASE = {"pp": 2, "shard": 2, "chunks": 2}
CASES = {
    case.name: case
    for case in (
        Case("bf16", 2, {"pp": 1, "shard": 2, "chunks": 2, "precision": "bf16"}),
        Case("bf16 on the wire", 2, {"pp": 1, "shard": 2, "chunks": 2, "reduce_dtype": "bf16"}),
        Case("units", 4, {**_BASE, "unit": 2}, then=("evaluate", "parameters")),
        Case("replicas", 2, {"pp": 1, "replicate": 2, "chunks": 2}, then=("save and load",)),
        Case(
            "replicas with ZeRO-1",
            2,
            {"pp": 1, "replicate": 2, "replicate_zero": 1, "chunks": 2, "precision": "bf16"},
            then=("save and load", "evaluate", "state"),
        ),
        Case(
            "shards and replicas",
            4,
            {"pp": 1, "shard": 2, "replicate": 2, "replicate_zero": 1, "chunks": 2, "unit": 2}
            | {"reduce_dtype": "bf16", "replicate_every": "step", "reduce_every": "unit"},
        ),
        Case("prefetch and keep", 2, {"pp": 1, "shard": 2, "chunks": 4, "prefetch": 2, "keep": 2}),
        Case(
            "recomputation",
            2,
            {"pp": 1, "shard": 2, "chunks": 2, "recompute": "full", "precision": "bf16"},
            dropout=0.1,
        ),
        Case("tied", 4, {**_BASE, "precision": "bf16"}, tied=True, then=("state",)),
        Case("stages on a V", 2, {"pp": 2, "chunks": 2, "stage_style": "v"}, then=("spans",)),
    )
}
