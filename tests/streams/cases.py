"""Twelve configurations of the engine that differ in what its streams do."""

from __future__ import annotations

from tests.streams.emulation import Case

_BASE = {"pp": 2, "shard": 2, "chunks": 2}
CASES = {
    case.name: case
    for case in (
        Case("bf16", 2, {"pp": 1, "shard": 2, "chunks": 2, "precision": "bf16"}),
        Case("bf16 on the wire", 2, {"pp": 1, "shard": 2, "chunks": 2, "reduce_dtype": "bf16"}),
        Case(
            "units, tied weights",
            4,
            {**_BASE, "unit": 2},
            batch=8,
            tied=True,
            then=("evaluate", "parameters"),
        ),
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
            | {"reduce_dtype": "bf16"},
            then=("parameters", "gradients"),
        ),
        Case("prefetch", 2, {"pp": 1, "shard": 2, "chunks": 4, "prefetch": 2}),
        Case(
            "recomputation",
            2,
            {"pp": 1, "shard": 2, "chunks": 2, "recompute": "full", "precision": "bf16"},
            dropout=0.1,
        ),
        Case("weights are passed on", 4, {**_BASE, "chunks": 1}, passes_weights=True),
        Case("reduced once per step", 2, {"pp": 2, "chunks": 2, "reduce_every": "step"}),
        Case(
            "whole parameters",
            4,
            {"pp": 1, "shard": 2, "replicate": 2, "replicate_zero": 1, "chunks": 2, "unit": 2},
            whole=True,
            then=("save and load",),
        ),
        Case(
            "visible parameters",
            2,
            {"pp": 1, "replicate": 2, "replicate_zero": 1},
            then=("norms", "spans"),
        ),
    )
}
