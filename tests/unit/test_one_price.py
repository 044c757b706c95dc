"""One plan has one price, whoever asks: validation, tuner, simulated launch and verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baselines.deepspeed_3d.contender import DEEPSPEED
from baselines.fsdp.contender import FSDP
from baselines.public_3d import BEST_3D
from baselines.zeropp.contender import ZEROPP
from benchmarks.specification.contenders import COMPARED, PRICED, ROWS
from benchmarks.specification.reading import preset
from benchmarks.validation.cases import case_of
from benchmarks.validation.predict import predict, simulated
from benchmarks.validation.rows import PublishedRow
from benchmarks.verdict.cells import Cell, best_in
from tests.unit.published_cells import CELLS
from zeropp.choose.contender import Contender
from zeropp.choose.task import Candidate, Task
from zeropp.price.cluster import Cluster
from zeropp.price.simulator import simulate
from zeropp.schedule.plan import Plan
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape

SIDES = {"tp": 2, "pp": 2, "replicate": 2, "replicate_zero": 1}
STAGES = {"tp": 1, "pp": 4, "shard": 2, "replicate": 1}
PARTLY = {"recompute": "full", "recompute_blocks": 2}
# Settings of every contender that is judged. All others of its knobs are at their defaults.
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("deepspeed_3d", {**SIDES, "recompute": "full"}),
    ("deepspeed", {**SIDES, "tp": 1, "pp": 4}),
    ("deepspeed_zero3", {"shard": 8, **PARTLY}),
    ("best_3d", {**SIDES, "schedule": "1f1b", "recompute": "none"}),
    ("best_3d", {**SIDES, "schedule": "interleaved_1f1b", "chunks": 2, "sequence_parallel": True}),
    ("best_3d", {**SIDES, "schedule": "zbv", "chunks": 2, "recompute": "full"}),
    ("megatron_core", {**SIDES, "pp": 4, "replicate": 1, "schedule": "1f1b", **PARTLY}),
    ("megatron_core", {**SIDES, "schedule": "interleaved_1f1b", "chunks": 3}),
    ("megatron_core_local", {**SIDES, "schedule": "interleaved_1f1b", "chunks": 3}),
    ("torch_pp", {**STAGES, "schedule": "zbv", "chunks": 2}),
    ("torch_pp", {**STAGES, "schedule": "interleaved_1f1b", "chunks": 2, **PARTLY}),
    ("torchtitan", {**STAGES, "schedule": "1f1b", "recompute": "selective"}),
    ("fsdp", {"shard": 4, "replicate": 2, "reduce_every": "unit"}),
    ("megatron_fsdp", {"shard": 4, "replicate": 2}),
    ("zeropp", {"pp": 2, "shard": 4, "chunks": 2}),
    ("zeropp", {"pp": 4, "shard": 2, "chunks": 2, "unit": 8, **PARTLY}),
    ("zeropp", {"pp": 2, "shard": 2, "replicate": 2, "replicate_zero": 1, "reduce_every": "step"}),
    ("zeropp", {"pp": 1, "shard": 8, "chunks": 4, "unit": 2}),
    ("zeropp", {"pp": 1, "shard": 8, "chunks": 4, "unit": 2, "gradient_parts": 3, "prefetch": 0}),
)
# Others are asked with all knobs at their defaults; no published row states their plans.
EVERY = (*ASKED, *((name, {}) for name in PRICED if name not in dict(ASKED)))
# The knobs of a ZeroPP plan that no other column of a published row says.
OWN = ("activation_cap", "reduce_every", "gradient_parts", "prefetch")


def task(precision: Precision = "bf16", *, tied: bool = True) -> Task:
    """A model whose blocks divide over no number of stages, on eight GPUs."""
    shape: ModelShape = preset("model", "gpt_1_5b", ModelShape)
    return Task(
        shape=replace(shape, layers=23, tied_embeddings=tied),
        cluster=preset("cluster", "a100", Cluster),
        num_gpus=8,
        global_batch=16,
        precision=precision,
    )


def as_row(plan: Plan) -> PublishedRow:
    """A published row of a plan."""
    shape, layout = plan.shape, plan.layout
    pipeline = layout.pp > 1
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    cells = CELLS | {name: str(getattr(shape, name)) for name in sizes}
    cells |= {
        "program": plan.program, "params_b": "", "memory_gib": "",
        "tied_embeddings": "yes" if shape.tied_embeddings else "no",
        "num_gpus": "8", "tp": str(layout.tp), "pp": str(layout.pp), "dp": str(layout.dp),
        "chunks": str(layout.chunks if pipeline else 1),
        "sequence_parallel": "yes" if layout.sequence_parallel else "no",
        "zero": "3" if layout.shard > 1 else str(layout.replicate_zero),
        "zero3_group": str(layout.shard) if layout.shard > 1 else "",
        "schedule": plan.schedule.name if pipeline else "none",
        "micro_batch": str(plan.microbatch_size), "global_batch": str(plan.global_batch),
        "recompute": plan.recompute, "dtype": plan.precision,
        "compiled": "yes" if plan.compile else "no",
        "cuts": " ".join(map(str, plan.cuts)) if pipeline else "",
    }  # fmt: skip
    if plan.recomputed:
        cells["recompute_blocks"] = str(max(plan.recomputed) * layout.pp * layout.chunks)
    if plan.schedule.name == "zeropp":
        cells |= {
            "schedule": "zeropp",
            "cuts": "",
            "chunks": str(layout.chunks),
            "knobs": knobs_of(plan),
        }
        cells["zero"] = "3" if layout.shard > 1 else "0"
    return PublishedRow.model_validate({name: cell for name, cell in cells.items() if cell})


def knobs_of(plan: Plan) -> str:
    """A ZeroPP plan's own knobs as a row states them."""
    stated = {name: getattr(plan, name) for name in OWN} | {"unit": plan.schedule.unit}
    stated |= {name: getattr(plan.layout, name) for name in ("replicate_zero", "placement")}
    stated["split_backward"] = str(plan.split_backward).lower()
    return " ".join(f"{name}={value}" for name, value in stated.items())


def assert_one_number(task: Task, contender: Contender[Any], candidate: Candidate[Any]) -> None:
    tuned = contender.simulated(task, candidate)  # the tuner's and the verdict's
    launched = simulate(contender.plan(task, candidate), task.cluster)
    assert launched.step_s == pytest.approx(tuned.step_s, rel=1e-12)
    if contender.name not in dict(ASKED):
        return
    row = as_row(tuned.plan)
    assert simulated(case_of(row)).plan.program == tuned.plan.program
    assert predict(row).value == pytest.approx(tuned.step_s, rel=1e-12)


def test_every_contender_of_the_verdict_is_asked() -> None:
    assert {name for name, _ in ASKED} >= {row.contender.name for row in COMPARED.values()}


@pytest.mark.parametrize(
    ("precision", "tied"), [("bf16", True), ("bf16", False), ("fp32", True)], ids=str
)
@pytest.mark.parametrize(("name", "settings"), EVERY, ids=str)
def test_validation_tuner_launch_and_verdict_give_one_number(
    name: str, settings: dict[str, Any], precision: Precision, *, tied: bool
) -> None:
    contender = PRICED[name]
    candidate = Candidate(contender.knobs(**settings), 1)
    assert_one_number(task(precision, tied=tied), contender, candidate)


def test_what_the_verdict_finds_has_one_price() -> None:
    for contender in (ZEROPP, DEEPSPEED, BEST_3D, FSDP):
        row = ROWS[contender.name]
        winner = best_in(Cell(task()), row, settings="equal", tolerance=0.05).winner
        assert winner is not None
        assert_one_number(task(), contender, winner.candidate)
