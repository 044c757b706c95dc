"""The cells of the verdict, and every contender's simulated results in a cell.

A cell is a model, a cluster, a number of GPUs and a global batch. In each, every contender runs
with its best plan (``zeropp.tune``). In addition all are compared in two given settings
(``given_settings``): with equal degrees, and with the paper's setting as far as it is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

from baselines.deepspeed_3d.contender import DEEPSPEED_3D
from baselines.fsdp.contender import FSDP
from baselines.public_3d.contender import (
    BEST_3D,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    ZERO_BUBBLE,
)
from baselines.torch_pp.contender import TORCH_PP, TORCHTITAN
from benchmarks.specification.contenders import PRICED
from benchmarks.specification.run_spec import validated
from benchmarks.studies.claim_33.given_settings import GIVEN
from zeropp.contender.contender import ZEROPP
from zeropp.plan import Candidate, Task
from zeropp.sim.lost_time import Losses
from zeropp.sim.simulator import SimResult
from zeropp.tune.contender import Contender
from zeropp.tune.describe import describe
from zeropp.tune.outcome import Evaluated
from zeropp.tune.search import search

# The contenders that are compared, in the order of the tables.
COMPARED: tuple[Contender[Any], ...] = (
    DEEPSPEED_3D,
    MEGATRON_DEEPSPEED,
    MEGATRON_CORE,
    ZERO_BUBBLE,
    TORCHTITAN,
    TORCH_PP,
    FSDP,
    BEST_3D,
    ZEROPP,
)


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
        """The task on the cluster with the cell's bandwidth."""
        inter = self.task.cluster.inter
        scaled = replace(inter, bandwidth_gb_s=inter.bandwidth_gb_s * self.bandwidth)
        return replace(self.task, cluster=replace(self.task.cluster, inter=scaled))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one cell; numbers are None if no plan fits."""

    model: str
    cluster: str
    num_gpus: int
    global_batch: int
    bandwidth: float
    contender: str
    mode: str  # best | equal | paper
    provenance: str
    plan: str
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_gib: float | None = None
    bubble: float | None = None
    share_of_limit: float | None = None  # throughput divided by the compute limit
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
    """The part of a cell that one process computes: the best plan of the contender named ``part``,
    or the plans of the given setting named ``part``."""

    cell: Cell
    part: str
    tolerance: float

    def rows(self) -> list[Row]:
        """The rows of this part."""
        cell, name = self.cell, self.part
        if name in GIVEN:
            plans = GIVEN[name](cell.priced)
            return [_row(cell, candidate, result, name) for candidate, result in plans]
        winner = winners(cell, self.tolerance, [PRICED[name]])[name]
        if winner is None:
            return [_of_cell(cell)(contender=name, mode="best", plan="no plan fits")]
        return [_row(cell, winner.candidate, winner.result, "best")]


def jobs_of(cell: Cell, tolerance: float) -> list[Job]:
    """All parts of a cell."""
    return [Job(cell, name, tolerance) for name in (*(c.name for c in COMPARED), *GIVEN)]


def priced_again(cell: Cell, setting: str) -> Row:
    """The row of a ``setting`` as today's code computes it. Raises SpecError if its contender no
    longer has these knobs."""
    values = json.loads(setting)
    contender = PRICED[values["knobs"]["name"]]
    knobs = validated(contender.knobs, values["knobs"], "setting.knobs")
    candidate = Candidate(knobs, values["microbatch_size"])
    return _row(cell, candidate, contender.simulated(cell.priced, candidate), "")


def winners(
    cell: Cell, tolerance: float, contenders: Iterable[Contender[Any]]
) -> dict[str, Evaluated[Any] | None]:
    """Every contender's best plan, by name; None if none fits."""
    return {
        contender.name: search(cell.priced, contender, tolerance=tolerance).winner
        for contender in contenders
    }


def _of_cell(cell: Cell) -> partial[Row]:
    """Makes rows of this cell from the columns of one contender."""
    model, cluster, num_gpus, global_batch, bandwidth = cell.key
    return partial(
        Row,
        model=model,
        cluster=cluster,
        num_gpus=num_gpus,
        global_batch=global_batch,
        bandwidth=bandwidth,
        provenance="simulated",
    )


def _row(cell: Cell, candidate: Candidate[Any], result: SimResult, mode: str) -> Row:
    return _of_cell(cell)(
        contender=result.plan.contender,
        mode=mode,
        plan=describe(result.plan),
        step_s=result.step_s,
        tokens_per_s_per_gpu=result.tokens_per_s_per_gpu,
        peak_gib=result.peak_bytes / 2**30,
        bubble=result.bubble,
        share_of_limit=result.limit_share,
        setting=json.dumps(asdict(candidate)),
        losses=result.losses,
    )
