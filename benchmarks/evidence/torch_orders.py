"""Writes results/reference/torch_orders.csv: ZeroPP's order in its own engine and in torch's
pipeline runtime over FSDP2, beside torch's own orders, replayed.

One model on one layout, four stages per rank. ``max_active_stages=4`` is torch's rule for gathers
with the number of stages that pytorch#193972 lets one choose, and with which a rank keeps all of
its stages; 3 is the default. All run their own code with fake tensors
(``benchmarks.launch.replay``).

    python -m benchmarks.evidence.torch_orders [results/reference/torch_orders.csv]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import pandas as pd

from baselines.torch_pp.contender import (
    TORCH_PP,
    TorchPPKnobs,
    TorchSchedule,
    programs,
    with_torch_gathers,
)
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks.evidence.renew import REFERENCE
from benchmarks.launch.replay import replayed_plan, trace_pipeline
from benchmarks.records.environment import git_state
from benchmarks.records.simulated import commit_of
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.reading import preset
from zeropp.choose.task import Candidate, Task
from zeropp.price.cluster import Cluster
from zeropp.schedule.build import build
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import COMPUTE, Op
from zeropp.schedule.torch_runtime import lower_for_torch, with_messages
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

OUT = REFERENCE / "torch_orders.csv"
PIPELINE, SHARD, STAGES, MICROBATCHES, SEQUENCE = 4, 16, 4, 16, 4096
UNITS = (PIPELINE, 2 * PIPELINE)
CLUSTERS = ("h100", "a800")
ORDERS: tuple[TorchSchedule, ...] = ("interleaved_1f1b", "interleaved_zb")


def task_on(cluster: str) -> Task:
    """Llama 8B on 64 GPUs, 16 microbatches of one sequence per pipeline."""
    return Task(
        shape=replace(preset("model", "llama_8b", ModelShape), seq=SEQUENCE),
        cluster=preset("cluster", cluster, Cluster),
        num_gpus=PIPELINE * SHARD,
        global_batch=SHARD * MICROBATCHES,
    )


def plans(task: Task) -> Iterator[tuple[str, Plan]]:
    """(name, plan) of every way."""
    degrees = {"pp": PIPELINE, "shard": SHARD, "replicate": 1, "chunks": STAGES}
    for unit in UNITS:
        knobs = ZeroppKnobs(**degrees, unit=unit, recompute="none", compile=False)  # type: ignore[arg-type]
        yield f"ZeroPP's order, its engine, unit={unit}", ZEROPP.plan(task, Candidate(knobs, 1))
    for order in ("zeropp", *ORDERS):
        asked = TorchPPKnobs(**degrees, tp=1, schedule=order, recompute="none")  # type: ignore[arg-type]
        plan = TORCH_PP.plan(task, Candidate(asked, 1))
        if order == "zeropp":
            for unit in UNITS:
                yield f"ZeroPP's order, torch's runtime, unit={unit}", in_units(plan, unit)
            continue
        yield f"{order}, max_active_stages=3", plan
        yield f"{order}, max_active_stages={STAGES}", keeping_all_stages(plan)


def in_units(plan: Plan, unit: int) -> Plan:
    """A plan of torch's runtime in ZeroPP's order with this many microbatches per unit."""
    compute = build(
        "zeropp", num_ranks=PIPELINE, chunks=STAGES, num_microbatches=MICROBATCHES, unit=unit
    )
    return plan.ordered(lower_for_torch(compute))


def keeping_all_stages(plan: Plan) -> Plan:
    """A plan of torch's order whose ranks release no stage before the end of the step. It has
    another name, so torch's runtime reads its programs from a file."""
    own = programs(plan)
    kept = []
    for program in own.programs:
        bare = tuple(action for action in program if action.op in COMPUTE | {Op.REDUCE_GRAD})
        compute = tuple(action for action in bare if action.op in COMPUTE)
        kept.append(with_torch_gathers(bare, compute, active_stages=STAGES))
    passed_on = with_messages(kept, own.stage_rank)
    return plan.ordered(replace(own, name=f"{own.name}_kept", programs=passed_on))


def rows_of(name: str, plan: Plan) -> Iterator[dict[str, object]]:
    """Trace one way, and replay it on every cluster."""
    traces = trace_pipeline(plan, OptimizerConfig(kind="adamw"))
    actions = chain.from_iterable(plan.schedule.programs)
    gathers = sum(action.op is Op.UNSHARD for action in actions)
    for cluster in CLUSTERS:
        priced = task_on(cluster).cluster
        replayed = replayed_plan(plan, priced, traces)
        waits = {
            cause: fmean(waited.get(cause, 0.0) for waited in replayed.waits_s.values())
            for cause in ("gather", "reduce", "transfer", "host")
        }
        yield {
            "cluster": cluster,
            "way": name,
            "provenance": "replayed",
            "step_s": replayed.step_s,
            "compute_s": max(replayed.busy_s.values()),
            **{f"{cause}_s": seconds for cause, seconds in waits.items()},
            "peak_gib": max(trace.memory.total for trace in traces) / 2**30,
            "limit_gib": priced.device.usable_bytes / 2**30,
            "gathers_per_stage": gathers / plan.schedule.num_stages,
            "commit": commit_of(*git_state()),
        }


@command
def main() -> int:
    """Command line; see ``--help``."""
    parser = CommandParser(
        description="Replay ZeroPP's order in its engine and in torch's runtime beside torch's "
        "own orders, and write a CSV. Ways in the file are left as they are.",
        epilog="example: python -m benchmarks.evidence.torch_orders /tmp/torch_orders.csv",
    )
    parser.add_argument(
        "out", nargs="?", type=Path, default=OUT, help="the CSV (the committed one)"
    )
    out = parser.parse_args().out
    table = pd.read_csv(out) if out.exists() else pd.DataFrame(columns=["way"])
    for name, plan in plans(task_on(CLUSTERS[0])):
        if name not in set(table["way"]):
            print(name, flush=True)
            table = pd.concat([table, pd.DataFrame(rows_of(name, plan))], ignore_index=True)
            table.to_csv(out, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
