"""Replaces the cost model's compute times by those that ranks without peers measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.launch.points import plan_summary, records_of
from benchmarks.records.record import RunRecord
from benchmarks.specification.run_spec import RunSpec, SpecError
from zeropp.cost.plan_price import PlanPrice, StageExtras
from zeropp.plan import Plan
from zeropp.schedule.program import StageCost

Like = tuple[float, float, bool, bool]  # what makes stages alike: blocks, half, embedding, head


def traced_record(spec: RunSpec, plan: Plan, runs_dir: Path) -> RunRecord:
    """The newest record with compute times of exactly this plan. Raises SpecError if there is none,
    or if it has no stage with the same pieces for one of the plan's stages."""
    found = [
        record
        for record in records_of(spec, runs_dir)
        if record.status == "ok"
        and record.predicted.get("compute_s")
        and _without_memory(record.plan) == _without_memory(plan_summary(plan))
    ]
    if not found:
        raise SpecError(
            f"launcher.compute=traced: {runs_dir} has no record of {spec.spec_id}, planned as it "
            "is today, with compute times (run it with launcher=trace launcher.tensors=real)"
        )
    _by_stage(plan, found[-1].predicted["compute_s"])
    return found[-1]


def _without_memory(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "predicted_memory"}


def traced_stages(
    plan: Plan, price: PlanPrice, compute_s: Mapping[str, float]
) -> tuple[StageCost, ...]:
    """Stage costs with traced compute; collectives and transfers stay the cost model's.

    ``compute_s``: seconds by stage and kind of action (``3F``) for some stages; every other stage
    takes the median of stages with the same pieces. A full backward is split in the proportion of
    the cost model. Tensor-parallel collectives are added, because they take no time on a lone rank.
    Raises SpecError for a stage whose pieces no traced stage has.
    """
    traced = _by_stage(plan, compute_s)
    return tuple(map(_replaced, price.stages, traced, price.extras))


def _replaced(cost: StageCost, traced: Mapping[str, float], extras: StageExtras) -> StageCost:
    """A stage's cost with the seconds of ``traced``, by kind of action. Kinds that it lacks keep
    the cost model's (FSDP2's embedding has no backward that can be timed)."""
    durations = {}
    if "F" in traced:
        durations["forward"] = traced["F"] + extras.tensor_forward
    if "I" in traced and "W" in traced:
        durations["backward_input"] = traced["I"] + extras.tensor_backward
        durations["backward_weight"] = traced["W"]
    elif "B" in traced:
        backward = traced["B"] + extras.tensor_backward
        share = cost.backward_input / (cost.backward_input + cost.backward_weight)
        durations["backward_input"] = share * backward
        durations["backward_weight"] = (1 - share) * backward
    return replace(cost, **durations)


def _by_stage(plan: Plan, compute_s: Mapping[str, float]) -> list[dict[str, float]]:
    """For every stage, the seconds of its actions by kind."""
    own: dict[int, dict[str, float]] = defaultdict(dict)
    likes: dict[Like, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, seconds in compute_s.items():
        stage, action = int(name[:-1]), name[-1]
        own[stage][action] = seconds
        likes[_like(plan, stage)][action].append(seconds)
    traced = []
    for stage, rank in enumerate(plan.schedule.stage_rank):
        like = likes[_like(plan, stage)]
        if not like:
            raise SpecError(
                f"launcher.compute=traced: no traced rank has a stage like stage {stage} "
                f"(trace it with launcher.pipeline_ranks=[0,{rank},-1])"
            )
        medians = {action: median(seconds) for action, seconds in like.items()}
        traced.append(own.get(stage, medians))
    return traced


def _like(plan: Plan, stage: int) -> Like:
    first, last = plan.cuts[stage], plan.cuts[stage + 1]
    embedding, head = first == 0, last == plan.shape.num_pieces
    return last - first - embedding - head, first % 1, embedding, head
