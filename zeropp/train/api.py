"""The public API: a list of single-device layers becomes this rank's part of a pipeline.

Layers stay as they were written. They are called one after another, each with the output of the
layer before it. The first gets microbatches of inputs; the loss function gets the last one's output
and the targets. ``torch.distributed`` must be initialised; all ranks call with equal arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeropp.engine import preflight, walk
from zeropp.engine.collectives import connect_lazily
from zeropp.engine.engine import Engine, groups_of
from zeropp.engine.errors import together
from zeropp.engine.loss import Loss, LossFunction
from zeropp.engine.settings import Settings, asked_for, read_keywords
from zeropp.engine.values import keywords_of
from zeropp.engine.walk import Layer, LayerSizes, owners_of
from zeropp.schedule.plan import Plan
from zeropp.train.parallel_model import ParallelModel
from zeropp.train.stages import check_ranks, own_layers, plan_layers
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Recompute, if_auto

if TYPE_CHECKING:
    from zeropp.emulate.recorder import Recorder

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
            connect_lazily(dist.get_world_size())
            _use(keywords.get("device"))
            if "nccl" in str(dist.get_backend_config()):  # on all ranks, as it is collective
                from zeropp.engine.preflight_cuda import check_own_gpu

                check_own_gpu(on_cuda=_on_cuda(keywords.get("device"), keywords.get("mesh")))
            together(lambda: _check_call(args, keywords, inspect.signature(settings).parameters))
            made = together(lambda: read_keywords(layers, keywords, loss_fn))
            return build(layers, loss_fn, made, asked_for(keywords))

        first = list(inspect.signature(build).parameters.values())[:2]
        rest = inspect.signature(settings).parameters.values()
        call.__signature__ = inspect.Signature([*first, *rest])  # type: ignore[attr-defined]
        return call

    return decorate


def _check_call(args: Sequence[Any], keywords: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise TypeError for arguments without a name, and for names that ``parallelize`` has not."""
    if args:
        raise TypeError(
            "parallelize: takes two positional arguments, layers and the loss function; all others "
            "are keywords (sample=..., global_batch=...)"
        )
    for name in keywords:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see zeropp.engine.settings.Settings"
            raise TypeError(f"parallelize: got an unexpected keyword argument {name!r} ({hint})")
    if missing := [name for name in ("sample", "global_batch") if name not in keywords]:
        raise TypeError(f"parallelize: {' and '.join(missing)} must be given")


@_with_keywords(Settings)
def parallelize(
    layers: Sequence[Layer], loss_fn: LossFunction, settings: Settings, asked: frozenset[str]
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
    together(lambda: preflight.check_inference("parallelize"))
    together(lambda: preflight.check_layers(layers, settings.weights, settings.tied))
    preflight.compare(
        lambda: {
            **settings.described(),
            "layers": f"{len(layers)} layers",
            "auto": str(sorted(asked)),
            "loss_fn": preflight.describe_function(loss_fn),
        }
    )
    device = together(lambda: _device(settings.device, settings.mesh))
    settings = replace(settings, device=device)
    settings, sizes = together(lambda: _sized(layers, loss_fn, settings, asked))
    plan, chosen = together(lambda: make_plan(settings, asked, sizes, dist.get_world_size()))
    preflight.compare(lambda: _functions(settings, sizes) | {"optimizer": str(plan.whole_groups)})
    held = together(lambda: own_layers(layers, plan, device, settings.tied))
    preflight.compare_values(held)
    owners = owners_of([held.get(index, layer) for index, layer in enumerate(layers)])
    loss = Loss(loss_fn, settings.loss_reduction, owners)
    engine = Engine(held, sizes, plan, settings, loss=loss, device=device)
    model = ParallelModel(engine, plan, frozenset(settings.sample_keywords), chosen)
    preflight.compare(lambda: {"optimizer": engine.updater.described()})
    return model


def _sized(
    layers: Sequence[Layer], loss_fn: LossFunction, settings: Settings, asked: frozenset[str]
) -> tuple[Settings, Sequence[LayerSizes]]:
    """The settings with the size of microbatches, and the sizes of all layers for it."""
    if "microbatch_size" not in asked:
        return settings, _sizes(layers, loss_fn, settings, asked)
    from zeropp.train.auto import sized_microbatch

    sizes_of = partial(_sizes, layers, loss_fn, asked=asked)
    return sized_microbatch(settings, asked, sizes_of, dist.get_world_size())


def _sizes(
    layers: Sequence[Layer], loss_fn: LossFunction, settings: Settings, asked: frozenset[str]
) -> list[LayerSizes]:
    """The sizes of all layers; what could not be trained is refused."""
    preflight.check_loss(loss_fn)
    recompute: Recompute = if_auto(settings.recompute, "full")
    sizes = walk.walk(
        layers,
        *settings.microbatch,
        recompute,
        recorder=_recorder() if _is_priced(settings, asked) else None,
        measure_saved=bool(asked),
        tied=settings.tied,
    )
    named = [keywords_of(loss_fn), *(layer.names for layer in sizes)]
    preflight.check_keywords(settings.sample_keywords, len(settings.sample), named)
    kinds = [layer.kinds for layer in sizes]
    preflight.check_parameters(kinds, settings.tied, settings.precision, settings.fp32_modules)
    preflight.check_draws([layer.draws for layer in sizes], settings.dropout_seed)
    return sizes


def _recorder() -> type[Recorder]:
    from zeropp.emulate.recorder import Recorder  # not loaded where nothing is priced

    return Recorder


def _is_priced(settings: Settings, asked: frozenset[str]) -> bool:
    return settings.plan is None and (bool(asked) or settings.hardware is not None)


def make_plan(
    settings: Settings, asked: frozenset[str], sizes: Sequence[LayerSizes], num_ranks: int
) -> tuple[Plan, str]:
    """The plan of a step on so many ranks, and one line about the choice of what was ``asked`` for
    as ``auto``; raises InfeasibleError where there is none."""
    chosen = ""
    if _is_priced(settings, asked):
        from zeropp.train import auto  # the tuner and all prices, which nothing else here needs

        plan, chosen = auto.plan_on_cluster(settings, asked, sizes, num_ranks)
    else:
        check_ranks(settings, num_ranks)
        plan = plan_layers(settings, sizes)
    plan.check()
    return plan, chosen


def _functions(settings: Settings, sizes: Sequence[LayerSizes]) -> dict[str, str]:
    """What the caller's functions give, which must be equal on all ranks."""
    schedule = settings.lr_schedule
    factors = None if schedule is None else [float(schedule(step)) for step in (0, 1)]
    return {"group_of": str(groups_of(settings, sizes)), "lr_schedule": str(factors)}


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
    try:
        device = torch.device(asked or ("cuda" if _on_cuda(None, mesh) else "cpu"))
    except RuntimeError:  # whose message has all of torch's types of devices
        raise InfeasibleError(f"device={asked!r}: is none of torch's devices (cuda, cpu)") from None
    known = sorted(entry.partition(":")[0] for entry in dist.get_backend_config().split(","))
    if device.type not in known:
        raise InfeasibleError(
            f"device={str(device)!r}: the process group has no backend for it, only for "
            f"{' and '.join(known)} (give init_process_group another backend, or take that device)"
        )
    if device.type == "cpu":
        return torch.device("cpu")  # tensors on the CPU have no index
    if device.type == "cuda":
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            raise InfeasibleError(
                f"device={str(device)!r}: this process sees {count} CUDA devices (take a torch "
                "with CUDA, or look at CUDA_VISIBLE_DEVICES)"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device
