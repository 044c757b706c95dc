"""The public API: a list of single-device layers becomes this rank's part of a pipeline.

Layers stay as they were written. They are called one after another, each with the output of the
layer before it. The first gets microbatches of inputs; the loss function gets the last one's output
and the targets. ``torch.distributed`` must be initialised; all ranks call with equal arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, cast

import torch
import torch.distributed as dist
from torch import nn

from zeropp.engine.engine import Engine
from zeropp.engine.layers.values import may_have_gradient
from zeropp.engine.loss import Loss, LossFunction
from zeropp.engine.ranks.collectives import connect_lazily
from zeropp.engine.ranks.errors import agree, refusal
from zeropp.engine.settings import Settings, check_call, read
from zeropp.engine.walk import Layer, LayerSizes
from zeropp.train.parallel_model import ParallelModel
from zeropp.train.stages import Planned, check_sizes, measure, own_layers, plan_layers
from zeropp.types.layout import InfeasibleError

P = ParamSpec("P")
Build = Callable[..., ParallelModel]
Call = Callable[Concatenate[Sequence[Layer], LossFunction, P], ParallelModel]


def _with_keywords_of(settings: Callable[P, object]) -> Callable[[Build], Call[P]]:
    """A decorator: type checkers and the signature show the keywords of ``settings``."""

    def decorate(build: Build) -> Call[P]:
        layers, loss_fn, _ = inspect.signature(build).parameters.values()
        rest = inspect.signature(settings).parameters.values()
        signature = inspect.Signature([layers, loss_fn, *rest])
        build.__signature__ = signature  # type: ignore[attr-defined]
        return cast("Call[P]", build)

    return decorate


@_with_keywords_of(Settings)
def parallelize(
    layers: Sequence[Layer], loss_fn: LossFunction, /, **keywords: Any
) -> ParallelModel:
    """Cut layers into ``pp * chunks`` stages and build this rank's.

    ``layers`` are modules, or functions that make the same one at every call: a function is called
    on the meta device to learn sizes, and for real only on the ranks that hold its layer.
    ``loss_fn`` takes the last layer's output and the targets, and gives what ``loss_reduction``
    says of a microbatch: by default the mean over its rows. ``sample`` are some inputs,
    ``microbatch_size`` the rows of a microbatch, and ``global_batch`` those of a step over all
    ranks. All other keywords are the fields of ``zeropp.engine.settings.Settings``; a finished
    ``plan`` takes the place of all degrees and knobs.

    Raises RuntimeError without a process group, TypeError for an unknown keyword, and
    InfeasibleError with one line, the same on every rank, for arguments that do not fit or differ.
    """
    meet(keywords)
    settings, auto = agree(lambda: _settings(layers, loss_fn, keywords))
    settings, sizes, planned = agree(lambda: _planned(layers, loss_fn, settings, auto))
    plan, device = planned.plan, torch.device(settings.device or "cpu")
    held = own_layers(layers, plan, device, settings.tied)
    loss = Loss(
        loss_fn,
        settings.loss_reduction,
        [held.get(index, layer) for index, layer in enumerate(layers)],
        settings.sample_keywords,
    )
    engine = Engine(held, sizes, plan, settings, loss=loss, device=device)
    names = frozenset(settings.sample_keywords)
    model = ParallelModel(engine, planned, names, settings.without_tokens)
    # At last, as layers of a call that failed can be given again: those that other ranks train are
    # NaN and without memory from now on, since their first values would look like trained ones.
    own = {id(parameter) for module in held.values() for parameter in module.parameters()}
    for layer in layers:
        for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
            if id(parameter) not in own and may_have_gradient(parameter.dtype):
                parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.shape)
    return model


def _settings(
    layers: Sequence[Layer], loss_fn: LossFunction, keywords: Mapping[str, Any]
) -> tuple[tuple[Settings, frozenset[str]], dict[str, str]]:
    """What was asked for, and what is to be chosen; and what of it must be equal on all ranks."""
    settings, auto = read(keywords, layers, loss_fn)
    check_call(settings, layers, loss_fn)
    settings = replace(settings, device=device_of(settings.device))
    return (settings, auto), {
        **settings.described(),
        "layers": f"{len(layers)} layers",
        "auto": str(sorted(auto)),
    }


def _planned(
    layers: Sequence[Layer], loss_fn: LossFunction, settings: Settings, auto: frozenset[str]
) -> tuple[tuple[Settings, Sequence[LayerSizes], Planned], dict[str, str]]:
    """Measure the layers, and choose a plan for them; and what must be equal on all ranks."""
    num_ranks = dist.get_world_size()
    sizes_of = partial(measure, layers, auto=auto)
    if auto or settings.hardware is not None:  # the tuner and all prices are loaded for these alone
        from zeropp.train.auto import plan_on_cluster, sized_microbatch

        settings, sizes = sized_microbatch(settings, auto, sizes_of, num_ranks)
        check_sizes(sizes, settings, loss_fn)
        planned = plan_on_cluster(settings, auto, sizes, num_ranks)
    else:
        sizes = sizes_of(settings)
        check_sizes(sizes, settings, loss_fn)
        planned = plan_layers(settings, sizes, num_ranks)
    planned.plan.check()
    return (settings, sizes, planned), {
        "group_of": str([{n: one.group for n, one in layer.kinds.items()} for layer in sizes]),
        "optimizer": str(planned.plan.whole_groups),
    }


def meet(keywords: Mapping[str, Any]) -> None:
    """Make the first collective possible; the keywords may be wrong still. Raises RuntimeError
    without a process group."""
    if not dist.is_initialized():
        raise RuntimeError("parallelize: call torch.distributed.init_process_group first")
    connect_lazily(dist.get_world_size())
    with suppress(Exception):  # ``device_of`` refuses what is no device
        # Which the collectives that compare arguments may need; without an index it raises.
        torch.cuda.set_device(keywords.get("device"))


def device_of(asked: torch.device | str | None) -> torch.device:
    """Where this rank trains: as asked, else where its process group's tensors live.

    A CUDA device becomes this process's current one, because streams and events are those of the
    current device where none is named. Raises InfeasibleError for a device that is not there.
    """
    way_out = "take cuda or cpu; CUDA_VISIBLE_DEVICES says which GPUs this process sees"
    with refusal(f"device={asked!r}", way_out):
        has_nccl = "nccl" in str(dist.get_backend_config())
        device = torch.device(asked or ("cuda" if has_nccl else "cpu"))
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.set_device(device := torch.device("cuda", index))
    known = sorted(entry.partition(":")[0] for entry in dist.get_backend_config().split(","))
    if device.type not in known:
        raise InfeasibleError(
            f"device={str(device)!r}: the process group has no backend for it, only for "
            f"{' and '.join(known)} (give init_process_group another backend, or take that device)"
        )
    return torch.device("cpu") if device.type == "cpu" else device  # on a CPU none has an index
