"""A user's layers become stages: the plan of a step, and the layers that this rank has of it.

Nothing here has a price: layers weigh what the caller says, or as many parameters as they have, and
a step has the order for equal durations. Where a cluster is named, ``zeropp.train.auto`` plans the
step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from zeropp.engine.engine import shapes_of
from zeropp.engine.layers.values import may_have_gradient
from zeropp.engine.settings import ParameterName, Settings
from zeropp.engine.walk import Layer, LayerSizes, check_values
from zeropp.schedule.cuts import cut_layers
from zeropp.schedule.plan import Plan, SizedPlan
from zeropp.schedule.step_plan import drafts, size_step
from zeropp.types.layout import InfeasibleError
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

if TYPE_CHECKING:
    from zeropp.engine.update.users_optimizer import Trial


def plan_layers(settings: Settings, sizes: Sequence[LayerSizes]) -> Plan:
    """The plan of a step without a cluster: the one that was given, or stages of about equal
    weight in the order for equal durations.

    Raises InfeasibleError where the plan is not for this many layers or for other tied ones, or
    where batch and layers do not go together with the degrees.
    """
    whole = whole_groups(settings, sizes)
    if settings.plan is None:
        parameters = [max(1, layer.parameters) for layer in sizes]
        sized = cut_plan(size_layers(settings, sizes, whole), settings, parameters)
        return next(drafts(sized)).complete()
    if settings.plan.cuts[-1] != len(sizes):
        raise InfeasibleError(
            f"plan: is for {settings.plan.cuts[-1]} layers, but there are {len(sizes)}"
        )
    tied = tuple(index for index, _ in settings.tied or ())
    if settings.plan.sharing_pieces != tied:
        raise InfeasibleError(
            f"plan: has a parameter shared by the layers {settings.plan.sharing_pieces}, but tied= "
            f"names the layers {tied}"
        )
    if settings.plan.whole_groups != whole:
        raise InfeasibleError(
            f"plan: updates the parameters of the optimizer groups {settings.plan.whole_groups} "
            f"whole, but this optimizer needs it of {whole} (take a plan that was made with it)"
        )
    return settings.plan


def whole_groups(settings: Settings, sizes: Sequence[LayerSizes]) -> tuple[str, ...]:
    """The groups whose parameters the optimizer needs whole; raises InfeasibleError for one that
    cannot update parts of a model."""
    return () if isinstance(settings.optimizer, OptimizerConfig) else trial(settings, sizes).whole


def trial(settings: Settings, sizes: Sequence[LayerSizes]) -> Trial:
    """What a trial of the optimizer shows; raises InfeasibleError as ``whole_groups`` does."""
    from zeropp.engine.update.users_optimizer import try_optimizer

    device, shapes = torch.device(settings.device or "cpu"), shapes_of(settings, sizes)
    return try_optimizer(settings.optimizer, shapes, device, elementwise=settings.elementwise)


def check_ranks(settings: Settings, num_ranks: int) -> None:
    """Raise InfeasibleError where the degrees do not make up the ranks."""
    layout = settings.layout
    if layout.world != num_ranks:
        context = f"context={layout.context} x " if layout.context > 1 else ""
        raise InfeasibleError(
            f"pp={layout.pp} x shard={layout.shard} x {context}replicate={layout.replicate} = "
            f"{layout.world}: must be the number of ranks, {num_ranks}"
        )


def size_layers(
    settings: Settings, sizes: Sequence[LayerSizes], whole: tuple[str, ...]
) -> SizedPlan:
    """The plan of a step without cuts and without an order of actions; ``whole`` as
    ``whole_groups`` gives it. Raises InfeasibleError as ``plan_layers`` does."""
    layout, cluster = settings.layout, settings.hardware
    if layout.pp * layout.chunks > len(sizes):
        raise InfeasibleError(
            f"chunks={layout.chunks}: {layout.pp} x {layout.chunks} stages, but there are "
            f"{len(sizes)} layers"
        )
    return size_step(
        settings,
        layout,
        shape_of(sizes),
        global_batch=settings.global_batch,
        microbatch_size=settings.microbatch_rows,
        precision=settings.precision,
        hides_collectives=cluster is None or cluster.device.hides_collectives,
        tied_pieces=tuple(index for index, _ in settings.tied or ()),
        whole_groups=whole,
    )


def cut_plan(plan: SizedPlan, settings: Settings, weights: Sequence[float]) -> SizedPlan:
    """The plan with cuts. ``weights`` are the layers' relative costs where the settings have
    none."""
    weights = weights if settings.weights is None else settings.weights
    return replace(plan, cuts=cut_layers(weights, plan.schedule.stage_rank))


def shape_of(sizes: Sequence[LayerSizes]) -> ModelShape:
    """What plans say of a model of a user's layers: their number alone."""
    return ModelShape(
        name="layers", family="gpt", layers=len(sizes),
        hidden=1, heads=1, kv_heads=1, ffn=1, vocab=1, seq=1,
    )  # fmt: skip


def own_layers(
    layers: Sequence[Layer],
    plan: Plan,
    device: torch.device,
    tied: tuple[ParameterName, ParameterName] | None,
) -> dict[int, nn.Module]:
    """The layers of this rank's stages, on its device, by their index in the model. Where ``tied``
    parameters are one object in two stages of this rank, the second gets one of its own, because
    every stage has a copy."""
    held: dict[int, nn.Module] = {}
    for stage in plan.schedule.stages_of(plan.layout.coordinates(dist.get_rank())["pp"]):
        for index in plan.pieces_of(stage):
            layer = layers[index]
            module = layer if isinstance(layer, nn.Module) else layer()
            check_values(module, index)
            tensors = (*module.parameters(), *module.buffers())
            if any(tensor.device != device for tensor in tensors):  # fake tensors cannot be moved
                module.to(device)
            held[index] = module
    ends = [(index, name) for index, name in tied or () if index in held]
    if len({bisect_right(plan.cuts, index) for index, _ in ends}) == 2:
        first, second = (held[index].get_parameter(name) for index, name in ends)
        if first is second:
            index, name = ends[1]
            path, _, attribute = name.rpartition(".")
            copy = nn.Parameter(second.detach().clone(), second.requires_grad)
            setattr(held[index].get_submodule(path), attribute, copy)
    return held


def empty_others(layers: Sequence[Layer], held: Mapping[int, nn.Module]) -> None:
    """Leave the layers that other ranks train NaN and without memory: their first values would look
    like trained ones."""
    own = {id(parameter) for module in held.values() for parameter in module.parameters()}
    for layer in layers:
        for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
            if id(parameter) not in own and may_have_gradient(parameter.dtype):
                parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.shape)
