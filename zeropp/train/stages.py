"""A user's layers become stages: the plan of a step, and the layers that this rank has of it.

Nothing here has a price: layers weigh what the caller says, or as many parameters as they have, and
a step has the order for equal durations. Where a cluster is named, ``zeropp.train.auto`` plans the
step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zeropp.engine.layers.values import keywords_of, said_of, takes_all
from zeropp.engine.ranks.errors import gathered, together
from zeropp.engine.ranks.given_rows import checksum
from zeropp.engine.settings import ParameterName, Settings
from zeropp.engine.update.update_rules import GroupUse, uses_of
from zeropp.engine.walk import Layer, LayerSizes, check_values, made_layer, walk
from zeropp.schedule.cuts import cut_layers
from zeropp.schedule.plan import Plan, SizedPlan
from zeropp.schedule.step_plan import drafts, size_step
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import if_auto
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig


class Planned(NamedTuple):
    """The plan of a step, one line about what ``auto`` has become, and the MFU of a step at one
    element of the inputs per second, where a cluster is named."""

    plan: Plan
    chosen: str = ""
    element_mfu: float | None = None


def measure(
    layers: Sequence[Layer], settings: Settings, *, auto: frozenset[str]
) -> list[LayerSizes]:
    """The sizes of all layers, with what they compute where that is priced."""
    recorder = None
    if auto or settings.hardware is not None:
        from zeropp.emulate.recorder import Recorder

        recorder = Recorder
    return walk(
        layers,
        *settings.microbatch,
        if_auto(settings.recompute, "full"),
        recorder=recorder,
        measure_saved=bool(auto),
        tied=settings.tied,
        context=settings.slicing,
        group_of=settings.group_of,
    )


def check_sizes(sizes: Sequence[LayerSizes], settings: Settings, loss_fn: Any) -> None:
    """Raise InfeasibleError for keyword inputs that nothing takes, that no step can be given, or
    with other rows than the sample; for parameters of 16 bits where layers compute in fp32; for
    tied ones that do not exist or differ in kind; for layers that draw random numbers without a
    seed, as what is recomputed would have others; and as ``_check_slices`` says."""
    _check_slices(sizes, settings, loss_fn)
    given, tied, rows = settings.sample_keywords, settings.tied, len(settings.sample)
    known = keywords_of(loss_fn).union(*(layer.names for layer in sizes))
    for name, value in given.items():
        if name in ("inputs", "targets", "outputs"):
            raise InfeasibleError(f"sample_keywords: {name!r} is an argument of every step itself")
        if name not in known and not takes_all(loss_fn):
            raise InfeasibleError(
                f"sample_keywords: {name!r} is named by no layer's forward and not by the loss "
                "function (leave it out, or add a parameter of that name)"
            )
        if not value.dim() or len(value) != rows:
            raise InfeasibleError(
                f"sample_keywords: {name!r} has shape {tuple(value.shape)}, but one row for each "
                f"of the sample's {rows} is needed in dimension 0 (expand it)"
            )
        tokens = settings.sample.numel(), settings.sample[:1].numel()
        is_list = value.dim() == 1 and not value.is_floating_point() and not value[0]
        if is_list and int(value[-1]) in tokens and bool((value.diff() > 0).all()):
            raise InfeasibleError(
                f"sample_keywords: {name!r} has offsets of packed rows, and every microbatch "
                "would get a part (give position_ids [rows, length] that begin again with each "
                "document)"
            )
    for index, layer in enumerate(sizes):
        for name, kind in layer.kinds.items():
            narrow = kind.dtype.is_floating_point and kind.dtype.itemsize < 4
            if settings.precision == "fp32" and narrow:
                raise InfeasibleError(
                    f"layers[{index}]: {name!r} is {kind.dtype}, but precision='fp32' computes in "
                    "fp32 (call .float() on the layers; for bf16 ask for precision='bf16', too)"
                )
    for index, name in tied or ():
        if name not in sizes[index].kinds:
            raise InfeasibleError(f"tied={tied}: layers[{index}] has no parameter {name!r}")
    ends = [sizes[index].kinds[name] for index, name in tied or ()]
    if ends and ends[0] != ends[1]:
        raise InfeasibleError(
            f"tied={tied}: the first is {ends[0]}, but the second {ends[1]}; both must have the "
            "same shape and type, and both be trained or frozen"
        )
    draws = [layer.draws for layer in sizes]
    if settings.dropout_seed is None and any(draws):
        raise InfeasibleError(
            f"dropout_seed=None: layers[{draws.index(True)}] draws random numbers (give a seed)"
        )


def _check_slices(sizes: Sequence[LayerSizes], settings: Settings, loss_fn: Any) -> None:
    """Raise InfeasibleError for a loss, or a last layer, that needs all tokens at once."""
    slices, context = settings.logits_slices, settings.layout.context
    if max(slices, context) > 1 and said_of(loss_fn, "shifts"):
        raise InfeasibleError(
            f"loss_fn: shifts labels, which logits_slices={slices} and context={context} divide "
            "(give targets that are shifted, and a loss that does not shift them)"
        )
    if slices == 1:
        return
    if settings.loss_reduction == "mean":
        raise InfeasibleError(
            f"logits_slices={slices}: a mean of means counts the tokens of some slices more (let "
            "loss_fn give a sum and a count with loss_reduction='tokens', or its sum with 'sum')"
        )
    tokens = settings.microbatch[0].shape[:2]
    passed = [x.size[:2] for layer in sizes[-2:] for x in layer.outputs]
    if len(tokens) < 2 or any(size != tokens for size in passed):
        raise InfeasibleError(
            f"logits_slices={slices}: inputs are {tuple(tokens)}, what the last layer gets and "
            f"gives {[tuple(size) for size in passed]}; all must be [rows, tokens, ...]"
        )
    if sizes[-1].draws:
        raise InfeasibleError(
            f"logits_slices={slices}: layers[{len(sizes) - 1}] draws random numbers, and slices "
            "would draw others than all tokens at once (drop in the layer before it, or take 1)"
        )


def plan_layers(settings: Settings, sizes: Sequence[LayerSizes], num_ranks: int) -> Planned:
    """The plan of a step without a cluster: the one that was given, or stages of about equal
    weight in the order for equal durations.

    Raises InfeasibleError where the plan is not for this many ranks or layers or for other tied
    ones, or where batch and layers do not go together with the degrees.
    """
    check_ranks(settings, num_ranks)
    whole = whole_groups(group_uses(settings, sizes))
    if settings.plan is None:
        parameters = [max(1, layer.parameters) for layer in sizes]
        sized = cut_plan(size_layers(settings, sizes, whole), settings, parameters)
        return Planned(next(drafts(sized)).complete())
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
    return Planned(settings.plan)


def group_uses(settings: Settings, sizes: Sequence[LayerSizes]) -> dict[str, GroupUse]:
    """What the optimizer does with its groups; raises InfeasibleError for what makes none."""
    shapes: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for kind in (kind for layer in sizes for kind in layer.kinds.values() if kind.trained):
        shapes[kind.group].append(kind.shape)
    asked = settings.optimizer
    if isinstance(asked, OptimizerConfig):
        return dict.fromkeys(shapes, GroupUse(False, 0 if asked.kind == "sgd" else 2))
    uses = uses_of(asked, shapes, torch.device(settings.device or "cpu"))
    return {
        n: use._replace(whole=use.whole and not settings.elementwise) for n, use in uses.items()
    }


def whole_groups(uses: Mapping[str, GroupUse]) -> tuple[str, ...]:
    """The groups whose parameters the optimizer gets whole."""
    return tuple(name for name, use in uses.items() if use.whole)


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
    plan = replace(plan, cuts=cut_layers(weights, plan.schedule.stage_rank))
    sent = settings.offload_blocks
    return replace(plan, offloaded=plan.spread_over_ranks(sent)) if sent else plan


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
    """The layers of this rank's stages, on its device, by their index in the model; refuses ranks
    that hold the same layer with other values. All ranks must call it."""

    seed = gathered(torch.initial_seed())[0]

    def made() -> tuple[dict[int, nn.Module], dict[int, dict[str, object]]]:
        held = _held(layers, plan, device, tied, seed)
        return held, {index: _values(index, layer) for index, layer in held.items()}

    held, own = together(made)
    first: dict[int, tuple[int, dict[str, object]]] = {}
    for rank, others in enumerate(gathered(own)):
        for index, values in others.items():
            owner, expected = first.setdefault(index, (rank, values))
            for name in expected | values:
                if repr(expected.get(name)) != repr(values.get(name)):  # NaN equals itself here
                    raise InfeasibleError(
                        f"layers[{index}]: {name!r} is not the same on ranks {owner} and {rank} "
                        "(seed all ranks alike before the layers are made, or load a checkpoint)"
                    )
    return held


def _values(index: int, layer: nn.Module) -> dict[str, object]:
    """What must be equal on all ranks of a layer; refuses what an earlier model has sharded."""
    values: dict[str, object] = {}
    parameters = dict(layer.named_parameters())
    for name, one in {**parameters, **dict(layer.named_buffers())}.items():
        values[name] = (tuple(one.shape), str(one.dtype), one.requires_grad, int(checksum(one)))
        some = one.numel() and name in parameters and not one.is_meta
        if some and math.isnan(float(one.detach().flatten()[0].abs())) and bool(one.isnan().all()):
            raise InfeasibleError(
                f"layers[{index}]: {name!r} has no values, only NaN: the layer belongs to another "
                "model that parallelize has made, or was copied from it (make a new layer)"
            )
    return values


def _held(
    layers: Sequence[Layer],
    plan: Plan,
    device: torch.device,
    tied: tuple[ParameterName, ParameterName] | None,
    seed: int,
) -> dict[int, nn.Module]:
    """The layers of this rank's stages; a tied parameter of two stages is copied for the second."""
    held: dict[int, nn.Module] = {}
    for stage in plan.schedule.stages_of(plan.layout.coordinates(dist.get_rank())["pp"]):
        for index in plan.pieces_of(stage):
            module = made_layer(layers[index], index, seed)
            check_values(module, index)
            if plan.precision == "fp8" and 0 < index < len(layers) - 1:
                from zeropp.engine.layers.eight_bits import to_8_bits

                module = to_8_bits(module, device)
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
