"""Durations of compute that a lone rank measured, in the place of the cost model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.launch.points import Point, records_of
from benchmarks.record import RunRecord
from benchmarks.spec import SpecError
from zeropp.cost.price import PlanPrice
from zeropp.plan import Plan
from zeropp.schedule.program import StageCost

Like = tuple[int, bool, bool]  # what makes stages alike: blocks, embedding, head


def traced_record(point: Point, runs_dir: Path) -> RunRecord:
    """The newest record of a point's compute; raises SpecError where there is none, or where it
    lacks the like of one of the plan's stages."""
    found = [
        record
        for record in records_of(point.spec, runs_dir)
        if record.status == "ok" and record.predicted.get("compute_s")
    ]
    if not found:
        raise SpecError(
            f"launcher.compute=traced: {runs_dir} has no record of {point.spec.spec_id} with "
            "compute times (run it with launcher=trace launcher.tensors=real)"
        )
    if point.plan is not None:
        _by_likeness(point.plan, found[-1].predicted["compute_s"])
    return found[-1]


def traced_stages(
    plan: Plan, price: PlanPrice, compute_s: Mapping[str, float]
) -> tuple[StageCost, ...]:
    """Stage costs with traced compute; collectives and transfers stay the cost model's.

    ``compute_s``: seconds by stage and action (``3F``), of some stages; the others take those of
    a stage with the same pieces. A full backward is split as the model splits it. Tensor-parallel
    collectives are added: a lone rank's take no time. Raises SpecError on a stage without a like.
    """
    likes = _by_likeness(plan, compute_s)
    return tuple(
        _replaced(cost, likes[_like(plan, stage)], price.tp_s[stage])
        for stage, cost in enumerate(price.stages)
    )


def _replaced(cost: StageCost, traced: Mapping[str, float], tp_s: tuple[float, float]) -> StageCost:
    """``traced`` by action; what it lacks (FSDP2's embedding has no backward to see) stays."""
    durations = {}
    if "F" in traced:
        durations["forward"] = traced["F"] + tp_s[0]
    if "I" in traced and "W" in traced:
        durations["backward_input"] = traced["I"] + tp_s[1]
        durations["backward_weight"] = traced["W"]
    elif "B" in traced:
        backward = traced["B"] + tp_s[1]
        share = cost.backward_input / (cost.backward_input + cost.backward_weight)
        durations["backward_input"] = share * backward
        durations["backward_weight"] = (1 - share) * backward
    return replace(cost, **durations)


def _by_likeness(plan: Plan, compute_s: Mapping[str, float]) -> dict[Like, dict[str, float]]:
    likes: dict[Like, dict[str, float]] = {}
    for name, seconds in compute_s.items():
        likes.setdefault(_like(plan, int(name[:-1])), {})[name[-1]] = seconds
    for stage, rank in enumerate(plan.schedule.stage_rank):
        if _like(plan, stage) not in likes:
            raise SpecError(
                f"launcher.compute=traced: no traced rank holds a stage like stage {stage} "
                f"(trace it with launcher.pipeline_ranks=[0,{rank},-1])"
            )
    return likes


def _like(plan: Plan, stage: int) -> Like:
    first, last = plan.cuts[stage], plan.cuts[stage + 1]
    embedding, head = first == 0, last == plan.shape.num_pieces
    return last - first - embedding - head, embedding, head
