"""The cells of the verdict, and what every contender does in one of them. All simulated.

A cell is a model on so many GPUs of a cluster at a global batch. In each, every contender is at
its best plan (``zeropp.tune``), and all are compared once more at equal degrees: the same
pipeline, the same group of GPUs inside a node (TP for 3D, ZeRO-3 for ZeroPP), the same
microbatch and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from zeropp.layout import Layout, divisors
from zeropp.literals import Recompute
from zeropp.sim.losses import Losses
from zeropp.sim.simulator import SimResult
from zeropp.tune.search import Evaluated, result_of, search
from zeropp.tune.space import SPACES, Candidate, Task


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
    losses: Losses | None = None

    def columns(self) -> dict[str, object]:
        """The row as a table's columns: ``limit_s``, ``bubble_s`` ... for the losses (seconds),
        which add up to ``step_s``."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "losses"}
        lost = self.losses.by_kind() if self.losses else {}
        return plain | {f"{kind}_s": seconds for kind, seconds in lost.items()}


def rows_of(cell: Cell, tolerance: float) -> list[Row]:
    """Every contender at its best plan, then all at equal degrees."""
    rows = []
    for name, winner in winners(cell, tolerance).items():
        if winner is None:
            rows.append(Row(*cell.key, name, "best", "simulated", "no plan fits"))
        else:
            rows.append(_row(cell, winner.candidate, winner.result, "best"))
    return rows + [_row(cell, c, r, "equal") for c, r in _equal_plans(cell.priced)]


def winners(cell: Cell, tolerance: float) -> dict[str, Evaluated | None]:
    """Every contender's best plan; None where none fits."""
    return {
        name: search(cell.priced, space, tolerance=tolerance).winner
        for name, space in SPACES.items()
    }


def _row(cell: Cell, candidate: Candidate, result: SimResult, mode: str) -> Row:
    return Row(
        *cell.key,
        candidate.contender,
        mode,
        "simulated",
        candidate.describe(),
        result.step_s,
        result.tokens_per_s_per_gpu,
        result.peak_bytes / 2**30,
        result.bubble,
        result.limit_share,
        result.losses,
    )


def _equal_plans(task: Task) -> list[tuple[Candidate, SimResult]]:
    """The smallest pipeline, with as little recomputation as possible, that fits for all three;
    empty where there is none."""
    for recompute in ("none", "full"):
        for candidates in _equal_candidates(task, recompute):
            results = [(c, result_of(task, c)) for c in candidates]
            if all(r.peak_bytes <= task.cluster.device.usable_bytes for _, r in results):
                return results
    return []


def _equal_candidates(task: Task, recompute: Recompute) -> Iterator[list[Candidate]]:
    """DeepSpeed's 1F1B, interleaved 1F1B with sequence parallelism, and ZeroPP with U = P; two
    chunks a rank for the last two; one sequence a microbatch."""
    group = min(task.cluster.gpus_per_node, task.num_gpus // 2)
    for pp in divisors(task.num_gpus // group)[1:] or [2]:
        replicas = task.num_gpus // group // pp
        m_tensor = task.global_batch // replicas
        m_shard = task.global_batch // (replicas * group)
        even = task.global_batch % (replicas * group) == 0 and m_tensor % pp == 0
        if not even or m_shard < 1 or 2 * pp > task.shape.layers:
            continue
        three = Layout(pp, group, 1, replicas, replicate_zero=1 if replicas > 1 else 0)
        two_chunks = replace(three, chunks=2, sequence_parallel=True)
        shards = Layout(pp, 1, group, replicas, chunks=2)
        unit = min(pp, m_shard)
        yield [
            Candidate("deepspeed_3d", three, 1, m_tensor, "1f1b", recompute),
            Candidate("best_3d", two_chunks, 1, m_tensor, "interleaved_1f1b", recompute),
            Candidate("zeropp", shards, 1, m_shard, "zeropp", recompute, unit, 2 * unit, "unit"),
        ]
