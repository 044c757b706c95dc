"""Layers become stages: the plan of a step for a list of a user's layers, and this rank's part."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from zeropp.cost import cut_by_weight
from zeropp.engine.options import EngineOptions, Piece
from zeropp.engine.values import TensorShape
from zeropp.engine.walk import Layer, LayerSizes, check_values
from zeropp.layer_prices import LayerPrices, LayerState, layer_costs
from zeropp.layout import InfeasibleError, Layout, most_microbatches
from zeropp.literals import if_auto
from zeropp.plan import Plan, SizedPlan
from zeropp.planner import drafts, fastest
from zeropp.schedule import validate
from zeropp.schedule.program import loop_placement, unordered
from zeropp.schedule.zeropp_order import cap_needs, smallest_cap, unit_size
from zeropp.settings import ParameterName, Settings
from zeropp.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A list of layers that is cut into stages by a plan, and what is said of it."""

    plan: Plan
    sizes: Sequence[LayerSizes]  # of every layer
    chosen: str = ""  # what ``auto`` has become, and the estimate behind it

    def boundary(self, stage: int) -> list[TensorShape]:
        """The tensors that one microbatch sends into a stage."""
        return [
            TensorShape(output.size, torch.bfloat16)
            if self.plan.precision == "bf16" and output.dtype.is_floating_point
            else output
            for output in self.sizes[int(self.plan.cuts[stage]) - 1].outputs
        ]

    def pieces(
        self,
        layers: Sequence[Layer],
        device: torch.device,
        tied: tuple[ParameterName, ParameterName] | None,
    ) -> list[Piece]:
        """This rank's layers, as pieces for the engine. Where ``tied`` parameters are one object in
        two stages of this rank, the second gets one of its own, because every stage has a copy."""
        pieces, cuts = [], self.plan.cuts
        rank = self.plan.layout.coordinates(dist.get_rank())["pp"]
        for stage in self.plan.schedule.stages_of(rank):
            for index in range(int(cuts[stage]), int(cuts[stage + 1])):
                layer = layers[index]
                module = layer if isinstance(layer, nn.Module) else layer()
                check_values(module, index)
                module = module.to(device)
                pieces.append(Piece(index, stage, module, deferrable=0 < index < len(layers) - 1))
        held = {piece.index: piece for piece in pieces}
        ends = [(held[index], name) for index, name in tied or () if index in held]
        if len(ends) == 2 and ends[0][0].stage != ends[1][0].stage:
            first, second = (piece.module.get_parameter(name) for piece, name in ends)
            if first is second:
                path, _, name = ends[1][1].rpartition(".")
                own = nn.Parameter(second.detach().clone(), second.requires_grad)
                setattr(ends[1][0].module.get_submodule(path), name, own)
        return pieces

    def engine_options(self, settings: Settings) -> EngineOptions:
        """The engine's options, whose names are those of the settings."""
        ends = [bisect_right(self.plan.cuts, index) - 1 for index, _ in settings.tied or ()]
        return replace(settings.engine_options(), tied_stages=tuple(ends))

    def describe(self) -> str:
        """Degrees and knobs that were asked for or chosen, and layers per stage, in one line."""
        plan, layout, order = self.plan, self.plan.layout, self.plan.schedule
        counts = " ".join(str(int(end - begin)) for begin, end in pairwise(plan.cuts))
        return (
            f"pp={layout.pp} shard={layout.shard} replicate={layout.replicate} "
            f"chunks={layout.chunks} unit={order.unit} activation_cap={plan.activation_cap} "
            f"recompute={plan.recompute}; {order.num_microbatches} microbatches, layers per stage: "
            f"{counts}" + (f"; {self.chosen}" if self.chosen else "")
        )

    def rows(self) -> slice:
        """This rank's rows of a global batch."""
        count = self.plan.num_microbatches * self.plan.microbatch_size
        first = count * self.plan.layout.dp_index(dist.get_rank())
        return slice(first, first + count)


def plan_layers(settings: Settings, sizes: Sequence[LayerSizes]) -> Plan:
    """The plan of a step: stages of about equal cost, and, on a cluster, the faster of the order
    for equal durations and the one planned with theirs.

    Raises InfeasibleError where degrees, batch or layers do not go together.
    """
    world = dist.get_world_size()
    if settings.layout.world != world:
        layout = settings.layout
        raise InfeasibleError(
            f"pp={layout.pp} x shard={layout.shard} x replicate={layout.replicate} = "
            f"{layout.world}: must be the number of ranks, {world}"
        )
    sized = size_layers(settings, sizes)
    if settings.hardware is None:
        plan = next(drafts(sized)).complete()
    else:
        prices = LayerPrices(sizes, [LayerState()] * len(sizes))  # all orders have the same
        price = prices.price(sized, settings.hardware)
        orders = (draft.complete() for draft in drafts(sized, price))
        plan = fastest(orders, settings.hardware, price).plan
    validate(plan.schedule, activation_cap=plan.activation_cap)
    return plan


def size_layers(settings: Settings, sizes: Sequence[LayerSizes]) -> SizedPlan:
    """The plan of a step without its order of actions; raises as ``plan_layers`` does."""
    layout, cluster = settings.layout, settings.hardware
    if layout.pp * layout.chunks > len(sizes):
        raise InfeasibleError(
            f"chunks={layout.chunks}: {layout.pp} x {layout.chunks} stages, but there are "
            f"{len(sizes)} layers"
        )
    microbatches = _microbatches(settings, layout)
    hides = cluster is None or cluster.device.hides_collectives
    unit = unit_size(settings.unit, layout.pp, microbatches, hides_collectives=hides)
    cap = if_auto(settings.activation_cap, unit * layout.chunks)
    if cap < (least := smallest_cap(layout.chunks, microbatches, unit)):
        needs = cap_needs(layout.chunks, unit, least)
        raise InfeasibleError(f"activation_cap={cap}: {needs} (or a smaller unit)")
    placement = loop_placement(layout.pp, layout.chunks)
    plan = SizedPlan(
        contender="zeropp",
        shape=shape_of(sizes),
        layout=layout,
        microbatch_size=len(settings.sample),
        schedule=unordered("zeropp", placement, microbatches, unit),
        cuts=(),
        program="zeropp",
        precision=settings.precision,
        recompute=if_auto(settings.recompute, "none"),
        reduce_every=if_auto(settings.reduce_every, "unit"),
        reduce_dtype=settings.reduce_dtype,
        prefetch=settings.prefetch,
        split_backward=settings.split_backward and layout.pp > 1,  # else there is no bubble
        activation_cap=cap,
        compile=settings.compile,
    )
    weights = _weights(settings, sizes, plan)
    return replace(plan, cuts=cut_by_weight(weights, len(placement)))


def shape_of(sizes: Sequence[LayerSizes]) -> ModelShape:
    """What plans say of a model of a user's layers: their number alone."""
    return ModelShape(
        name="layers", family="gpt", layers=len(sizes),
        hidden=1, heads=1, kv_heads=1, ffn=1, vocab=1, seq=1,
    )  # fmt: skip


def _weights(settings: Settings, sizes: Sequence[LayerSizes], plan: SizedPlan) -> list[float]:
    """What layers cost: as the caller says, by their durations, or by their parameters."""
    if settings.weights is not None:
        return list(settings.weights)
    if (cluster := settings.hardware) is not None:
        costs = layer_costs(sizes, cluster, plan.precision, plan.recompute)
        return [cost.compute for cost in costs]
    return [max(1, one.parameters) for one in sizes]


def _microbatches(settings: Settings, layout: Layout) -> int:
    rows, batch = len(settings.sample), settings.global_batch
    slots = layout.dp * rows
    if batch % slots:
        raise InfeasibleError(
            f"global_batch={batch}: must be a multiple of {slots}, the sample's {rows} rows x "
            f"{layout.dp} data-parallel ranks"
        )
    most = most_microbatches(layout.pp * layout.chunks)
    if batch // slots > most:
        raise InfeasibleError(
            f"global_batch={batch}: must be at most {most * slots}, for {most} microbatches that "
            "can be planned (or take a larger microbatch)"
        )
    return batch // slots
