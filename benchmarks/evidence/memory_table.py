"""Writes results/reference/memory/traced_vs_simulated.csv, which compares the cost model's memory
with that of the real code.

Every plan's first, middle and last pipeline rank is traced (``zeropp.emulate.trace``) and priced.
Needs no GPU and no peers; about a quarter of an hour on two cores. Plans that the file has are
priced again but not traced again: delete the rows of a contender whose code has changed. The file
is written after every plan, so a run that was stopped goes on where it was.

    python -m benchmarks.evidence.memory_table [results/reference/memory/traced_vs_simulated.csv]
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from benchmarks.records.environment import git_state
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.reading import preset
from benchmarks.specification.run_spec import knobs_from
from zeropp.choose.planner import asked_degrees
from zeropp.choose.task import Candidate, Task
from zeropp.emulate.trace import trace_ranks
from zeropp.price import price_plan
from zeropp.price.cluster import Cluster
from zeropp.price.peak_memory import peak_memory
from zeropp.schedule.plan import MemoryBytes, Plan
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

OUT = Path("results/reference/memory/traced_vs_simulated.csv")


@dataclass(frozen=True)
class TracedPlan:
    """One plan to trace; ``text`` identifies its rows in the file."""

    contender: str
    model: str
    text: str

    def plan(self) -> Plan:
        """The plan that the contender's planner makes."""
        *options, size, number, precision = self.text.split()
        chosen = OmegaConf.to_container(OmegaConf.from_dotlist(options))
        assert isinstance(chosen, dict)
        known = CONTENDERS[self.contender].knobs.__dataclass_fields__
        axes = [
            axis
            for axis in ("pp", "tp", "context", "shard", "replicate", "chunks")
            if axis in known
        ]
        knobs = knobs_from({"name": self.contender, **dict.fromkeys(axes, 1), **chosen})
        degrees = {name: int(degree) for name, degree in asked_degrees(knobs).items()}
        microbatch_size, count = int(size.removeprefix("b=")), int(number.removeprefix("m="))
        dp = degrees.get("shard", 1) * degrees.get("replicate", 1)
        task = Task(
            shape=preset("model", self.model, ModelShape),
            cluster=preset("cluster", "a800", Cluster),
            num_gpus=prod(degrees.values()),
            global_batch=microbatch_size * count * dp,
            precision="fp32" if precision == "fp32" else "bf16",
        )
        return CONTENDERS[self.contender].plan(task, Candidate(knobs, microbatch_size))


# A line per plan: contender, model, the contender's knobs as on the command line (degrees and
# chunks that are not given are 1), microbatch size (b), microbatches (m) and precision. Models of
# DeepSpeed and Megatron-Core are small, as their ranks needed real tensors when they were recorded.
PLANS = """
zeropp gpt_1_5b pp=1 shard=8 b=1 m=4 bf16
zeropp gpt_1_5b pp=4 chunks=2 b=1 m=8 fp32
zeropp gpt_1_5b pp=2 shard=4 chunks=2 b=4 m=8 bf16
zeropp gpt_1_5b pp=2 shard=2 replicate=2 chunks=4 unit=4 b=1 m=8 bf16
zeropp gpt_6_2b pp=4 shard=8 chunks=2 b=1 m=8 bf16
zeropp gpt_6_2b pp=4 shard=8 chunks=2 recompute=selective b=1 m=8 bf16
zeropp gpt_6_2b pp=4 shard=8 chunks=2 recompute=full b=1 m=8 bf16
zeropp gpt_6_2b pp=2 shard=16 chunks=2 recompute=full b=2 m=4 fp32
zeropp gpt_6_2b pp=4 shard=4 chunks=2 reduce_every=step activation_cap=6 b=1 m=8 bf16
zeropp gpt_6_2b pp=4 shard=4 replicate=2 replicate_zero=1 chunks=2 b=1 m=8 bf16
zeropp gpt_28_3b pp=8 shard=8 chunks=2 recompute=full b=2 m=16 bf16
zeropp gpt_175b pp=16 shard=32 chunks=2 recompute=full b=1 m=16 bf16
zeropp llama_8b pp=4 shard=8 chunks=2 recompute=full b=1 m=8 bf16
zeropp llama_8b pp=8 chunks=2 b=1 m=8 bf16
zeropp llama_70b pp=8 shard=8 chunks=2 recompute=full b=1 m=16 bf16
torch_pp gpt_1_5b pp=4 shard=2 schedule=1f1b b=1 m=8 bf16
torch_pp gpt_1_5b pp=4 schedule=1f1b b=1 m=8 fp32
torch_pp gpt_1_5b pp=4 shard=2 schedule=interleaved_1f1b chunks=4 b=1 m=8 bf16
torch_pp gpt_1_5b pp=4 shard=2 schedule=looped_bfs chunks=2 b=1 m=8 bf16
torch_pp gpt_1_5b pp=4 shard=2 schedule=interleaved_zb chunks=2 b=1 m=8 bf16
torch_pp gpt_1_5b pp=4 shard=2 schedule=zbv chunks=2 b=1 m=8 bf16
torch_pp gpt_1_5b pp=4 shard=2 schedule=dualpipev chunks=2 b=1 m=8 bf16
torch_pp gpt_6_2b pp=2 shard=8 schedule=interleaved_1f1b chunks=2 b=4 m=8 bf16
torch_pp gpt_6_2b pp=2 shard=2 replicate=2 schedule=1f1b recompute=selective b=1 m=8 bf16
torch_pp gpt_6_2b pp=4 tp=2 shard=2 schedule=interleaved_1f1b chunks=2 b=1 m=8 bf16
torch_pp gpt_6_2b pp=4 tp=4 schedule=1f1b sequence_parallel=true b=1 m=8 bf16
torch_pp gpt_6_2b pp=4 tp=8 schedule=1f1b recompute=full b=2 m=8 bf16
torch_pp gpt_175b pp=16 tp=8 shard=4 schedule=1f1b recompute=full b=1 m=16 bf16
torch_pp llama_8b pp=4 shard=8 schedule=interleaved_1f1b chunks=2 b=1 m=8 bf16
torch_pp llama_8b pp=4 tp=4 schedule=1f1b sequence_parallel=true b=1 m=8 bf16
torch_pp llama_70b pp=8 tp=8 schedule=1f1b recompute=full b=1 m=8 bf16
torch_pp llama_70b pp=8 shard=8 schedule=interleaved_1f1b chunks=2 b=1 m=8 bf16
deepspeed_3d gpt_mini pp=2 replicate=2 replicate_zero=1 b=8 m=8 bf16
deepspeed_3d gpt_mini pp=4 replicate=2 replicate_zero=1 recompute=full b=8 m=8 bf16
deepspeed_3d gpt_mini pp=2 tp=2 replicate=2 replicate_zero=1 b=8 m=8 bf16
deepspeed_3d gpt_mini pp=4 tp=4 recompute=full b=8 m=8 fp32
deepspeed_3d gpt_mini tp=2 replicate=4 recompute=full b=8 m=4 fp32
deepspeed_3d llama_tiny pp=2 tp=2 replicate_zero=1 b=8 m=8 bf16
deepspeed_3d llama_tiny pp=4 replicate=2 b=8 m=8 fp32
deepspeed_3d gpt_mini pp=2 replicate=2 grad_accum_dtype=bf16 reduce_dtype=bf16 b=8 m=8 bf16
deepspeed_3d gpt_mini tp=2 replicate=4 replicate_zero=1 b=8 m=4 bf16
deepspeed_3d gpt_mini replicate=4 grad_accum_dtype=bf16 reduce_dtype=bf16 b=8 m=4 bf16
deepspeed_3d gpt_mini tp=2 replicate=4 replicate_zero=2 b=8 m=4 bf16
deepspeed_3d llama_mini replicate=4 replicate_zero=2 recompute=full b=8 m=1 bf16
megatron_core_local gpt_mini pp=2 replicate=4 replicate_zero=1 b=8 m=8 bf16
megatron_core_local gpt_mini pp=4 replicate=2 recompute=full b=8 m=8 fp32
megatron_core_local gpt_mini pp=2 tp=2 schedule=interleaved_1f1b chunks=2 b=1 m=4 bf16
megatron_core_local llama_mini pp=4 tp=2 replicate_zero=1 sequence_parallel=true b=2 m=4 fp32
fsdp gpt_1_5b shard=8 b=1 m=2 bf16
fsdp gpt_1_5b shard=8 reduce_every=step b=1 m=2 bf16
fsdp gpt_1_5b shard=8 b=4 m=2 fp32
fsdp gpt_6_2b shard=32 recompute=selective b=2 m=2 bf16
fsdp gpt_6_2b shard=8 replicate=4 recompute=full b=4 m=2 bf16
fsdp gpt_175b shard=64 recompute=full b=1 m=1 bf16
fsdp llama_8b shard=16 recompute=full b=2 m=2 bf16
fsdp llama_70b shard=64 recompute=selective b=1 m=1 bf16
"""
CASES = [TracedPlan(*line.split(maxsplit=2)) for line in PLANS.strip().splitlines()]


def trace(case: TracedPlan) -> Iterator[dict[str, Any]]:
    """What was traced, one row per pipeline rank."""
    plan = case.plan()
    pp, pipeline = plan.layout.pp, plan.layout.pipeline(0)
    ranks = ranks_of(pp)
    contender = CONTENDERS[case.contender]
    chosen = [pipeline[rank] for rank in ranks]
    traces = trace_ranks(plan, chosen, optimizer=OptimizerConfig(), program=contender)
    for rank, rank_trace in zip(ranks, traces, strict=True):
        yield {
            "contender": case.contender,
            "model": case.model,
            "plan": case.text,
            "pipeline_rank": rank,
            "trace_s": f"{rank_trace.seconds:.1f}",
            "trace_commit": git_state()[0][:10],
            **_gib("traced", rank_trace.memory),
        }


def ranks_of(pp: int) -> list[int]:
    """The pipeline ranks that have a row: the first, one in the middle and the last."""
    return sorted({0, pp // 2, pp - 1})


def price(case: TracedPlan, row: dict[str, Any]) -> dict[str, Any]:
    """A traced row with the cost model's numbers added."""
    plan = case.plan()
    memory = peak_memory(plan, price_plan(plan, preset("cluster", "a800", Cluster)))
    simulated = _gib("simulated", memory[int(row["pipeline_rank"])])
    error = float(simulated["simulated_total_gib"]) / float(row["traced_total_gib"]) - 1
    last = {"relative_error": f"{error:.4f}", "commit": git_state()[0][:10]}
    return row | simulated | last


def _gib(prefix: str, memory: MemoryBytes) -> dict[str, str]:
    kinds = {field.name: getattr(memory, field.name) for field in fields(memory)}
    kinds["total"] = memory.total
    return {f"{prefix}_{kind}_gib": f"{size / 2**30:.4f}" for kind, size in kinds.items()}


def read(path: Path) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """The traced rows of a file, by plan; none if there is no file."""
    traced: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    if path.exists():
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            traced[row["contender"], row["model"], row["plan"]].append(row)
    return traced


@command
def main() -> int:
    """Command line; see ``--help``."""
    parser = CommandParser(
        description="Compare the cost model's memory with that of the real code, traced without a "
        "GPU, and write a CSV. Plans in the file are priced again, others are traced, too; this "
        "takes a quarter of an hour.",
        epilog="example: python -m benchmarks.evidence.memory_table /tmp/memory.csv",
    )
    parser.add_argument(
        "out", nargs="?", type=Path, default=OUT, help="the CSV (the committed one)"
    )
    out, rows = parser.parse_args().out, list[dict[str, Any]]()
    out.parent.mkdir(parents=True, exist_ok=True)
    traced = read(out)
    missing = sum((c.contender, c.model, c.text) not in traced for c in CASES)
    print(f"{missing} of {len(CASES)} plans are to be traced", flush=True)
    for number, case in enumerate(CASES, 1):
        key = (case.contender, case.model, case.text)
        for row in traced.pop(key, None) or trace(case):
            rows.append(price(case, row))
            error = float(rows[-1]["relative_error"])
            print(f"{number}/{len(CASES)}", *key, row["pipeline_rank"], f"{error:+.1%}", flush=True)
        left = [row for others in traced.values() for row in others]
        pd.DataFrame(rows + left).to_csv(out, index=False)
    pd.DataFrame(rows).to_csv(out, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
