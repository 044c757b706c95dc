"""Writes results/reference/replays.csv: the best plans of the verdict, described against replayed.

*Described* is the simulator's step, from our description of each program; *replayed* is the step of
the program's own code on an emulated device, at the same prices (``benchmarks.launch.replay``). Of
both there are the step, the compute of the rank with the most (its kernels, those of the update
too, without collectives), and what a rank's compute waits for, on the average of the ranks. Plans
that were traced are not traced again: delete the rows of a program whose code has changed, or of
cells that now have other plans. Plans with few passes come first, two at a time; the row of each is
written once it is there.

    python -m benchmarks.evidence.replays --minutes 60 [results/reference/replays.csv]
    python -m benchmarks.evidence.replays --context results/reference/context_replays.csv

``--context`` compares small plans of ZeroPP that divide sequences instead. No other contender's
trainer divides them here: Megatron-Core needs Transformer Engine for it.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks.evidence.renew import REFERENCE
from benchmarks.launch.replay import replayed_plan, trace_pipeline
from benchmarks.records.environment import git_state
from benchmarks.records.simulated import BASES, TABLE, commit_of, read_table
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.contenders import COMPARED, CONTENDERS
from benchmarks.specification.reading import preset
from benchmarks.verdict.cells import CELL, Cell, candidate_of
from zeropp.choose.contender import describe
from zeropp.choose.task import Candidate, Task
from zeropp.price.cluster import Cluster
from zeropp.price.simulator import SimResult, simulate
from zeropp.schedule.plan import Plan
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

OUT = REFERENCE / "replays.csv"
_KEY = [*CELL, "contender"]
_CLIPPED = OptimizerConfig(kind="adamw", clip_norm=1.0)  # as the simulator prices an update

# Megatron-Core's plans are replayed with its own layers, as nothing here has Transformer Engine,
# and ZeRO-3's without DeepCompile.
_OWN_LAYERS = {"megatron_core": "megatron_core_local"}


def plans() -> dict[tuple[Any, ...], list[tuple[Cell, Plan]]]:
    """The verdict's best plans whose code runs here, with their cells, by what one trace serves,
    the name of the row first. Those with the fewest passes of a block come first, one of each row
    after another."""
    found: dict[tuple[Any, ...], list[tuple[Cell, Plan]]] = defaultdict(list)
    for record in read_table(REFERENCE / "claim_33" / TABLE):
        name = record.spec["contender"]["name"]
        if record.basis != BASES["best"] or not record.step_s or name not in COMPARED:
            continue
        if name == "deepspeed_zero3":  # DeepSpeed's best has its plans
            continue
        program = COMPARED[name].contender.name
        known = CONTENDERS.get(_OWN_LAYERS.get(program, program))
        if known:
            task = Task(
                shape=preset("model", record.spec["model"]["name"], ModelShape),
                cluster=preset("cluster", record.spec["cluster"]["name"], Cluster),
                num_gpus=record.spec["num_gpus"],
                global_batch=record.spec["global_batch"],
            )
            cell = Cell(task, record.spec["bandwidth"])
            setting = {
                "knobs": record.spec["contender"],
                "microbatch_size": record.spec["microbatch_size"],
            }
            _, contender, candidate = candidate_of(json.dumps(setting))
            if program not in _OWN_LAYERS:
                known = contender
            else:
                name = known.name
                if candidate.knobs.context not in (1, "auto"):
                    continue  # with Transformer Engine alone
                given = vars(candidate.knobs)
                same = {each.name: given[each.name] for each in fields(known.knobs)}
                candidate = replace(candidate, knobs=known.knobs(**same | {"name": name}))
            if known.name == "deepspeed_zero3":  # DeepCompile is in prices alone
                candidate = replace(candidate, knobs=replace(candidate.knobs, compile=False))
            plan = known.simulated(cell.priced, candidate).plan
            key = (name, record.spec["model"]["name"], record.plan["words"], cell.task.num_gpus)
            found[key].append((cell, plan))

    def passes(key: tuple[Any, ...]) -> int:
        plan = found[key][0][1]
        return plan.num_microbatches * plan.shape.layers

    earlier: Counter[str] = Counter()
    turns = {}
    for key in sorted(found, key=passes):
        turns[key] = earlier[key[0]]
        earlier[key[0]] += 1
    return {key: found[key] for key in sorted(turns, key=turns.__getitem__)}


# Blocks, tokens of a sequence, and knobs: heads are exchanged inside a node, and over two.
_CONTEXT: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (2, 32768, 8, {"pp": 1, "context": 8, "shard": 1, "chunks": 2, "recompute": "full"}),
    (4, 32768, 8, {"pp": 2, "context": 4, "shard": 1, "unit": 2, "recompute": "mlp"}),
    (2, 65536, 16, {"pp": 1, "context": 16, "shard": 1, "chunks": 4, "recompute": "full"}),
    (4, 32768, 16, {"pp": 2, "context": 2, "shard": 4, "unit": 2, "recompute": "selective"}),
    (2, 32768, 8, {"pp": 1, "context": 4, "shard": 2, "chunks": 2, "recompute": "none"}),
    (2, 65536, 16, {"pp": 2, "context": 8, "shard": 1, "unit": 2, "recompute": "full"}),
)


def context_plans() -> dict[tuple[Any, ...], list[tuple[Cell, Plan]]]:
    """ZeroPP's plans of Llama 8B with few blocks that divide sequences, as ``plans`` gives them."""
    llama, cluster = preset("model", "llama_8b", ModelShape), preset("cluster", "h100", Cluster)
    found = {}
    for layers, seq, gpus, knobs in _CONTEXT:
        shape = replace(llama, layers=layers, seq=seq)
        batch = 2 * gpus // knobs["context"]
        task = Task(shape=shape, cluster=cluster, num_gpus=gpus, global_batch=batch)
        own = ZeroppKnobs(**knobs, replicate=1, compile=False)
        plan = ZEROPP.simulated(task, Candidate(own, 1)).plan
        found[(f"zeropp {describe(plan)}",)] = [(Cell(task, 1.0), plan)]
    return found


def rows_of(row: str, shared: list[tuple[Cell, Plan]]) -> list[dict[str, Any]]:
    """Trace one plan, and compare it in all cells that have it."""
    begin = time.perf_counter()
    traces = trace_pipeline(shared[0][1], _CLIPPED)
    traced_s = time.perf_counter() - begin
    rows = []
    for cell, plan in shared:
        described = simulate(plan, cell.priced.cluster)
        replayed = replayed_plan(plan, cell.priced.cluster, traces)
        waits = {
            cause: fmean(waited.get(cause, 0.0) for waited in replayed.waits_s.values())
            for cause in ("gather", "reduce", "replicas", "transfer", "host")
        }
        rows.append(
            dict(zip(_KEY, (*cell.key, row), strict=True))
            | {
                "provenance": "replayed",
                "ratio": replayed.step_s / described.step_s,
                "replayed_step_s": replayed.step_s,
                "described_step_s": described.step_s,
                "replayed_compute_s": max(replayed.busy_s.values()),
                "described_compute_s": described_compute_s(described),
                "replayed_peak_gib": max(trace.memory.total for trace in traces) / 2**30,
                "described_peak_gib": described.peak_bytes / 2**30,
                **{f"replayed_{cause}_s": seconds for cause, seconds in waits.items()},
                "described_gather_s": fmean(described.events.exposed_gather),
                "described_transfer_s": fmean(described.events.exposed_wait),
                "traced_ranks": len(traces),
                "trace_s": traced_s,
                "commit": commit_of(*git_state()),
            }
        )
    return rows


def described_compute_s(described: SimResult) -> float:
    """Seconds of the kernels of the rank with the most, as a replay counts them: its passes without
    the collectives that the simulator takes for a part of them, and its update."""
    plan, price = described.plan, described.price
    ranks = []
    for rank, busy_s in enumerate(described.events.busy):
        stages = plan.schedule.stages_of(rank)
        parts = [price.extras[s] for s in stages]
        collectives_s = sum(
            p.tensor_forward + p.tensor_backward + p.reductions + p.gathers for p in parts
        )
        update_s = sum(price.stages[s].update for s in stages)
        ranks.append(busy_s - plan.num_microbatches * collectives_s + update_s)
    return max(ranks)


@command
def main() -> int:
    """Command line; see ``--help``."""
    parser = CommandParser(
        description="Compare the simulator's steps with those of the programs' own code, replayed "
        "without a GPU, and write a CSV. Plans in the file are left as they are.",
        epilog="example: python -m benchmarks.evidence.replays --minutes 60 /tmp/replays.csv",
    )
    parser.add_argument(
        "out", nargs="?", type=Path, default=OUT, help="the CSV (the committed one)"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no further plan after this many"
    )
    parser.add_argument(
        "--context", action="store_true", help="small plans that divide sequences, not the best"
    )
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    table = pd.read_csv(options.out) if options.out.exists() else pd.DataFrame(columns=_KEY)
    known = set(table[_KEY].itertuples(index=False, name=None))
    todo = {
        key: shared
        for key, shared in (context_plans() if options.context else plans()).items()
        if not known.issuperset((*cell.key, key[0]) for cell, _ in shared)
    }

    def run(key: tuple[Any, ...]) -> list[dict[str, Any]] | str:
        if time.monotonic() > until:
            return "time is over"
        try:
            return rows_of(key[0], todo[key])
        except Exception as error:  # the other plans go on
            return f"{type(error).__name__}: {str(error).strip()[:300]}"

    missing = 0
    with ThreadPoolExecutor(2) as pool:  # most plans are traced by one process, on one core
        running = {pool.submit(run, key): key for key in todo}
        for future in as_completed(running):
            rows = future.result()
            if isinstance(rows, str):
                missing += 1
                print(f"{running[future]}: not replayed, {rows}", flush=True)
                continue
            table = pd.concat([table, pd.DataFrame(rows)], ignore_index=True)
            table.to_csv(options.out, index=False)
            for each in rows:
                words = " ".join(str(each[name]) for name in _KEY)
                print(f"{words}: {each['ratio']:.3f} ({each['trace_s']:.0f} s)", flush=True)
    print(f"{len(todo) - missing} plans replayed, {missing} not")
    return 0


if __name__ == "__main__":
    sys.exit(main())
