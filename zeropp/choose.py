"""What ``auto`` stands for: the fastest setting that fits the memory, on a described cluster.

Settings are tried in the order of a lower bound on their step time (all compute, spread evenly over
the pipeline ranks, and the reduction over the replicas). The search ends when that bound is not
below the best step time so far. The step time of a setting is that of its order in the event loop,
gathers and reductions included, what these take from compute, and the reduction over the replicas.
Memory is the sum of fp32 masters, gradient sums and what the given optimizer keeps (sharded, and
with ZeRO-1 divided over the replicas), of gathered chunks, of one chunk's unreduced gradients, and
of what layers keep of as many microbatches as the activation cap allows. Selective recomputation is
counted like none, which gives an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import TypeVar

import torch
from torch import nn

from zeropp.arguments import Request
from zeropp.contender.contender import ZeroppKnobs
from zeropp.cost.communication import all_reduce_s, group_of
from zeropp.cost.kernels import element_bytes
from zeropp.cut import Stages, cut_as, layout_of
from zeropp.engine.optimizer import state_bytes
from zeropp.engine.walk import LayerSizes, ParameterKind
from zeropp.layer_costs import Conditions, output_bytes, stage_costs
from zeropp.layout import InfeasibleError, Layout, divisors
from zeropp.literals import Auto, Recompute
from zeropp.schedule import event_loop
from zeropp.schedule.program import Op, Schedule, StageCost

_CHUNKS = (1, 2, 4)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained: the layers, what they keep for their backward, and the batch."""

    sizes: Sequence[LayerSizes]
    saved: Sequence[int]  # bytes per layer and microbatch, in fp32
    world: int
    global_batch: int
    microbatch_size: int


def choose(request: Request, job: Job) -> Request:
    """The request with everything set that was asked for as ``auto``.

    Raises InfeasibleError where no cluster was named, where no setting makes up the ranks and the
    batch, or where none fits.
    """
    asked = ", ".join(sorted(request.open))
    if request.cluster is None:
        raise InfeasibleError(
            f"{asked}='auto': needs cluster=, whose rates and memory decide (or give a value)"
        )
    waiting = sorted(_candidates(request, job), key=lambda pair: pair[0])
    best, best_s, too_large, refused = None, float("inf"), 0, ""
    device_bytes, layers = request.cluster.device.usable_bytes, _bytes_of_layers(request, job)
    for bound_s, candidate in waiting:
        if bound_s >= best_s:
            break
        try:
            stages = cut_as(candidate, job.sizes, job.global_batch, job.microbatch_size)
        except InfeasibleError as error:
            refused = str(error)
            continue
        conditions = candidate.conditions()
        assert conditions is not None
        peak_bytes = _peak_bytes(stages, candidate.knobs, job, layers=layers, given=conditions)
        if peak_bytes > device_bytes:
            too_large += 1
            continue
        step_s = _step_s(stages, conditions)
        if step_s < best_s:
            found = f"{asked} chosen: estimated {step_s:.3g} s per step and "
            found += f"{peak_bytes / 2**30:.3g} of {device_bytes / 2**30:.3g} usable GiB"
            best, best_s = replace(candidate, chosen=found), step_s
    if best is None:
        raise InfeasibleError(f"{asked}='auto': {_why_none(job, too_large, refused)}")
    return replace(best, open=frozenset())


def _why_none(job: Job, too_large: int, refused: str) -> str:
    """Why no setting is left; ``refused`` is what the last one that cannot be cut said."""
    if too_large:
        return f"{too_large} settings need more memory than a device has"
    if refused:
        return f"no setting can be cut; the last one: {refused}"
    return f"no degrees make up {job.world} ranks and a batch of {job.global_batch} rows"


def _candidates(request: Request, job: Job) -> Iterator[tuple[float, Request]]:
    """All settings whose degrees divide the ranks and the batch, each with a lower bound on its
    step time in seconds."""
    asked = request.knobs
    degrees = divisors(job.world)
    for pp, shard in product(
        _options(request, "pp", asked.pp, degrees), _options(request, "shard", asked.shard, degrees)
    ):
        assert pp != "auto"
        assert shard != "auto"
        replicate = job.world // (pp * shard)
        slots = shard * replicate * job.microbatch_size
        if pp * shard * replicate != job.world or job.global_batch % slots:
            continue
        if asked.replicate not in ("auto", replicate):
            continue
        microbatches = job.global_batch // slots
        units = {min(microbatches, unit) for unit in (pp, 2 * pp, microbatches)}
        for chunks, unit, recompute in product(
            _options(request, "chunks", asked.chunks, _CHUNKS),
            _options(request, "unit", asked.unit, sorted(units)),
            _options(request, "recompute", asked.recompute, _RECOMPUTE),
        ):
            knobs = replace(
                asked, pp=pp, shard=shard, replicate=replicate, chunks=chunks, unit=unit,
                recompute=recompute,
            )  # fmt: skip
            candidate = replace(request, knobs=knobs)
            layout = layout_of(knobs)
            if layout.pp * layout.chunks <= len(job.sizes):
                yield _bound_s(candidate, job, microbatches), candidate


def _options(request: Request, name: str, asked: T | Auto, known: Iterable[T]) -> list[T | Auto]:
    """The values to try for one knob: all of ``known`` if it was asked for as ``auto``, otherwise
    the given one."""
    return list(known) if name in request.open else [asked]


def _bound_s(candidate: Request, job: Job, microbatches: int) -> float:
    """A lower bound on the step time in seconds: all layers' compute, spread evenly over the
    pipeline ranks, and the reduction over the replicas."""
    conditions = candidate.conditions()
    assert conditions is not None
    layout = layout_of(candidate.knobs)
    (whole,) = stage_costs(
        job.sizes, (0, len(job.sizes)), stage_rank=(0,), layout=layout, given=conditions
    )
    return whole.compute * microbatches / layout.pp + _replicas_s(layout, job.sizes, conditions)


def _replicas_s(layout: Layout, sizes: Sequence[LayerSizes], given: Conditions) -> float:
    parameters = sum(one.parameters for one in sizes) / (layout.pp * layout.shard)
    return all_reduce_s(given.cluster, group_of(given.cluster, layout, "replicate"), 4 * parameters)


def _step_s(stages: Stages, given: Conditions) -> float:
    schedule, layout = stages.schedule, stages.layout
    costs = stage_costs(
        stages.sizes, stages.cuts, stage_rank=schedule.stage_rank, layout=layout, given=given
    )
    found = event_loop.run(schedule, costs).step_s + _slowed_s(schedule, costs, given)
    return found + _replicas_s(layout, stages.sizes, given)


def _slowed_s(schedule: Schedule, costs: Sequence[StageCost], given: Conditions) -> float:
    """By how much collectives make the compute beside them longer, on the rank with the most."""
    most = 0.0
    for rank, collectives in enumerate(schedule.collectives):
        beside = sum(
            costs[stage].unshard if op is Op.UNSHARD else costs[stage].reduce_grad
            for stage, op, _ in collectives
        )
        mine = sum(costs[stage].compute for stage in schedule.stages_of(rank))
        most = max(most, min(beside, schedule.num_microbatches * mine))
    return given.cluster.device.overlap_slowdown * most


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes of one layer's fp32 parameters, of their gradients (frozen parameters have none), and
    of what the optimizer keeps for them."""

    masters: float
    sums: float
    state: float

    def __add__(self, other: _LayerBytes) -> _LayerBytes:
        return _LayerBytes(
            self.masters + other.masters, self.sums + other.sums, self.state + other.state
        )


def _bytes_of_layers(request: Request, job: Job) -> list[_LayerBytes]:
    """The bytes of every layer; what the optimizer keeps depends on each parameter's group."""
    groups = [
        {
            name: request.group_of((index, name), _meta(kind))
            for name, kind in one.kinds.items()
            if kind.trained
        }
        for index, one in enumerate(job.sizes)
    ]
    kept = state_bytes(request.optimizer, sorted({g for one in groups for g in one.values()}))
    found = []
    for one, group in zip(job.sizes, groups, strict=True):
        counts = {name: prod(kind.shape) for name, kind in one.kinds.items()}
        sums = sum(4 * counts[name] for name in group)
        state = sum(kept[group[name]] * counts[name] for name in group)
        found.append(_LayerBytes(4 * one.parameters, sums, state))
    return found


def _meta(kind: ParameterKind) -> nn.Parameter:
    return nn.Parameter(torch.empty(kind.shape, dtype=kind.dtype, device="meta"))


def _peak_bytes(
    stages: Stages,
    knobs: ZeroppKnobs,
    job: Job,
    *,
    layers: Sequence[_LayerBytes],
    given: Conditions,
) -> float:
    """The largest estimate of any pipeline rank."""
    return max(
        _rank_bytes(
            stages,
            stages.schedule.stages_of(rank),
            knobs=knobs,
            job=job,
            layers=layers,
            given=given,
        )
        for rank in range(stages.layout.pp)
    )


def _rank_bytes(
    stages: Stages,
    mine: Sequence[int],
    *,
    knobs: ZeroppKnobs,
    job: Job,
    layers: Sequence[_LayerBytes],
    given: Conditions,
) -> float:
    layout, width = stages.layout, element_bytes(given.precision)
    spans = [list(pairwise(stages.cuts))[stage] for stage in mine]
    chunks = [sum(layers[a:b], _LayerBytes(0, 0, 0)) for a, b in spans]
    parameters = [chunk.masters / 4 for chunk in chunks]
    gathers = layout.shard > 1 or given.precision == "bf16"
    ahead = sorted(parameters)[-1 - knobs.prefetch :]
    gathered = width * sum(ahead) if gathers else 0
    alive = stages.activation_cap * max(_kept_bytes(job, a, b, given) for a, b in spans)
    last = 2 * 4 * output_bytes(job.sizes[-1], given.precision) / width  # of the loss, in fp32
    unreduced = max(chunk.sums for chunk in chunks)
    return _sharded_bytes(chunks, layout, given) + gathered + unreduced + alive + last


def _sharded_bytes(chunks: Sequence[_LayerBytes], layout: Layout, given: Conditions) -> float:
    """Masters, gradient sums and the optimizer's state on one rank."""
    whole = sum(chunks, _LayerBytes(0, 0, 0))
    rows = layout.replicate if layout.replicate_zero else 1
    masters = whole.masters / rows if given.precision == "bf16" else whole.masters
    copied = whole.masters / 2 if given.precision == "bf16" and rows > 1 else 0.0  # in bf16
    return (masters + copied + whole.sums + whole.state / rows) / layout.shard


def _kept_bytes(job: Job, begin: int, end: int, given: Conditions) -> float:
    """What a stage keeps of one microbatch; recomputed layers keep their inputs alone."""
    share = element_bytes(given.precision) / 4
    if given.recompute != "full":
        return share * sum(job.saved[begin:end])
    inputs = sum(output_bytes(job.sizes[i - 1], given.precision) for i in range(max(begin, 1), end))
    return inputs + share * max(job.saved[begin:end])
