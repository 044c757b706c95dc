"""The public API: a list of single-device layers becomes this rank's part of a pipeline.

Layers stay as they were written. They are called one after another, each with the output of the
layer before it. The first gets microbatches of inputs; the loss function gets the last one's output
and the targets. ``torch.distributed`` must be initialised; all ranks call with equal arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeropp.auto import choose
from zeropp.engine import preflight
from zeropp.engine.engine import Engine
from zeropp.engine.errors import together
from zeropp.engine.interpreter import Loss, LossFunction
from zeropp.engine.values import keywords_of
from zeropp.engine.walk import Layer, LayerSizes, owners_of, walk
from zeropp.layout import InfeasibleError
from zeropp.literals import Recompute, if_auto
from zeropp.parallel_model import ParallelModel
from zeropp.settings import Settings
from zeropp.stages import Stages, groups_of, plan_layers

P = ParamSpec("P")
_Build = Callable[[Sequence[Layer], LossFunction, Settings, frozenset[str]], ParallelModel]


def _with_keywords(
    settings: Callable[P, Settings],
) -> Callable[[_Build], Callable[Concatenate[Sequence[Layer], LossFunction, P], ParallelModel]]:
    """A decorator: the function takes the fields of ``Settings`` as keywords, and is given an
    object of it, and the names of the keywords that are ``auto``."""

    def decorate(
        build: _Build,
    ) -> Callable[Concatenate[Sequence[Layer], LossFunction, P], ParallelModel]:
        @wraps(build)
        def call(
            layers: Sequence[Layer], loss_fn: LossFunction, /, *args: P.args, **keywords: P.kwargs
        ) -> ParallelModel:
            if not dist.is_initialized():
                raise RuntimeError("parallelize: call torch.distributed.init_process_group first")
            _use(keywords.get("device"))
            if "nccl" in str(dist.get_backend_config()):  # on all ranks, as it is collective
                on_cuda = _on_cuda(keywords.get("device"), keywords.get("mesh"))
                preflight.check_own_gpu(on_cuda=on_cuda)
            given = together(lambda: settings(*args, **keywords))
            asked = frozenset(name for name, value in keywords.items() if value == "auto")
            return build(layers, loss_fn, given, asked)

        first = list(inspect.signature(build).parameters.values())[:2]
        rest = inspect.signature(settings).parameters.values()
        call.__signature__ = inspect.Signature([*first, *rest])  # type: ignore[attr-defined]
        return call

    return decorate


@_with_keywords(Settings)
def parallelize(
    layers: Sequence[Layer], loss_fn: LossFunction, settings: Settings, asked: frozenset[str]
) -> ParallelModel:
    """Cut layers into ``pp * chunks`` stages and build this rank's.

    ``layers`` are modules, or functions that make the same one at every call: a function is called
    on the meta device to learn sizes, and for real only on the ranks that hold its layer.
    ``loss_fn`` takes the last layer's output and the targets, and gives the mean (or the sum) over
    a microbatch. ``sample`` is one microbatch of inputs, and ``global_batch`` the rows of a step
    over all ranks. All other keywords are the fields of ``zeropp.settings.Settings``.

    Raises RuntimeError without a process group, TypeError for an unknown keyword, and
    InfeasibleError with one line, the same on every rank, for arguments that do not fit or differ.
    """
    together(lambda: preflight.check_inference("parallelize"))
    if settings.tied is None and (tied := getattr(layers, "tied", None)):
        settings = replace(settings, tied=tied)  # as Hugging Face's models know it
    together(lambda: preflight.check_layers(layers, settings.weights, settings.tied))
    preflight.compare(lambda: f"{settings.described()} {len(layers)} layers {sorted(asked)}")
    device = together(lambda: _device(settings.device, settings.mesh))
    settings, stages = together(lambda: _cut(layers, loss_fn, settings, asked))
    preflight.compare(lambda: _functions(settings, stages.sizes))
    pieces = together(lambda: stages.pieces(layers, device, settings.tied))
    preflight.compare_values(pieces)
    modules = {piece.index: piece.module for piece in pieces}
    owners = owners_of([modules.get(index, layer) for index, layer in enumerate(layers)])
    engine = Engine(
        pieces, stages.plan.schedule, stages.plan.layout, boundary=stages.boundary,
        loss=Loss(loss_fn, owners), optimizer=settings.optimizer,
        device=device, options=stages.engine_options(settings),
    )  # fmt: skip
    model = ParallelModel(engine, settings, stages)
    preflight.compare(lambda: _rates(engine.optimizer))
    return model


def _cut(
    layers: Sequence[Layer], loss_fn: LossFunction, settings: Settings, asked: frozenset[str]
) -> tuple[Settings, Stages]:
    """The settings, in which every ``auto`` is replaced by a value, and the stages of the model."""
    preflight.check_loss(loss_fn)
    recompute: Recompute = "full" if "recompute" in asked else if_auto(settings.recompute, "none")
    sizes = walk(
        layers, settings.sample, settings.sample_keywords, recompute, measure_saved=bool(asked)
    )
    named = [keywords_of(loss_fn), *(one.names for one in sizes)]
    preflight.check_keywords(settings.sample_keywords, len(settings.sample), named)
    kinds = [one.kinds for one in sizes]
    preflight.check_parameters(kinds, settings.tied, settings.precision, settings.fp32_modules)
    chosen = ""
    if asked:
        settings, chosen = choose(settings, asked, sizes)
    return settings, Stages(plan=plan_layers(settings, sizes), sizes=sizes, chosen=chosen)


def _functions(settings: Settings, sizes: Sequence[LayerSizes]) -> str:
    """What the caller's functions give, which must be equal on all ranks."""
    groups, schedule = groups_of(settings, sizes), settings.lr_schedule
    return f"{groups} {None if schedule is None else [float(schedule(step)) for step in (0, 1)]}"


def _rates(optimizer: torch.optim.Optimizer) -> str:
    """The kind and the numbers of an optimizer, which must be equal on all ranks."""
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"


def _on_cuda(asked: Any, mesh: Any) -> bool:
    """Whether this rank trains on a GPU; the arguments may be wrong still."""
    if asked is not None:
        return str(asked).startswith("cuda")
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type == "cuda"
    return "nccl" in str(dist.get_backend_config())


def _use(asked: Any) -> None:
    """Make a CUDA device that was asked for by its number the current one of this process, because
    the collectives that compare the arguments may need it. Others are refused by ``_device``."""
    with suppress(Exception):
        if asked is not None and torch.device(asked).index is not None:
            torch.cuda.set_device(asked)


def _device(asked: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    """Where this rank trains: as asked, else where its process group's tensors live.

    A CUDA device becomes this process's current one, because streams and events are those of the
    current device where none is named.
    """
    device = torch.device(asked or ("cuda" if _on_cuda(None, mesh) else "cpu"))
    known = sorted(entry.partition(":")[0] for entry in dist.get_backend_config().split(","))
    if device.type not in known:
        raise InfeasibleError(
            f"device={str(device)!r}: the process group has no backend for it, only for "
            f"{' and '.join(known)} (give init_process_group another backend, or take that device)"
        )
    if device.type == "cpu":
        return torch.device("cpu")  # tensors on the CPU have no index
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device
