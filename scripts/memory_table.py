"""Write results/reference/memory/traced_vs_simulated.csv: the cost model's memory beside the real
code's.

Every plan's first, middle and last pipeline rank is traced (``zeropp.engine.trace``) and priced.
Needs no GPU and no peers; about a quarter of an hour on two cores.

    python scripts/memory_table.py [results/reference/memory/traced_vs_simulated.csv]
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from pydantic import TypeAdapter

from benchmarks.contenders import CONTENDERS
from benchmarks.environment import git_state
from zeropp.cost import price_plan
from zeropp.cost.cluster import Cluster
from zeropp.engine.trace import trace_ranks
from zeropp.plan import MemoryBytes, Plan, PlanRequest, Precision, Settings
from zeropp.shape import ModelShape
from zeropp.sim.memory import peak_memory
from zeropp.training import OptimizerConfig

CONF = Path(__file__).resolve().parents[1] / "conf"
Preset = TypeVar("Preset", ModelShape, Cluster)
DEGREES = ("pp", "tp", "shard", "replicate")


@dataclass(frozen=True)
class Case:
    """One plan. ``options`` are a contender's knobs as on the command line; degrees not named
    are 1."""

    contender: str
    model: str
    options: str
    microbatch_size: int = 1
    num_microbatches: int = 8
    precision: Precision = "bf16"

    @property
    def knobs(self) -> dict[str, Any]:
        """The options with their values."""
        chosen = OmegaConf.to_container(OmegaConf.from_dotlist(self.options.split()))
        assert isinstance(chosen, dict)
        return dict.fromkeys(DEGREES, 1) | {str(k): v for k, v in chosen.items()}

    @property
    def text(self) -> str:
        """The plan in words."""
        sizes = f"b={self.microbatch_size} m={self.num_microbatches} {self.precision}"
        return f"{self.options} {sizes}"

    def plan(self) -> Plan:
        """The contender's own plan."""
        knobs = self.knobs
        request = PlanRequest(
            shape=preset("model", self.model, ModelShape),
            cluster=preset("cluster", "a800", Cluster),
            num_gpus=prod(knobs[degree] for degree in DEGREES),
            global_batch=prod(
                (self.microbatch_size, self.num_microbatches, knobs["shard"], knobs["replicate"])
            ),
            microbatch_size=self.microbatch_size,
            precision=self.precision,
            settings=Settings(self.contender, **knobs),
        )
        return CONTENDERS[self.contender].plan(request)


CASES = (
    Case("zeropp", "gpt_1_5b", "pp=1 shard=8", num_microbatches=4),
    Case("zeropp", "gpt_1_5b", "pp=4 chunks=2", precision="fp32"),
    Case("zeropp", "gpt_1_5b", "pp=2 shard=4 chunks=2", 4),
    Case("zeropp", "gpt_1_5b", "pp=2 shard=2 replicate=2 chunks=4 unit=4"),
    Case("zeropp", "gpt_6_2b", "pp=4 shard=8 chunks=2"),
    Case("zeropp", "gpt_6_2b", "pp=4 shard=8 chunks=2 recompute=selective"),
    Case("zeropp", "gpt_6_2b", "pp=4 shard=8 chunks=2 recompute=full"),
    Case("zeropp", "gpt_6_2b", "pp=2 shard=16 chunks=2 recompute=full", 2, 4, "fp32"),
    Case("zeropp", "gpt_6_2b", "pp=4 shard=4 chunks=2 reduce_every=step activation_cap=6"),
    Case("zeropp", "gpt_6_2b", "pp=4 shard=4 replicate=2 replicate_zero=1 chunks=2"),
    Case("zeropp", "gpt_28_3b", "pp=8 shard=8 chunks=2 recompute=full", 2, 16),
    Case("zeropp", "gpt_28_3b", "pp=4 shard=16 chunks=4 unit=8", 1, 16),
    Case("zeropp", "gpt_175b", "pp=16 shard=32 chunks=2 recompute=full", 1, 16),
    Case("zeropp", "gpt_175b", "pp=8 shard=32 chunks=3", 1, 16),
    Case("zeropp", "llama_8b", "pp=4 shard=8 chunks=2"),
    Case("zeropp", "llama_8b", "pp=4 shard=8 chunks=2 recompute=full"),
    Case("zeropp", "llama_8b", "pp=2 shard=4 chunks=2 recompute=selective"),
    Case("zeropp", "llama_8b", "pp=8 chunks=2"),
    Case("zeropp", "llama_70b", "pp=8 shard=8 chunks=2 recompute=full", 1, 16),
    Case("zeropp", "llama_70b", "pp=16 shard=8 chunks=1", 1, 16),
    Case("torch_pp", "gpt_1_5b", "pp=4 shard=2 schedule=1f1b"),
    Case("torch_pp", "gpt_1_5b", "pp=4 shard=2 schedule=1f1b", precision="fp32"),
    Case("torch_pp", "gpt_1_5b", "pp=4 schedule=1f1b", precision="fp32"),
    Case("torch_pp", "gpt_1_5b", "pp=4 shard=2 schedule=interleaved_1f1b chunks=4"),
    Case("torch_pp", "gpt_1_5b", "pp=4 shard=2 schedule=looped_bfs chunks=2"),
    Case("torch_pp", "gpt_1_5b", "pp=4 shard=2 schedule=interleaved_zb chunks=2"),
    Case("torch_pp", "gpt_1_5b", "pp=4 shard=2 schedule=zbv chunks=2"),
    Case("torch_pp", "gpt_1_5b", "pp=4 shard=2 schedule=dualpipev chunks=2"),
    Case("torch_pp", "gpt_6_2b", "pp=2 shard=8 schedule=interleaved_1f1b chunks=2", 4),
    Case("torch_pp", "gpt_6_2b", "pp=2 shard=2 replicate=2 schedule=1f1b recompute=selective"),
    Case("torch_pp", "gpt_6_2b", "pp=4 tp=2 shard=2 schedule=interleaved_1f1b chunks=2"),
    Case("torch_pp", "gpt_6_2b", "pp=4 tp=4 schedule=1f1b sequence_parallel=true"),
    Case("torch_pp", "gpt_6_2b", "pp=4 tp=8 schedule=1f1b recompute=full", 2),
    Case("torch_pp", "gpt_6_2b", "pp=2 tp=4 schedule=zbv chunks=2"),
    Case("torch_pp", "gpt_28_3b", "pp=8 tp=4 shard=2 schedule=1f1b recompute=full", 1, 16),
    Case("torch_pp", "gpt_175b", "pp=16 tp=8 shard=4 schedule=1f1b recompute=full", 1, 16),
    Case("torch_pp", "gpt_175b", "pp=16 shard=32 schedule=1f1b recompute=full", 1, 16),
    Case("torch_pp", "llama_8b", "pp=4 shard=8 schedule=interleaved_1f1b chunks=2"),
    Case("torch_pp", "llama_8b", "pp=4 tp=4 schedule=1f1b sequence_parallel=true"),
    Case("torch_pp", "llama_70b", "pp=8 tp=8 schedule=1f1b recompute=full", 1, 8),
    Case("torch_pp", "llama_70b", "pp=8 shard=8 schedule=interleaved_1f1b chunks=2", 1, 8),
    Case("fsdp", "gpt_1_5b", "shard=8", 1, 2),
    Case("fsdp", "gpt_1_5b", "shard=8 reduce_every=step", 1, 2),
    Case("fsdp", "gpt_1_5b", "shard=8", 4, 2, "fp32"),
    Case("fsdp", "gpt_6_2b", "shard=32", 1, 2),
    Case("fsdp", "gpt_6_2b", "shard=32 recompute=selective", 2, 2),
    Case("fsdp", "gpt_6_2b", "shard=8 replicate=4 recompute=full", 4, 2),
    Case("fsdp", "gpt_28_3b", "shard=32 recompute=full", 2, 1),
    Case("fsdp", "gpt_175b", "shard=256 recompute=full", 1, 1),
    Case("fsdp", "llama_8b", "shard=8", 1, 2),
    Case("fsdp", "llama_8b", "shard=16 recompute=full", 2, 2),
    Case("fsdp", "llama_70b", "shard=64 recompute=selective", 1, 1),
)


def preset(group: str, name: str, kind: type[Preset]) -> Preset:
    """A file of ``conf/``."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    return TypeAdapter(kind).validate_python(values)


def rows(case: Case) -> Iterator[dict[str, Any]]:
    """One row a traced pipeline rank."""
    plan = case.plan()
    pp, pipeline = plan.layout.pp, plan.layout.pipeline(0)
    simulated = peak_memory(plan, price_plan(plan, preset("cluster", "a800", Cluster)))
    traced = sorted({0, pp // 2, pp - 1})
    build = CONTENDERS[case.contender].build
    traces = trace_ranks(plan, [pipeline[index] for index in traced], OptimizerConfig(), build)
    for index, trace in zip(traced, traces, strict=True):
        yield {
            "contender": case.contender,
            "model": case.model,
            "plan": case.text,
            "pipeline_rank": index,
            **_gib("traced", trace.memory),
            **_gib("simulated", simulated[index]),
            "relative_error": f"{simulated[index].total / trace.memory.total - 1:.4f}",
            "trace_s": f"{trace.seconds:.1f}",
            "commit": git_state()[0][:10],
        }


def _gib(prefix: str, memory: MemoryBytes) -> dict[str, str]:
    kinds = {field.name: getattr(memory, field.name) for field in fields(memory)}
    kinds["total"] = memory.total
    return {f"{prefix}_{kind}_gib": f"{size / 2**30:.4f}" for kind, size in kinds.items()}


def main() -> None:
    default = "results/reference/memory/traced_vs_simulated.csv"
    out = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = None
    with out.open("w", newline="") as file:
        for number, case in enumerate(CASES, 1):
            for row in rows(case):
                writer = writer or csv.DictWriter(file, list(row), lineterminator="\n")
                if row is not None and file.tell() == 0:
                    writer.writeheader()
                writer.writerow(row)
                words = (row["contender"], row["model"], row["plan"], row["pipeline_rank"])
                error = float(row["relative_error"])
                print(f"{number}/{len(CASES)}", *words, f"{error:+.1%}", flush=True)


if __name__ == "__main__":
    main()
