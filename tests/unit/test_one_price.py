"""One plan has one price, whoever asks: validation, tuner, simulated launch and verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baselines.deepspeed_3d.contender import DEEPSPEED_3D
from baselines.deepspeed_3d.knobs import DeepSpeedKnobs
from baselines.fsdp.contender import FSDP
from baselines.fsdp.knobs import FSDPKnobs
from baselines.public_3d.contender import BEST_3D
from baselines.public_3d.knobs import Best3DKnobs
from benchmarks.specification.compose import preset
from benchmarks.studies.claim_33.cells import Cell, winners
from benchmarks.studies.validation.cases import case_of
from benchmarks.studies.validation.predict import predict, simulated
from benchmarks.studies.validation.rows import PublishedRow
from tests.unit.published_cells import CELLS
from zeropp.cluster import Cluster
from zeropp.contender.contender import ZEROPP
from zeropp.contender.knobs import ZeroppKnobs
from zeropp.plan import Candidate, Plan, Task
from zeropp.shape import ModelShape
from zeropp.sim.simulator import simulate
from zeropp.tune.contender import Contender

Asked = tuple[Contender[Any], Candidate[Any]]
SIDES = {"tp": 2, "pp": 2, "replicate": 2, "replicate_zero": 1}
OTHERS: tuple[Asked, ...] = (
    (DEEPSPEED_3D, Candidate(DeepSpeedKnobs(**SIDES, recompute="full"), 1)),  # type: ignore[arg-type]
    *(
        (BEST_3D, Candidate(Best3DKnobs(**SIDES, **more), 1))  # type: ignore[arg-type]
        for more in (
            {"schedule": "1f1b", "recompute": "none"},
            {"schedule": "interleaved_1f1b", "chunks": 2, "sequence_parallel": True},
            {"schedule": "zbv", "chunks": 2, "recompute": "full"},
        )
    ),
    (FSDP, Candidate(FSDPKnobs(shard=4, replicate=2, reduce_every="unit"), 1)),
    *(
        (ZEROPP, Candidate(ZeroppKnobs(**more), 1))
        for more in (
            {"pp": 2, "shard": 4, "chunks": 2},
            {"pp": 4, "shard": 2, "chunks": 2, "unit": 8, "recompute": "full", "keep": 1},
            {"pp": 2, "shard": 2, "replicate": 2, "replicate_zero": 1, "reduce_every": "step"},
            {"pp": 1, "shard": 8, "chunks": 4, "unit": 2},
        )
    ),
)
# The knobs of a ZeroPP plan that no other column of a published row says.
OWN = ("activation_cap", "reduce_every", "replicate_every", "prefetch", "keep", "stage_style")


def task() -> Task:
    shape: ModelShape = preset("model", "gpt_1_5b", ModelShape)
    shape = replace(shape, layers=16)
    return Task(
        shape=shape, cluster=preset("cluster", "a100", Cluster), num_gpus=8, global_batch=16
    )


def as_row(plan: Plan, knobs: Any) -> PublishedRow:
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
        "recompute": plan.recompute,
    }  # fmt: skip
    if plan.schedule.name == "zeropp":
        cells |= {
            "schedule": "zeropp",
            "chunks": str(layout.chunks),
            "knobs": knobs_of(plan, knobs),
        }
        cells["zero"] = "3" if layout.shard > 1 else "0"
    return PublishedRow.model_validate({name: cell for name, cell in cells.items() if cell})


def knobs_of(plan: Plan, knobs: ZeroppKnobs) -> str:
    """A ZeroPP plan's own knobs as a row states them."""
    stated = {name: getattr(plan, name) for name in OWN} | {"unit": plan.schedule.unit}
    stated |= {name: getattr(plan.layout, name) for name in ("replicate_zero", "placement")}
    stated["split_backward"] = str(plan.split_backward).lower()
    stated["split_blocks"] = str(knobs.split_blocks is True).lower()
    return " ".join(f"{name}={value}" for name, value in stated.items())


def asked() -> list[Asked]:
    """What the verdict's search finds best of each contender, and others with a pipeline."""
    searched = (ZEROPP, DEEPSPEED_3D, BEST_3D, FSDP)
    best = winners(Cell(task()), 0.05, searched)
    found = [(c, w.candidate) for c in searched if (w := best[c.name]) is not None]
    return [*OTHERS, *((c, between_blocks(candidate)) for c, candidate in found)]


def between_blocks(candidate: Candidate[Any]) -> Candidate[Any]:
    """The bound's plan without cuts inside blocks, which only ZeroPP's rows can state."""
    if candidate.knobs.name != "best_3d":
        return candidate
    return replace(candidate, knobs=replace(candidate.knobs, split_blocks=False))


def test_validation_tuner_launch_and_verdict_give_one_number() -> None:
    found = asked()
    assert len(found) == len(OTHERS) + 4
    for contender, candidate in found:
        tuned = contender.simulated(task(), candidate)  # the tuner's and the verdict's
        launched = simulate(contender.plan(task(), candidate), task().cluster)
        assert launched.step_s == pytest.approx(tuned.step_s, rel=1e-12)
        row = as_row(tuned.plan, candidate.knobs)
        assert simulated(case_of(row)).plan.program == tuned.plan.program
        assert predict(row).value == pytest.approx(tuned.step_s, rel=1e-12), candidate
