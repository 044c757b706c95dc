"""Traces points: runs the contender's own code for a few ranks of a job, each without its peers.

The records have provenance ``traced``. With fake tensors they have the exact bytes that the code
allocates, and no times. With real tensors they have the allocator's peaks, the durations of compute
actions, and a profiler trace per rank beside the record. In neither case is there a step time,
because network and waiting for peers are missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.launch.attempt import close_abandoned, plan_summary
from benchmarks.launch.local import is_here, preload, run_attempt
from benchmarks.launch.options import TraceOptions
from benchmarks.launch.points import Point, records_of
from benchmarks.launch.running import SweepProgress, one_by_one, without_ranks
from benchmarks.records.lone import is_of_one_gpu, read_lone
from benchmarks.records.record import RunRecord
from benchmarks.records.simulated import predicted_memory
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from zeropp.price.plan_price import PlanPrice, StageExtras
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import StageCost

if TYPE_CHECKING:
    from zeropp.emulate.trace import Trace
    from zeropp.types.training import OptimizerConfig

Like = tuple[int, bool, bool]  # what makes stages alike: blocks, embedding, head


class TracedCompute(NamedTuple):
    """The seconds of compute actions by stage and kind (``3F``), and where they are from."""

    seconds: Mapping[str, float]
    source: str


def traced_compute(spec: RunSpec, plan: Plan, folder: Path) -> TracedCompute:
    """The newest compute times of exactly this plan, of records or of a folder of ``scripts/gpu``.
    Raises SpecError if there are none, or if they have no stage with the same pieces for one of the
    plan's stages."""
    found = [
        TracedCompute(record.predicted["compute_s"], record.record_id)
        for record in records_of(spec, folder)
        if record.status == "ok"
        and record.predicted.get("compute_s")
        and _without_memory(record.plan) == _without_memory(plan_summary(plan))
    ]
    if not found and is_of_one_gpu(folder):
        found = [
            TracedCompute(one.compute_s, f"{folder}: {one.name}")
            for one in read_lone(folder)
            if one.spec and one.compute_s and _trained(one.spec) == _trained(spec)
        ]
    if not found:
        raise SpecError(
            f"launcher.compute=traced: {folder} has no record of {spec.spec_id}, planned as it "
            "is today, with compute times (run it with launcher=trace launcher.tensors=real)"
        )
    _by_stage(plan, found[-1].seconds)
    return found[-1]


def _trained(spec: RunSpec) -> tuple[object, ...]:
    """What of a spec the compute of a rank depends on; the prices of its cluster do not count."""
    job = (spec.cluster.name, spec.num_gpus, spec.global_batch, spec.microbatch_size)
    return (*job, spec.model, spec.contender, spec.precision)


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
    durations: dict[str, Any] = {}
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
    pieces = plan.pieces_of(stage)
    return plan.blocks[stage], 0 in pieces, plan.shape.num_pieces - 1 in pieces


def check(points: Sequence[Point], options: TraceOptions) -> None:
    """Raise SpecError for points that cannot run without peers, and for pipeline ranks that a plan
    does not have."""
    ranks = options.pipeline_ranks
    if not ranks:
        raise SpecError("launcher.pipeline_ranks=[]: must name pipeline ranks (try [0,-1])")
    for point in points:
        cluster, is_real = point.spec.cluster, options.tensors == "real"
        if is_real and not is_here(cluster.device):
            raise SpecError(
                f"cluster={cluster.name}: launcher.tensors=real needs that GPU here and none is "
                "found (use launcher.tensors=fake, or cluster=cpu_gloo)"
            )
        if not is_real and point.plan is not None and point.plan.compile:
            raise SpecError(
                "contender.compile=true: launcher=trace cannot compile with fake tensors (use "
                "false, or launcher.tensors=real)"
            )
        pp = point.plan.layout.pp if point.plan is not None else max(map(abs, ranks)) + 1
        for rank in ranks:
            if not -pp <= rank < pp:
                raise SpecError(
                    f"launcher.pipeline_ranks={rank}: {point.spec.spec_id} has {pp} pipeline "
                    f"ranks (try 0 to {pp - 1}, or -1 for the last)"
                )


def settle(runs_dir: Path) -> dict[str, str]:
    """Record the attempts whose launcher is dead. No point is under way: the folder is locked, and
    what others measure is no trace."""
    close_abandoned(runs_dir)
    return {}


def launch(
    points: Sequence[Point], options: TraceOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Trace every point: with fake tensors one rank per core at a time, with real ones one rank at
    a time."""

    def run(point: Point) -> RunRecord:
        assert point.plan is not None  # infeasible points never reach a launcher
        pipeline = point.plan.layout.pipeline(0)
        chosen = sorted({rank % len(pipeline) for rank in options.pipeline_ranks})
        ranks = [pipeline[index] for index in chosen]
        if options.tensors == "real":
            return run_attempt(
                point,
                launcher="trace",
                worlds=[[rank] for rank in ranks],
                runs_dir=runs_dir,
                progress=progress,
                variant=options.variant,
                arguments=["--lone"],
            )
        return without_ranks(point, "trace", runs_dir, partial(_traced, point, ranks, progress))

    if options.tensors == "real":
        preload(points)
    return one_by_one(points, "trace", progress, run)


def _traced(point: Point, ranks: Sequence[int], progress: SweepProgress) -> dict[str, Any]:
    """Trace some ranks with fake tensors; returns what their record has."""
    assert point.plan is not None

    def tell(done: int) -> None:
        progress.update(point, f"traced {done} of {len(ranks)} ranks")

    progress.update(point, f"tracing {len(ranks)} ranks")
    traces = trace_plan(point.plan, ranks, point.spec.optimizer, tell)
    memory = predicted_memory([trace.memory for trace in traces])
    return {"predicted": memory | {"ranks": ranks, "trace_s": [t.seconds for t in traces]}}


def trace_plan(
    plan: Plan,
    ranks: Sequence[int],
    optimizer: OptimizerConfig,
    tell: Callable[[int], None] = lambda _: None,
    *,
    steps: int = 1,
) -> list[Trace]:
    """Trace some ranks of a plan with fake tensors; ``tell`` is called with how many are traced."""
    from zeropp.emulate.trace import trace_ranks

    program = CONTENDERS[plan.contender]
    traces: list[Trace] = []
    for trace in trace_ranks(plan, ranks, optimizer=optimizer, program=program, steps=steps):
        traces.append(trace)
        tell(len(traces))
    return traces
