"""Writes the points of run.sh, frozen, each with the rank that runs alone.

    python3 scripts/gpu/specs.py OUT_DIR [--small] [--only=NAME,...]

a_: the verdict's best plans of gpt_6_2b on 64 H100, 256 sequences (no pipeline); e_: the same cell
at equal degrees (pp=2, TP or ZeRO-3 of 8), where the claim's factors come from; l_: llama_8b with
sequences of 8,192; o_: activations that are offloaded, or recomputed, of llama_70b on 256 and of
llama_8b; b_: best plans with a pipeline of gpt_14_6b. --small: the same on a CPU, tiny.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

from benchmarks.launch.points import plan_point
from benchmarks.launch.sweep import spec_of
from benchmarks.specification.compose import compose
from zeropp.price import price_plan
from zeropp.price.peak_memory import peak_memory
from zeropp.price.simulator import simulate

A = ["model=gpt_6_2b", "global_batch=256"]
B = ["model=gpt_14_6b", "global_batch=256"]
C = ["model=llama_8b", "global_batch=64"]
D = ["model=llama_70b", "num_gpus=256", "global_batch=1024"]
ZERO = ["contender=zeropp", "contender.replicate_zero=0", "contender.placement=dp_inner"]
POINTS: dict[str, tuple[list[str], dict]] = {
    "a_zeropp": (
        [
            *A,
            "microbatch_size=4",
            *ZERO,
            "contender.pp=1",
            "contender.shard=64",
            "contender.replicate=1",
            "contender.chunks=30",
            "contender.unit=1",
            "contender.activation_cap=30",
            "contender.recompute=none",
            "contender.reduce_every=step",
            "contender.compile=true",
        ],
        {},
    ),
    "a_fsdp": (
        [
            *A,
            "microbatch_size=4",
            "contender=fsdp",
            "contender.shard=64",
            "contender.recompute=none",
            "contender.compile=true",
        ],
        {},
    ),
    "a_megatron": (
        [
            *A,
            "microbatch_size=4",
            "contender=megatron_core_local",
            "contender.tp=1",
            "contender.pp=1",
            "contender.replicate=64",
            "contender.replicate_zero=1",
            "contender.chunks=1",
            "contender.schedule=1f1b",
            "contender.recompute=none",
            "contender.sequence_parallel=false",
        ],
        {},
    ),
    "a_megatron_b2": ([], {"like": "a_megatron", "more": ["microbatch_size=2"]}),
    "a_deepspeed": (
        [
            *A,
            "microbatch_size=4",
            "contender=deepspeed",
            "contender.tp=1",
            "contender.pp=1",
            "contender.replicate=64",
            "contender.replicate_zero=2",
            "contender.grad_accum_dtype=fp32",
            "contender.recompute=none",
            "contender.use_multi_rank_bucket_allreduce=true",
            "contender.compile=true",
        ],
        {},
    ),
    "e_zeropp": (
        [
            *A,
            "microbatch_size=1",
            *ZERO,
            "contender.pp=2",
            "contender.shard=8",
            "contender.replicate=4",
            "contender.chunks=2",
            "contender.unit=2",
            "contender.activation_cap=4",
            "contender.recompute=none",
            "contender.reduce_every=unit",
            "contender.compile=false",
        ],
        {"profile": True},
    ),
    "e_megatron": (
        [
            *A,
            "microbatch_size=1",
            "contender=megatron_core_local",
            "contender.tp=8",
            "contender.pp=2",
            "contender.replicate=4",
            "contender.replicate_zero=1",
            "contender.chunks=2",
            "contender.schedule=interleaved_1f1b",
            "contender.sequence_parallel=true",
            "contender.recompute=none",
        ],
        {"steps": 3},
    ),
    "e_deepspeed": (
        [
            *A,
            "microbatch_size=1",
            "contender=deepspeed_3d",
            "contender.tp=8",
            "contender.pp=2",
            "contender.replicate=4",
            "contender.replicate_zero=1",
            "contender.recompute=none",
            "contender.compile=false",
            "contender.grad_accum_dtype=fp32",
        ],
        {"steps": 2},
    ),
    "e_zeropp_compiled": ([], {"like": "e_zeropp", "more": ["contender.compile=true"]}),
    "e_zeropp_unsplit": ([], {"like": "e_zeropp", "more": ["contender.split_backward=false"]}),
    "e_zeropp_recompute": ([], {"like": "e_zeropp", "more": ["contender.recompute=full"]}),
    "b_torch_pp": (
        [
            *B,
            "microbatch_size=2",
            "contender=torch_pp",
            "contender.tp=1",
            "contender.pp=8",
            "contender.shard=8",
            "contender.chunks=3",
            "contender.schedule=interleaved_zb",
            "contender.recompute=none",
            "contender.compile=false",
        ],
        {"steps": 3},
    ),
    "b_zeropp": (
        [
            *B,
            "microbatch_size=2",
            *ZERO,
            "contender.pp=8",
            "contender.shard=8",
            "contender.replicate=1",
            "contender.chunks=2",
            "contender.recompute=none",
            "contender.unit=8",
            "contender.reduce_every=step",
            "contender.compile=false",
        ],
        {"steps": 3},
    ),
    "l_zeropp": (
        [
            *C,
            "microbatch_size=1",
            *ZERO,
            "contender.pp=1",
            "contender.shard=64",
            "contender.replicate=1",
            "contender.chunks=32",
            "contender.unit=1",
            "contender.activation_cap=32",
            "contender.recompute=none",
            "contender.reduce_every=step",
            "contender.compile=true",
        ],
        {"steps": 3},
    ),
    "l_fsdp": (
        [
            *C,
            "microbatch_size=1",
            "contender=fsdp",
            "contender.shard=64",
            "contender.recompute=none",
            "contender.compile=true",
        ],
        {"steps": 3},
    ),
    "l_megatron": (
        [
            *C,
            "microbatch_size=1",
            "contender=megatron_core_local",
            "contender.tp=4",
            "contender.pp=1",
            "contender.replicate=16",
            "contender.replicate_zero=1",
            "contender.chunks=1",
            "contender.schedule=1f1b",
            "contender.recompute=none",
            "contender.sequence_parallel=true",
        ],
        {"steps": 3},
    ),
    "o_70b_sent": (
        [
            *D,
            "microbatch_size=1",
            *ZERO,
            "contender.pp=1",
            "contender.shard=256",
            "contender.replicate=1",
            "contender.chunks=82",
            "contender.unit=1",
            "contender.activation_cap=82",
            "contender.recompute=selective",
            "contender.offload_blocks=54",
            "contender.reduce_every=unit",
            "contender.compile=true",
        ],
        {"steps": 2},
    ),
    "o_70b_recomputed": (
        [],
        {
            "like": "o_70b_sent",
            "more": [
                "contender.recompute=mlp",
                "contender.recompute_blocks=79",
                "contender.offload_blocks=0",
            ],
        },
    ),
    "o_8b_sent": (
        [],
        {
            "like": "l_zeropp",
            "more": ["contender.offload_blocks=24", "contender.reduce_every=unit"],
        },
    ),
    "o_8b_recomputed": (
        [],
        {"like": "l_zeropp", "more": ["contender.recompute=mlp", "contender.reduce_every=unit"]},
    ),
    "b_deepspeed": (
        [
            *B,
            "microbatch_size=1",
            "contender=deepspeed",
            "contender.tp=1",
            "contender.pp=2",
            "contender.replicate=32",
            "contender.replicate_zero=1",
            "contender.grad_accum_dtype=bf16",
            "contender.recompute=none",
            "contender.use_multi_rank_bucket_allreduce=false",
            "contender.compile=true",
        ],
        {"steps": 3},
    ),
}
SMALL = [
    "cluster=cpu_gloo",
    "model.layers=16",
    "model.hidden=64",
    "model.heads=8",
    "model.kv_heads=8",
    "model.ffn=128",
    "model.vocab=256",
    "model.seq=16",
]


TINY = [
    "model=gpt_tiny",
    "data=synthetic",
    "microbatch_size=2",
    "measure.steps=1",
    "measure.warmup_steps=1",
    "measure.timeout_s=170",
]
# Wide enough that linear layers add their own gradients (2**18 elements: ``_LEAST_ADDED`` in
# zeropp/engine/engine.py): gpt_tiny's are narrower, so that on one rank, where no backward is
# split, its gate never runs the product that adds 16-bit factors in fp32.
WIDE = ["model.layers=4", "model.hidden=512", "model.heads=8", "model.kv_heads=8", "model.ffn=2048"]
# Left open, compile is true on a priced cluster, and compiled blocks alone would be gated.
EAGER = ["contender=zeropp", "contender.compile=false"]
ONE = {
    "zeropp": [*EAGER, "contender.chunks=2", "sequences_per_gpu=8", *WIDE],
    "zeropp_recompute": [
        *EAGER,
        "contender.chunks=2",
        "sequences_per_gpu=8",
        "contender.recompute=selective",
        *WIDE,
    ],
    "zeropp_compiled": [
        "contender=zeropp",
        "contender.chunks=2",
        "sequences_per_gpu=8",
        "contender.compile=true",
        *WIDE,
    ],
    "zeropp_llama": [*EAGER, "contender.chunks=2", "sequences_per_gpu=8", "model=llama_tiny"],
    "torch_pp": ["contender=torch_pp", "contender.compile=false", "sequences_per_gpu=8"],
    "fsdp": ["contender=fsdp", "contender.compile=false", "sequences_per_gpu=8"],
    "deepspeed_3d": ["contender=deepspeed", "contender.compile=false", "sequences_per_gpu=8"],
    "megatron": ["contender=megatron_core_local", "sequences_per_gpu=8"],
}
FOUR = {
    "zeropp": [*EAGER, "contender.pp=2", "contender.shard=2", "contender.chunks=2"],
    "zeropp_replicas": [
        *EAGER,
        "contender.pp=2",
        "contender.replicate=2",
        "contender.shard=1",
        "contender.replicate_zero=1",
        "contender.chunks=2",
    ],
    "zeropp_pp4": [*EAGER, "contender.pp=4", "contender.chunks=2", "contender.unit=2"],
    "torch_pp": [
        "contender=torch_pp",
        "contender.compile=false",
        "contender.pp=2",
        "contender.shard=2",
    ],
    "fsdp": ["contender=fsdp", "contender.compile=false", "contender.shard=4"],
    "deepspeed_3d": [
        "contender=deepspeed_3d",
        "contender.compile=false",
        "contender.pp=2",
        "contender.tp=2",
    ],
    "megatron": ["contender=megatron_core_local", "contender.pp=2", "contender.tp=2"],
}


def many(out: Path, cluster: str) -> None:
    """Specs of whole runs for many.py: each on one rank, and on four that share the GPU."""
    out.mkdir(parents=True, exist_ok=True)
    for size, cases in ((1, ONE), (4, FOUR)):
        only = next((w[7:].split(",") for w in sys.argv[1:] if w.startswith("--only=")), None)
        for name, words in cases.items():
            if only is not None and name not in only:
                continue
            for precision in ("fp32", "bf16"):
                more = ["sequences_per_gpu=4"] if size == 4 else []
                given = [f"num_gpus={size}", f"precision={precision}", f"cluster={cluster}", *more]
                given += [
                    w
                    for w in TINY
                    if w.partition("=")[0] not in {x.partition("=")[0] for x in words}
                ] + words
                try:
                    (config,) = compose("config", given)
                    point = plan_point(spec_of(config))
                    if point.plan is None:
                        raise ValueError(point.reason)
                except Exception as error:
                    print(f"{size} {name} {precision} FAILED {error}")
                    continue
                file = out / f"{'one' if size == 1 else 'four'}_{name}_{precision}.json"
                file.write_text(json.dumps(point.spec.to_dict(), indent=1))
    print(len(list(out.glob("*.json"))), "whole runs")


def main() -> int:
    small = "--small" in sys.argv
    out = Path(next(word for word in sys.argv[1:] if not word.startswith("--")))
    out.mkdir(parents=True, exist_ok=True)
    many(out / "many", "cpu_gloo" if small else "h100")
    only = next((w[7:].split(",") for w in sys.argv[1:] if w.startswith("--only=")), None)
    for name, (words, more) in POINTS.items():
        if only is not None and name not in only:
            continue
        if "like" in more:
            keys = {word.partition("=")[0] for word in more["more"]}
            base = POINTS[more["like"]][0]
            words = [w for w in base if w.partition("=")[0] not in keys] + more["more"]
            more = {}
        words = [
            *["num_gpus=64"] * ("num_gpus=256" not in words),
            "precision=bf16",
            "data=synthetic",
            "measure.gate=false",
            "cluster=h100",
            *words,
        ]
        for variant, layers in (("", None), (".smoke", 2)):
            given = [*words, *(SMALL if small else [])]
            if small:
                given = [w for w in given if w != "cluster=h100"]
                for count, key in product((30, 32, 82), ("chunks", "cap")):
                    given = [w.replace(f"{key}={count}", f"{key}=16") for w in given]
            if layers:
                count = 2 * max(
                    next((int(w.split("=")[1]) for w in given if w.startswith("contender.pp=")), 1),
                    1,
                )
                chunks = next(
                    (int(w.split("=")[1]) for w in given if w.startswith("contender.chunks=")), 1
                )
                stages = next(
                    (int(w.split("=")[1]) for w in given if w.startswith("contender.pp=")), 1
                ) * min(chunks, 4)
                count = max(count, stages + 1)
                given = [
                    w
                    for w in given
                    if not w.startswith(
                        (
                            "contender.chunks=82",
                            "contender.activation_cap=82",
                            "contender.chunks=30",
                            "contender.chunks=16",
                            "contender.chunks=32",
                            "contender.activation_cap=32",
                            "contender.activation_cap=30",
                            "contender.activation_cap=16",
                        )
                    )
                ]
                given = [w for w in given if not w.startswith("model.layers=")] + [
                    f"model.layers={count}"
                ]
            try:
                (config,) = compose("config", given)
                point = plan_point(spec_of(config))
                if point.plan is None:
                    print(name + variant, "INFEASIBLE", point.reason)
                    continue
            except Exception as error:
                print(name + variant, "FAILED", error)
                continue
            plan, spec = point.plan, point.spec
            document = {"spec": spec.to_dict(), "spec_id": spec.spec_id, "words": given, **more}
            pipeline = plan.layout.pipeline(0)
            document["rank"] = pipeline[min(1, len(pipeline) - 1)]
            document["stages"] = list(
                plan.schedule.stages_of(plan.layout.coordinates(document["rank"])["pp"])
            )
            document["num_microbatches"] = plan.num_microbatches
            document["blocks"] = [plan.blocks[s] for s in document["stages"]]
            if not spec.cluster.device.is_cpu:
                price = price_plan(plan, spec.cluster)
                result = simulate(plan, spec.cluster, price=price)
                document["described"] = {
                    "step_s": result.step_s,
                    "stages": {s: asdict(price.stages[s]) for s in document["stages"]},
                    "extras": {s: asdict(price.extras[s]) for s in document["stages"]},
                    "stragglers": price.stragglers,
                    "memory": [asdict(m) for m in peak_memory(plan, price)],
                    "memory_total": [m.total for m in peak_memory(plan, price)],
                }
            (out / f"{name}{variant}.json").write_text(json.dumps(document, indent=1, default=str))
            print(
                name + variant,
                "ok",
                spec.spec_id,
                "m =",
                plan.num_microbatches,
                "blocks",
                document["blocks"],
                round(document.get("described", {}).get("step_s", 0), 3),
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
