"""The cells of the verdict, and what every contender does in one of them. All simulated.

A cell is a model on so many GPUs of a cluster at a global batch. In each, every contender is at
its best plan (``zeropp.tune``), and all are compared once more at equal degrees: the same
pipeline, the same group of GPUs inside a node (TP for 3D, ZeRO-3 for ZeroPP), the same
microbatch and recomputation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from baselines.deepspeed_3d.contender import DEEPSPEED_3D
from baselines.deepspeed_3d.knobs import DeepSpeedKnobs
from baselines.fsdp.contender import FSDP
from baselines.public_3d.contender import (
    BEST_3D,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    ZERO_BUBBLE,
)
from baselines.public_3d.knobs import MegatronCoreKnobs
from baselines.torch_pp.contender import TORCHTITAN
from benchmarks.specification.contenders import PRICED
from benchmarks.specification.run_spec import validated
from zeropp.contender.contender import ZEROPP
from zeropp.contender.knobs import ZeroppKnobs
from zeropp.layout import divisors
from zeropp.plan import Candidate, Knobs, Task
from zeropp.sim.losses import Losses
from zeropp.sim.simulator import SimResult
from zeropp.tune.contender import Contender
from zeropp.tune.describe import describe
from zeropp.tune.search import Evaluated, search

# Who is compared, in the order of the tables.
COMPARED: tuple[Contender[Any], ...] = (
    DEEPSPEED_3D,
    MEGATRON_DEEPSPEED,
    MEGATRON_CORE,
    ZERO_BUBBLE,
    TORCHTITAN,
    FSDP,
    BEST_3D,
    ZEROPP,
)
Recompute = Literal["none", "full"]


@dataclass(frozen=True)
class Cell:
    """One comparison; ``bandwidth`` multiplies the cluster's inter-node bandwidth."""

    task: Task
    bandwidth: float = 1.0

    @property
    def key(self) -> tuple[str, str, int, int, float]:
        """Model, cluster, GPUs, global batch, bandwidth factor: the columns of the tables."""
        task = self.task
        names = (task.shape.name, task.cluster.name)
        return (*names, task.num_gpus, task.global_batch, self.bandwidth)

    @property
    def priced(self) -> Task:
        """The task on the cluster with the bandwidth that the cell asks for."""
        inter = self.task.cluster.inter
        scaled = replace(inter, bandwidth_gb_s=inter.bandwidth_gb_s * self.bandwidth)
        return replace(self.task, cluster=replace(self.task.cluster, inter=scaled))


@dataclass(frozen=True)
class Row:
    """One contender in one cell. Numbers are None where no plan fits."""

    model: str
    cluster: str
    num_gpus: int
    global_batch: int
    bandwidth: float
    contender: str
    mode: str  # best | equal
    provenance: str
    plan: str
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_gib: float | None = None
    bubble: float | None = None
    share_of_limit: float | None = None  # throughput over that of the compute limit
    setting: str = ""  # knobs and microbatch size as JSON, from which ``priced_again`` simulates
    losses: Losses | None = None

    def columns(self) -> dict[str, object]:
        """The row as a table's columns: ``limit_s``, ``bubble_s`` ... for the losses (seconds),
        which add up to ``step_s``."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "losses"}
        lost = self.losses.by_kind() if self.losses else {}
        return plain | {f"{kind}_s": seconds for kind, seconds in lost.items()}


@dataclass(frozen=True)
class Job:
    """A part of a cell that one process works out: one contender's best plan, or, where
    ``contender`` is empty, the plans at equal degrees."""

    cell: Cell
    contender: str
    tolerance: float

    def rows(self) -> list[Row]:
        """What the part adds to the verdict."""
        cell, name = self.cell, self.contender
        if not name:
            equal = _equal_plans(cell.priced)
            return [_row(cell, candidate, result, "equal") for candidate, result in equal]
        winner = winners(cell, self.tolerance, [PRICED[name]])[name]
        if winner is None:
            return [Row(*cell.key, name, "best", "simulated", "no plan fits")]
        return [_row(cell, winner.candidate, winner.result, "best")]


def jobs_of(cell: Cell, tolerance: float) -> list[Job]:
    """All parts of a cell."""
    return [Job(cell, name, tolerance) for name in (*(c.name for c in COMPARED), "")]


def priced_again(cell: Cell, setting: str) -> Row:
    """The row of a ``setting`` as today's code computes it; raises SpecError where its contender
    knows these knobs no more."""
    values = json.loads(setting)
    contender = PRICED[values["knobs"]["name"]]
    knobs = validated(contender.knobs, values["knobs"], "setting.knobs")
    candidate = Candidate(knobs, values["microbatch_size"])
    return _row(cell, candidate, contender.simulated(cell.priced, candidate), "")


def winners(
    cell: Cell, tolerance: float, contenders: Iterable[Contender[Any]]
) -> dict[str, Evaluated[Any] | None]:
    """Every contender's best plan; None where none fits."""
    return {
        contender.name: search(cell.priced, contender, tolerance=tolerance).winner
        for contender in contenders
    }


def _row(cell: Cell, candidate: Candidate[Any], result: SimResult, mode: str) -> Row:
    return Row(
        *cell.key,
        result.plan.contender,
        mode,
        "simulated",
        describe(result.plan),
        result.step_s,
        result.tokens_per_s_per_gpu,
        result.peak_bytes / 2**30,
        result.bubble,
        result.limit_share,
        json.dumps(asdict(candidate)),
        result.losses,
    )


def _equal_plans(task: Task) -> list[tuple[Candidate[Any], SimResult]]:
    """The smallest pipeline, with as little recomputation as possible, that fits for all three;
    empty where there is none."""
    recomputes: tuple[Recompute, ...] = ("none", "full")
    for recompute in recomputes:
        for setting in _equal_settings(task, recompute):
            results = [
                (candidate, contender.simulated(task, candidate))
                for contender, candidate in ((c, Candidate(knobs, 1)) for c, knobs in setting)
            ]
            if all(r.peak_bytes <= task.cluster.device.usable_bytes for _, r in results):
                return results
    return []


def _equal_settings(
    task: Task, recompute: Recompute
) -> Iterator[list[tuple[Contender[Any], Knobs]]]:
    """DeepSpeed's 1F1B, Megatron-Core's interleaved 1F1B with sequence parallelism, and ZeroPP
    with U = P; two chunks per rank for the last two; one sequence per microbatch."""
    group = min(task.cluster.gpus_per_node, task.num_gpus // 2)
    for pp in divisors(task.num_gpus // group)[1:] or [2]:
        replicas = task.num_gpus // group // pp
        m_tensor = task.global_batch // replicas
        m_shard = task.global_batch // (replicas * group)
        even = task.global_batch % (replicas * group) == 0 and m_tensor % pp == 0
        if not even or m_shard < 1 or 2 * pp > task.shape.layers:
            continue
        yield _equal_knobs(pp, group, replicas, min(pp, m_shard), recompute)


def _equal_knobs(
    pp: int, group: int, replicas: int, unit: int, recompute: Recompute
) -> list[tuple[Contender[Any], Knobs]]:
    zero: Literal[0, 1] = 1 if replicas > 1 else 0
    three = DeepSpeedKnobs(
        tp=group, pp=pp, replicate=replicas, replicate_zero=1, recompute=recompute
    )
    core = MegatronCoreKnobs(
        tp=group,
        pp=pp,
        replicate=replicas,
        replicate_zero=zero,
        chunks=2,
        schedule="interleaved_1f1b",
        sequence_parallel=True,
        recompute=recompute,
    )
    shards = ZeroppKnobs(
        pp=pp,
        shard=group,
        replicate=replicas,
        replicate_zero=0,
        chunks=2,
        unit=unit,
        activation_cap=2 * unit,
        recompute=recompute,
        reduce_every="unit",
    )
    return [(DEEPSPEED_3D, three), (MEGATRON_CORE, core), (ZEROPP, shards)]
