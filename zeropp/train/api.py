"""The public API: a list of single-device layers becomes this rank's part of a pipeline.

Layers stay as they were written. They are called one after another, each with the output of the
layer before it. The first gets microbatches of inputs; the loss function gets the last one's output
and the targets. ``torch.distributed`` must be initialised; all ranks call with equal arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch
import torch.distributed as dist

from zeropp.engine import preflight, walk
from zeropp.engine.engine import Engine, groups_of
from zeropp.engine.layers.values import keywords_of, takes_all
from zeropp.engine.loss import Loss, LossFunction
from zeropp.engine.ranks.errors import agreed
from zeropp.engine.settings import Settings, asked_for, read_keywords
from zeropp.engine.walk import Layer, LayerSizes, owners_of
from zeropp.schedule.plan import Plan
from zeropp.train.parallel_model import ParallelModel
from zeropp.train.placing import device_of, meet
from zeropp.train.stages import check_ranks, empty_others, own_layers, plan_layers
from zeropp.types.literals import Recompute, if_auto

P = ParamSpec("P")
Build = Callable[[Sequence[Layer], LossFunction, dict[str, Any]], ParallelModel]
Call = Callable[Concatenate[Sequence[Layer], LossFunction, P], ParallelModel]


def _with_keywords_of(settings: Callable[P, object]) -> Callable[[Build], Call[P]]:
    """A decorator: a function that is given a dict of keywords has the fields of ``settings`` as
    such, in its signature and for type checkers."""

    def decorate(build: Build) -> Call[P]:
        @wraps(build)
        def call(
            layers: Sequence[Layer], loss_fn: LossFunction, /, *args: P.args, **keywords: P.kwargs
        ) -> ParallelModel:
            if args:
                raise TypeError("parallelize: all but layers and loss_fn are keywords (sample=...)")
            return build(layers, loss_fn, keywords)

        first = list(inspect.signature(build).parameters.values())[:2]
        rest = inspect.signature(settings).parameters.values()
        call.__signature__ = inspect.Signature([*first, *rest])  # type: ignore[attr-defined]
        return call

    return decorate


@_with_keywords_of(Settings)
def parallelize(
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    keywords: dict[str, Any],
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
    planned = agreed(_planned(layers, loss_fn, keywords))
    settings, device, sizes, plan, chosen = planned
    own = partial(own_layers, layers, plan, device, settings.tied)
    held = preflight.with_equal_values(own)
    owners = owners_of([held.get(index, layer) for index, layer in enumerate(layers)])
    loss = Loss(
        loss_fn,
        settings.loss_reduction,
        owners,
        settings.sample_keywords,
        plan.layout.stage_ranks(),
    )
    engine = Engine(held, sizes, plan, settings, loss=loss, device=device)
    named, element_mfu = frozenset(settings.sample_keywords), None
    if settings.hardware is not None:
        from zeropp.train.auto import element_mfu_of

        element_mfu = element_mfu_of(settings, settings.hardware, sizes)
    model = ParallelModel(engine, plan, named, chosen, element_mfu)
    empty_others(layers, held)  # at last: layers of a call that failed can be given again
    return model


class _Planned(NamedTuple):
    """What a rank makes of the arguments of ``parallelize`` before it meets the others."""

    settings: Settings
    device: torch.device
    sizes: Sequence[LayerSizes]
    plan: Plan
    chosen: str  # a line about what was ``auto``


def _planned(
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    keywords: dict[str, Any],
) -> Generator[dict[str, str], None, _Planned]:
    """Read, check and plan; yields what must be equal on all ranks."""
    settings, asked = read_keywords(layers, keywords, loss_fn), asked_for(keywords)
    preflight.check_layers(layers, settings.weights, settings.tied)
    yield {
        **settings.described(),
        "layers": f"{len(layers)} layers",
        "auto": str(sorted(asked)),
        "loss_fn": preflight.describe_function(loss_fn),
    }
    device = device_of(settings.device, settings.mesh)
    settings = replace(settings, device=device)
    settings, sizes = _sized(layers, loss_fn, settings, asked)
    plan, chosen = make_plan(settings, asked, sizes, dist.get_world_size())
    yield {
        "group_of": str(groups_of(settings, sizes)),
        "optimizer": str(plan.whole_groups),
    }
    return _Planned(settings, device, sizes, plan, chosen)


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
    recorder = None
    if _is_priced(settings, asked):
        from zeropp.emulate.recorder import Recorder  # not loaded where nothing is priced

        recorder = Recorder
    stages = settings.layout.stage_ranks()
    if "pp" in asked and (world := dist.get_world_size()) > 1:  # each may have a stage of its own
        stages = [frozenset([rank]) for rank in range(world)]
    sizes = walk.walk(
        layers,
        *settings.microbatch,
        recompute,
        recorder=recorder,
        measure_saved=bool(asked),
        tied=settings.tied,
        context=settings.slicing,
        stages=stages,
    )
    every = frozenset(settings.sample_keywords if takes_all(loss_fn) else ())
    named = [keywords_of(loss_fn) | every, *(layer.names for layer in sizes)]
    preflight.check_keywords(settings.sample_keywords, len(settings.sample), named)
    kinds = [layer.kinds for layer in sizes]
    preflight.check_parameters(kinds, settings.tied, settings.precision)
    preflight.check_draws([layer.draws for layer in sizes], settings.dropout_seed)
    return sizes


def _is_priced(settings: Settings, asked: frozenset[str]) -> bool:
    return settings.plan is None and (bool(asked) or settings.hardware is not None)


def make_plan(
    settings: Settings, asked: frozenset[str], sizes: Sequence[LayerSizes], num_ranks: int
) -> tuple[Plan, str]:
    """The plan of a step on this many ranks, and one line about the choice of what was ``asked``
    for as ``auto``; raises InfeasibleError where there is none."""
    chosen = ""
    if _is_priced(settings, asked):
        from zeropp.train import auto  # the tuner and all prices, which nothing else here needs

        plan, chosen = auto.plan_on_cluster(settings, asked, sizes, num_ranks)
    else:
        check_ranks(settings, num_ranks)
        plan = plan_layers(settings, sizes)
    plan.check()
    return plan, chosen
