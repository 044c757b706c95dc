"""Cuts a list of layers into pipeline stages, and plans in which order every rank runs its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.arguments import Request
from zeropp.contender.knobs import ZeroppKnobs
from zeropp.cost import cut_by_weight
from zeropp.engine.options import Piece
from zeropp.engine.trial import Layer, LayerSizes, try_layers
from zeropp.engine.values import TensorShape
from zeropp.layout import InfeasibleError, Layout, most_microbatches
from zeropp.literals import Precision, StageStyle, if_auto
from zeropp.schedule import validate
from zeropp.schedule.build import StepSizes, step_programs
from zeropp.schedule.program import Schedule
from zeropp.schedule.zeropp_order import default_cap, default_unit


@dataclass(frozen=True)
class Stages:
    """A list of layers that is cut into stages, and the tensors that pass between stages."""

    layout: Layout
    schedule: Schedule
    cuts: tuple[int, ...]
    sizes: Sequence[LayerSizes]  # of every layer
    precision: Precision

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
                module = (layer if isinstance(layer, nn.Module) else layer()).to(device)
                pieces.append(Piece(index, stage, module, 0 < index < len(layers) - 1))
        return pieces

    def rows(self, global_batch: int) -> slice:
        """This rank's rows of a global batch."""
        count = global_batch // self.layout.dp
        first = count * self.layout.dp_index(dist.get_rank())
        return slice(first, first + count)


def cut(layers: Sequence[Layer], request: Request, sample: Tensor, global_batch: int) -> Stages:
    """Cut layers into ``pp * chunks`` stages of about equal cost; raises InfeasibleError."""
    knobs = request.knobs
    layout = Layout(
        pp=if_auto(knobs.pp, 1),
        shard=if_auto(knobs.shard, 1),
        replicate=if_auto(knobs.replicate, 1),
        chunks=if_auto(knobs.chunks, 1),
        replicate_zero=if_auto(knobs.replicate_zero, 0),
        placement=if_auto(knobs.placement, "dp_inner"),
    )
    count = layout.pp * layout.chunks
    if len(layers) < count:
        raise InfeasibleError(
            f"chunks={layout.chunks}: {layout.pp} x {layout.chunks} stages, but there are "
            f"{len(layers)} layers"
        )
    microbatches = _microbatches(layout, global_batch, sample.shape[0])
    schedule = _schedule(layout, knobs, microbatches, request.precision)
    sizes = try_layers(layers, sample, request.sample_keywords)
    weights = request.weights
    costs = list(weights) if weights is not None else [max(1, s.parameters) for s in sizes]
    return Stages(layout, schedule, cut_by_weight(costs, count), sizes, request.precision)


def _schedule(
    layout: Layout, knobs: ZeroppKnobs, microbatches: int, precision: Precision
) -> Schedule:
    style: StageStyle = "loop" if knobs.stage_style == "auto" else knobs.stage_style
    sharded = layout.shard > 1 or precision == "bf16"
    unit = min(if_auto(knobs.unit, default_unit(style, layout.pp, microbatches)), microbatches)
    cap = if_auto(knobs.activation_cap, default_cap(style, layout.pp, layout.chunks, unit))
    sizes = StepSizes(
        num_ranks=layout.pp,
        chunks=layout.chunks,
        num_microbatches=microbatches,
        unit=unit,
        activation_cap=cap,
        stage_style=style,
        split_backward=knobs.split_backward,
        gather=sharded,
        prefetch=knobs.prefetch,
        keep=if_auto(knobs.keep, 0),
        reduce_every=if_auto(knobs.reduce_every, "unit"),
    )
    try:
        (schedule,) = step_programs(sizes)
    except ValueError as error:
        raise InfeasibleError(f"{error} (or a smaller unit)") from None
    validate(schedule, activation_cap=cap)
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
