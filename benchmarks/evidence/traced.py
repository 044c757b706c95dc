"""Writes the tables that compare the simulator with the programs' own code, traced without a GPU.

``memory``: results/reference/memory/traced_vs_simulated.csv. The first, middle and last pipeline
rank of every plan is traced (``zeropp.emulate.trace``) and priced; about a quarter of an hour on
two cores. A line names a contender, a model and a plan: the contender's knobs as on the command
line (degrees and chunks that are not given are 1), microbatch size (b), microbatches (m) and
precision. Lines with traced numbers are priced again and not traced again; to trace a plan, leave
one line of it with these three columns alone.

``replays``: results/reference/replays.csv, the best plans of the verdict. *Described* is the
simulator's step, from our description of each program; *replayed* is the step of the program's own
code on an emulated device, at the same prices (``benchmarks.launch.replay``). Of both there are the
step, the compute of the rank with the most (its kernels, those of the update too, without
collectives), and what a rank's compute waits for, on the average of the ranks. Plans with few
passes come first, two at a time. Plans that the file has are left as they are: delete the rows of a
program whose code has changed, or of cells that now have other plans.

``context``: results/reference/context_replays.csv, the same for small plans of ZeroPP that divide
sequences. No other contender's trainer divides them here: Megatron-Core needs Transformer Engine.

Each table is written after every plan, so a run that was stopped goes on where it was.

    python -m benchmarks.evidence.traced replays --minutes 60
"""

from __future__ import annotations

import csv
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks.evidence.renew import REFERENCE
from benchmarks.launch.replay import replayed_plan, trace_pipeline
from benchmarks.records.environment import git_state
from benchmarks.records.simulated import TABLE, commit_of, shape_named
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.contenders import COMPARED, CONTENDERS
from benchmarks.specification.reading import preset
from benchmarks.specification.run_spec import knobs_from
from benchmarks.verdict.cells import CELL, Cell, candidate_of
from zeropp.choose.contender import describe
from zeropp.choose.planner import asked_degrees
from zeropp.choose.task import MEMORY_MARGIN, Candidate, Task
from zeropp.price import price_plan
from zeropp.price.cluster import Cluster
from zeropp.price.peak_memory import peak_memory
from zeropp.price.simulator import SimResult, simulate
from zeropp.schedule.plan import MemoryBytes, Plan
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

Row = dict[str, Any]
Plans = dict[tuple[Any, ...], list[tuple[Cell, Plan]]]
_KEY = [*CELL, "contender"]
_CLIPPED = OptimizerConfig(kind="adamw", clip_norm=1.0)  # as the simulator prices an update
_AXES = ("pp", "tp", "context", "shard", "replicate", "chunks")

# Megatron-Core's plans are replayed with its own layers, as nothing here has Transformer Engine,
# and ZeRO-3's without DeepCompile.
_OWN_LAYERS = {"megatron_core": "megatron_core_local"}


def read(path: Path) -> list[Row]:
    """The lines of a table, as texts; none if there is no file."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines() * path.exists()))


def traced_plan(row: Mapping[str, Any]) -> Plan:
    """The plan that a line of the table of memory names, as its contender's planner makes it."""
    *options, size, number, precision = row["plan"].split()
    chosen = OmegaConf.to_container(OmegaConf.from_dotlist(options))
    assert isinstance(chosen, dict)
    contender = CONTENDERS[row["contender"]]
    axes = [axis for axis in _AXES if axis in contender.knobs.__dataclass_fields__]
    knobs = knobs_from({"name": contender.name, **dict.fromkeys(axes, 1), **chosen})
    degrees = {name: int(degree) for name, degree in asked_degrees(knobs).items()}
    microbatch_size, count = int(size.removeprefix("b=")), int(number.removeprefix("m="))
    dp = degrees.get("shard", 1) * degrees.get("replicate", 1)
    task = Task(
        shape=preset("model", row["model"], ModelShape),
        cluster=preset("cluster", "a800", Cluster),
        num_gpus=prod(degrees.values()),
        global_batch=microbatch_size * count * dp,
        precision="fp32" if precision == "fp32" else "bf16",
    )
    return contender.plan(task, Candidate(knobs, microbatch_size))


def traced_rows(row: Row) -> list[Row]:
    """What was traced of a plan: a row for its first, middle and last pipeline rank each."""
    from zeropp.emulate.trace import trace_ranks  # imports torch

    plan, begin = traced_plan(row), {name: row[name] for name in ("contender", "model", "plan")}
    pp, pipeline = plan.layout.pp, plan.layout.pipeline(0)
    chosen = {rank: pipeline[rank] for rank in sorted({0, pp // 2, pp - 1})}
    program = CONTENDERS[row["contender"]]
    traces = trace_ranks(plan, [*chosen.values()], optimizer=OptimizerConfig(), program=program)
    return [
        begin
        | {"pipeline_rank": rank, "trace_s": f"{trace.seconds:.1f}"}
        | {"trace_commit": git_state()[0][:10], **_gib("traced", trace.memory)}
        for rank, trace in zip(chosen, traces, strict=True)
    ]


def simulated(row: Mapping[str, Any]) -> Row:
    """The cost model's columns of a traced row."""
    plan = traced_plan(row)
    memory = peak_memory(plan, price_plan(plan, preset("cluster", "a800", Cluster)))
    columns: Row = _gib("simulated", memory[int(row["pipeline_rank"])])
    error = float(columns["simulated_total_gib"]) / float(row["traced_total_gib"]) - 1
    return columns | {"relative_error": f"{error:.4f}"}


def _gib(prefix: str, memory: MemoryBytes) -> dict[str, str]:
    kinds = {field.name: getattr(memory, field.name) for field in fields(memory)}
    kinds |= {"total": memory.total}
    del kinds["host"]  # the table is of the device's memory
    return {f"{prefix}_{kind}_gib": f"{size / 2**30:.4f}" for kind, size in kinds.items()}


def write_memory(out: Path) -> None:
    """Price, and trace where needed, every line of the table of memory."""
    left = read(out)
    rows: list[Row] = []
    while left:
        first = left.pop(0)
        for row in [first] if first["traced_total_gib"] else traced_rows(first):
            priced = row | simulated(row)
            rows.append(row if row == priced else priced | {"commit": git_state()[0][:10]})
            words = (row[name] for name in ("contender", "model", "plan", "pipeline_rank"))
            print(*words, f"{float(rows[-1]['relative_error']):+.1%}", flush=True)
        pd.DataFrame(rows + left).to_csv(out, index=False)


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The cell of a line of a table of plans."""
    task = Task(
        shape=shape_named(row["model"]),
        cluster=preset("cluster", row["cluster"], Cluster),
        num_gpus=int(row["num_gpus"]),
        global_batch=int(row["global_batch"]),
        precision=row.get("precision") or "bf16",
        memory_margin=float(row.get("memory_margin") or MEMORY_MARGIN),
    )
    return Cell(task, float(row["bandwidth"]))


def best_plans() -> Plans:
    """The verdict's best plans whose code runs here, with their cells, by what one trace serves,
    the name of the row first. Those with the fewest passes of a block come first, one of each row
    after another."""
    found: Plans = defaultdict(list)
    for row in read(REFERENCE / "claim_33" / TABLE):
        name, cell = row["contender"], cell_of(row)
        # DeepSpeed's best has the plans of its ZeRO-3.
        if row["mode"] != "best" or not row["step_s"] or name == "deepspeed_zero3":
            continue
        program = COMPARED[name].contender.name
        if _OWN_LAYERS.get(program, program) not in CONTENDERS:
            continue
        _, known, candidate = candidate_of(row["setting"])
        if program in _OWN_LAYERS:
            known = CONTENDERS[name := _OWN_LAYERS[program]]
            if candidate.knobs.context not in (1, "auto"):
                continue  # with Transformer Engine alone
            given = vars(candidate.knobs)
            same = {each.name: given[each.name] for each in fields(known.knobs)}
            candidate = replace(candidate, knobs=known.knobs(**same | {"name": name}))
        if known.name == "deepspeed_zero3":  # DeepCompile is in prices alone
            candidate = replace(candidate, knobs=replace(candidate.knobs, compile=False))
        plan = known.simulated(cell.priced, candidate).plan
        found[name, row["model"], row["plan"], cell.task.num_gpus].append((cell, plan))

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


def context_plans() -> Plans:
    """ZeroPP's plans of Llama 8B of few blocks that divide sequences, as ``best_plans``."""
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


def write_replays(out: Path, plans: Plans, minutes: float) -> None:
    """Replay the plans that the table does not have; begin none after this many minutes."""
    until = time.monotonic() + 60 * minutes
    table = pd.read_csv(out) if out.exists() else pd.DataFrame(columns=_KEY)
    known = set(table[_KEY].itertuples(index=False, name=None))
    todo = {
        key: shared
        for key, shared in plans.items()
        if not known.issuperset((*cell.key, key[0]) for cell, _ in shared)
    }

    def replayed(key: tuple[Any, ...]) -> list[Row] | str:
        if time.monotonic() > until:
            return "time is over"
        try:
            return rows_of(key[0], todo[key])
        except Exception as error:  # the other plans go on
            return f"{type(error).__name__}: {str(error).strip()[:300]}"

    missing = 0
    with ThreadPoolExecutor(2) as pool:  # most plans are traced by one process, on one core
        running = {pool.submit(replayed, key): key for key in todo}
        for future in as_completed(running):
            rows = future.result()
            if isinstance(rows, str):
                missing += 1
                print(f"{running[future]}: not replayed, {rows}", flush=True)
                continue
            table = pd.concat([table, pd.DataFrame(rows)], ignore_index=True)
            table.to_csv(out, index=False)
            for each in rows:
                words = " ".join(str(each[name]) for name in _KEY)
                print(f"{words}: {each['ratio']:.3f} ({each['trace_s']:.0f} s)", flush=True)
    print(f"{len(todo) - missing} plans replayed, {missing} not")


@command
def main() -> int:
    """Command line; see ``--help``."""
    parser = CommandParser(
        description="Compare the simulator with the programs' own code, traced without a GPU, and "
        "write a CSV: of memory, of the verdict's best plans, or of plans that divide sequences.",
        epilog="example: python -m benchmarks.evidence.traced replays --minutes 60",
    )
    parser.add_argument("table", choices=["memory", "replays", "context"])
    parser.add_argument("out", nargs="?", type=Path, help="the CSV (the committed one)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="replay no further plan after this many"
    )
    options = parser.parse_args()
    if options.table == "memory":
        write_memory(options.out or REFERENCE / "memory" / "traced_vs_simulated.csv")
    elif options.table == "replays":
        write_replays(options.out or REFERENCE / "replays.csv", best_plans(), options.minutes)
    else:
        out = options.out or REFERENCE / "context_replays.csv"
        write_replays(out, context_plans(), options.minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
