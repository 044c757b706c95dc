"""One plan has one price, whoever asks: validation, tuner, simulated launch and verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.specification.compose import preset
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.studies.claim_33.cells import Cell, winners
from benchmarks.studies.validation.cases import case_of
from benchmarks.studies.validation.predict import predict, simulated
from benchmarks.studies.validation.rows import PublishedRow
from tests.unit.published_cells import CELLS
from zeropp.cluster import Cluster
from zeropp.layout import Layout
from zeropp.plan import PlanRequest, Settings
from zeropp.shape import ModelShape
from zeropp.sim.simulator import simulate
from zeropp.tune.search import result_of
from zeropp.tune.space import SPACES, Candidate, Task

NAMES = ("deepspeed_3d", "best_3d", "fsdp")


def task() -> Task:
    shape: ModelShape = preset("model", "gpt_1_5b", ModelShape)
    return Task(shape, preset("cluster", "a100", Cluster), num_gpus=8, global_batch=16)


def as_row(candidate: Candidate) -> PublishedRow:
    """A published row of the candidate's plan."""
    shape, layout = task().shape, candidate.layout
    pipeline = layout.pp > 1
    cells = CELLS | {
        "program": SPACES[candidate.contender].program, "params_b": "", "memory_gib": "",
        "layers": str(shape.layers), "hidden": str(shape.hidden), "heads": str(shape.heads),
        "kv_heads": str(shape.kv_heads), "ffn": str(shape.ffn), "vocab": str(shape.vocab),
        "seq": str(shape.seq), "tied_embeddings": "yes" if shape.tied_embeddings else "no",
        "num_gpus": "8", "tp": str(layout.tp), "pp": str(layout.pp), "dp": str(layout.dp),
        "chunks": str(layout.chunks if pipeline else 1),
        "sequence_parallel": "yes" if layout.sequence_parallel else "no",
        "zero": "3" if layout.shard > 1 else str(layout.replicate_zero),
        "zero3_group": str(layout.shard) if layout.shard > 1 else "",
        "schedule": candidate.schedule if pipeline else "none", "global_batch": "16",
        "micro_batch": str(candidate.microbatch_size), "recompute": candidate.recompute,
    }  # fmt: skip
    return PublishedRow.model_validate({name: cell for name, cell in cells.items() if cell})


def planned_step_s(candidate: Candidate) -> float:
    """The step that a simulated launch of the contender records."""
    layout = candidate.layout
    settings = Settings(
        name=candidate.contender,
        pp=layout.pp,
        tp=layout.tp,
        shard=layout.shard,
        replicate=layout.replicate,
        replicate_zero=layout.replicate_zero,
        recompute=candidate.recompute,
        reduce_every=candidate.reduce_every if candidate.contender == "fsdp" else "unit",
    )
    size = candidate.microbatch_size
    request = PlanRequest(task().shape, task().cluster, 8, 16, size, "bf16", settings)
    return simulate(CONTENDERS[candidate.contender].plan(request), task().cluster).step_s


ZERO1 = Layout(pp=2, tp=2, replicate=2, replicate_zero=1)
OTHERS = (
    Candidate("deepspeed_3d", ZERO1, 1, 8, "1f1b", "full"),
    Candidate("best_3d", ZERO1, 2, 4, "1f1b", "none"),
    Candidate(
        "best_3d",
        replace(ZERO1, chunks=2, sequence_parallel=True),
        1,
        8,
        "interleaved_1f1b",
        "none",
    ),
    Candidate("best_3d", replace(ZERO1, chunks=2), 1, 8, "zbv", "full"),
    Candidate("fsdp", Layout(shard=4, replicate=2), 1, 2, "fsdp", "none", reduce_every="unit"),
)


def candidates() -> list[Candidate]:
    """What the verdict's search finds best of each contender, and others with a pipeline."""
    best = winners(Cell(task()), 0.05)
    return [*OTHERS, *(one.candidate for name in NAMES if (one := best[name]) is not None)]


def test_validation_tuner_launch_and_verdict_give_one_number() -> None:
    asked = candidates()
    assert len(asked) == len(OTHERS) + len(NAMES)
    for candidate in asked:
        tuned = result_of(task(), candidate).step_s  # the verdict's rows are made of it, too
        row = as_row(candidate)
        assert predict(row).value == pytest.approx(tuned, rel=1e-12)
        assert simulated(case_of(row)).plan.program == SPACES[candidate.contender].program
        if candidate.contender in CONTENDERS:
            assert planned_step_s(candidate) == pytest.approx(tuned, rel=1e-12)
