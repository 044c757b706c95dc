"""Cuts a list of layers into pipeline stages, and plans in which order every rank runs its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from zeropp.arguments import Request
from zeropp.contender.contender import ZeroppKnobs
from zeropp.cost import cut_by_weight
from zeropp.engine.options import Piece
from zeropp.engine.values import TensorShape
from zeropp.engine.walk import Layer, LayerSizes, check_values
from zeropp.layer_costs import layer_costs, stage_costs
from zeropp.layout import InfeasibleError, Layout, most_microbatches
from zeropp.literals import Precision, if_auto
from zeropp.schedule import validate
from zeropp.schedule.build import StepSizes, step_programs
from zeropp.schedule.program import Schedule, StageCost
from zeropp.schedule.zeropp_order import unit_size


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A list of layers that is cut into stages, and the tensors that pass between stages."""

    layout: Layout
    schedule: Schedule
    cuts: tuple[int, ...]
    sizes: Sequence[LayerSizes]  # of every layer
    precision: Precision
    activation_cap: int  # live chunk-activations per rank

    def boundary(self, stage: int) -> list[TensorShape]:
        """The tensors that one microbatch sends into a stage."""
        return [
            TensorShape(output.size, torch.bfloat16)
            if self.precision == "bf16" and output.dtype.is_floating_point
            else output
            for output in self.sizes[self.cuts[stage] - 1].outputs
        ]

    def pieces(self, layers: Sequence[Layer], device: torch.device) -> list[Piece]:
        """This rank's layers, as pieces for the engine."""
        pieces = []
        for stage in self.schedule.stages_of(self.layout.coordinates(dist.get_rank())["pp"]):
            for index in range(self.cuts[stage], self.cuts[stage + 1]):
                layer = layers[index]
                module = layer if isinstance(layer, nn.Module) else layer()
                check_values(module, index)
                module = module.to(device)
                pieces.append(Piece(index, stage, module, deferrable=0 < index < len(layers) - 1))
        return pieces

    def describe(self, request: Request) -> str:
        """Degrees and knobs that were asked for or chosen, and layers per stage, in one line."""
        layout, order = self.layout, self.schedule
        recompute = if_auto(request.knobs.recompute, "none")
        counts = " ".join(str(end - begin) for begin, end in pairwise(self.cuts))
        return (
            f"pp={layout.pp} shard={layout.shard} replicate={layout.replicate} "
            f"chunks={layout.chunks} unit={order.unit} activation_cap={self.activation_cap} "
            f"recompute={recompute}; {order.num_microbatches} microbatches, layers per stage: "
            f"{counts}" + (f"; {request.chosen}" if request.chosen else "")
        )

    def rows(self, global_batch: int) -> slice:
        """This rank's rows of a global batch."""
        count = global_batch // self.layout.dp
        first = count * self.layout.dp_index(dist.get_rank())
        return slice(first, first + count)


def layout_of(knobs: ZeroppKnobs) -> Layout:
    """The degrees that knobs ask for."""
    return Layout(
        pp=if_auto(knobs.pp, 1),
        shard=if_auto(knobs.shard, 1),
        replicate=if_auto(knobs.replicate, 1),
        chunks=if_auto(knobs.chunks, 1),
        replicate_zero=if_auto(knobs.replicate_zero, 0),
        placement=if_auto(knobs.placement, "dp_inner"),
    )


def cut_as(
    request: Request, sizes: Sequence[LayerSizes], global_batch: int, microbatch_size: int
) -> Stages:
    """Cut layers of these sizes into ``pp * chunks`` stages of about equal cost.

    Raises InfeasibleError where degrees, batch or layers do not go together.
    """
    layout = layout_of(request.knobs)
    count = layout.pp * layout.chunks
    if len(sizes) < count:
        raise InfeasibleError(
            f"chunks={layout.chunks}: {layout.pp} x {layout.chunks} stages, but there are "
            f"{len(sizes)} layers"
        )
    microbatches = _microbatches(layout, global_batch, microbatch_size)
    planned = _step_sizes(request, layout, microbatches)
    cuts = cut_by_weight(_weights(request, sizes), count)
    costs = None
    if (conditions := request.conditions()) is not None:
        costs = stage_costs(
            sizes, cuts, stage_rank=planned.stage_rank, layout=layout, given=conditions
        )
    schedule, cap = _schedule(planned, costs), planned.activation_cap
    return Stages(
        layout=layout,
        schedule=schedule,
        cuts=cuts,
        sizes=sizes,
        precision=request.precision,
        activation_cap=cap,
    )


def _weights(request: Request, sizes: Sequence[LayerSizes]) -> list[float]:
    """What layers cost: as the caller says, by their durations, or by their parameters."""
    if request.weights is not None:
        return list(request.weights)
    if (conditions := request.conditions()) is not None:
        return [cost.compute for cost in layer_costs(sizes, conditions)]
    return [max(1, one.parameters) for one in sizes]


def _step_sizes(request: Request, layout: Layout, microbatches: int) -> StepSizes:
    knobs, cluster = request.knobs, request.cluster
    hides = cluster is None or cluster.device.hides_collectives
    unit = unit_size(knobs.unit, layout.pp, microbatches, hides_collectives=hides)
    sizes = StepSizes(
        num_ranks=layout.pp,
        chunks=layout.chunks,
        num_microbatches=microbatches,
        unit=unit,
        activation_cap=if_auto(knobs.activation_cap, unit * layout.chunks),
        split_backward=knobs.split_backward,
        gather=layout.shard > 1 or request.precision == "bf16",
        prefetch=knobs.prefetch,
        reduce_every=if_auto(knobs.reduce_every, "unit"),
    )
    try:
        sizes.check()
    except ValueError as error:
        raise InfeasibleError(f"{error} (or a smaller unit)") from None
    return sizes


def _schedule(sizes: StepSizes, costs: tuple[StageCost, ...] | None) -> Schedule:
    schedule = step_programs(sizes, costs)
    validate(schedule, activation_cap=sizes.activation_cap)
    return schedule


def _microbatches(layout: Layout, global_batch: int, microbatch_size: int) -> int:
    if layout.world != dist.get_world_size():
        raise InfeasibleError(
            f"pp={layout.pp} x shard={layout.shard} x replicate={layout.replicate} = "
            f"{layout.world}: must be the number of ranks, {dist.get_world_size()}"
        )
    slots = layout.dp * microbatch_size
    if global_batch < 1 or global_batch % slots:
        raise InfeasibleError(
            f"global_batch={global_batch}: must be a multiple of {slots}, the sample's "
            f"{microbatch_size} rows x {layout.dp} data-parallel ranks"
        )
    most = most_microbatches(layout.pp * layout.chunks)
    if global_batch // slots > most:
        raise InfeasibleError(
            f"global_batch={global_batch}: must be at most {most * slots}, for {most} microbatches "
            "that can be planned (or take a larger microbatch)"
        )
    return global_batch // slots
