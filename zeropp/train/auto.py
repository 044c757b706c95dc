"""What a cluster's name is good for: the fastest setting that fits the memory where ``auto`` was
asked for, ranks that work about equally long, and the better of two orders of a step.

The search is the tuner's (``zeropp.choose``), and so are its simulator and its model of a rank's
memory; the prices are those of the user's own layers (``zeropp.choose.layer_prices``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

from zeropp.choose.contender import Contender, Prices
from zeropp.choose.layer_prices import LayerPrices, LayerState, layer_passes
from zeropp.choose.planner import fastest
from zeropp.choose.search import OOM, search
from zeropp.choose.space import SearchPoint, Space
from zeropp.choose.task import Task
from zeropp.engine.settings import Settings, read
from zeropp.engine.update.update_rules import GroupUse
from zeropp.engine.walk import Layer, LayerSizes
from zeropp.price.flops import layer_flops
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.step_plan import drafts
from zeropp.train.stages import (
    Planned,
    check_ranks,
    cut_plan,
    group_uses,
    measure,
    shape_of,
    size_layers,
    whole_groups,
)
from zeropp.types.knobs import StepKnobs
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Recompute

Sizes = Sequence[LayerSizes]
_CHUNKS = (1, 2, 4)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
_MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)  # rows
SEARCHED = ("pp", "shard", "replicate", "chunks", "unit", "recompute", "microbatch_size")


@dataclass(frozen=True, kw_only=True)
class _LayerKnobs(StepKnobs):
    """The knobs of a search over a user's layers."""

    name: str = "zeropp"


def degrees(layers: Sequence[Layer], num_ranks: int, /, **keywords: Any) -> dict[str, Any]:
    """What ``zeropp.parallelize`` would choose on this many ranks for these layers and keywords:
    the values of those that are ``auto``, by name, to be given to it in their place. Needs no
    process group.

    Raises InfeasibleError, in one line, for keywords or layers that do not fit.
    """
    settings, auto_names = read(keywords, layers)
    if not auto_names:
        return {}
    sizes_of = partial(measure, layers, auto=auto_names)
    settings, sizes = sized_microbatch(settings, auto_names, sizes_of, num_ranks)
    chosen, _, _ = choose(settings, auto_names, sizes, num_ranks)
    return {name: getattr(chosen, name) for name in sorted(auto_names)}


def plan_on_cluster(
    settings: Settings, auto_names: frozenset[str], sizes: Sequence[LayerSizes], num_ranks: int
) -> Planned:
    """The plan of a step, and the line of ``choose``: stages of about equal duration, and the
    faster of the order for equal durations and the one planned with theirs.

    Raises InfeasibleError as ``choose`` and ``size_layers`` do.
    """
    chosen, microbatch = "", settings.microbatch[0]
    if auto_names:
        settings, chosen, _ = choose(settings, auto_names, sizes, num_ranks)
    check_ranks(settings, num_ranks)
    cluster = settings.hardware
    assert cluster is not None
    sized = _sized(settings, sizes, whole_groups(group_uses(settings, sizes)))
    prices = LayerPrices(sizes, [LayerState()] * len(sizes))  # all orders have the same
    price = _prices_of(prices).of(sized, cluster)
    orders = (draft.complete() for draft in drafts(sized, price.stages))
    is_bf16 = settings.precision != "fp32"
    peak = cluster.device.peak_bf16_tflops if is_bf16 else cluster.device.peak_fp32_tflops
    flops = sum(layer_flops(layer.operators) for layer in sizes if layer.operators is not None)
    mfu = peak and flops / microbatch.numel() / (peak * 1e12 * num_ranks)
    return Planned(fastest(orders, cluster, price).plan, chosen, mfu)


def _sized(settings: Settings, sizes: Sequence[LayerSizes], whole: tuple[str, ...]) -> SizedPlan:
    """The plan of a step without its order of actions; layers weigh what they take."""
    assert settings.hardware is not None
    plan = size_layers(settings, sizes, whole)
    passes = layer_passes(sizes, plan, settings.hardware)
    return cut_plan(plan, settings, [layer.total for layer in passes])


def sized_microbatch(
    settings: Settings,
    auto_names: frozenset[str],
    sizes_of: Callable[[Settings], Sizes],
    num_ranks: int,
) -> tuple[Settings, Sizes]:
    """The settings with the size of microbatches, where that is to be chosen, with which a step is
    the fastest, and the layers' sizes for it, which ``sizes_of`` gives for settings.

    Raises InfeasibleError as ``choose`` does, if it does so for every size.
    """
    if "microbatch_size" not in auto_names:
        return settings, sizes_of(settings)
    best: tuple[float, Settings, Sizes] | None = None
    refusal = InfeasibleError(f"global_batch={settings.global_batch}: has no microbatches")
    for rows in (rows for rows in _MICROBATCHES if settings.global_batch % rows == 0):
        tried = replace(settings, microbatch_size=rows)
        sizes = sizes_of(tried)
        try:
            _, _, step_s = choose(tried, auto_names, sizes, num_ranks)
        except InfeasibleError as error:
            refusal = error
            continue
        if best is None or step_s < best[0]:
            best = step_s, tried, sizes
    if best is None:
        raise refusal
    return best[1:]


def choose(
    settings: Settings, auto_names: frozenset[str], sizes: Sizes, num_ranks: int
) -> tuple[Settings, str, float]:
    """The settings with a value for each of ``auto_names``, for this many ranks, one line about the
    choice, and the estimated seconds per step. The size of microbatches is not chosen here.

    Raises InfeasibleError where no cluster was named, where no setting makes up the ranks and the
    batch, or where none fits.
    """
    words, cluster = ", ".join(sorted(auto_names)), settings.hardware
    if unknown := sorted(auto_names - set(SEARCHED)):
        raise InfeasibleError(f"{unknown[0]}='auto': give a value (only {SEARCHED} may be 'auto')")
    if cluster is None:
        raise InfeasibleError(
            f"{words}='auto': needs cluster=, whose rates and memory decide (or give a value)"
        )
    layers = _Layers(settings, auto_names, sizes)
    task = Task(
        shape=shape_of(sizes),
        cluster=cluster,
        num_gpus=num_ranks,
        global_batch=settings.global_batch,
        precision=settings.precision,
    )
    rows = settings.microbatch_rows
    outcome = search(task, layers.contender(), layers.knobs, rows, runner_up=False)
    winner, usable = outcome.winner, cluster.device.usable_bytes
    if winner is None:
        why = f"no degrees make up {num_ranks} ranks and a batch of {settings.global_batch} rows"
        if too_large := outcome.rejected.get(OOM):
            why = f"{too_large} settings need more memory than a device has"
        elif layers.refused:
            why = f"no setting can be cut; the last one: {layers.refused}"
        raise InfeasibleError(f"{words}='auto': {why}")
    if "microbatch_size" in auto_names:
        words = words.replace("microbatch_size", f"microbatch_size={rows}")
    chosen = (
        f"{words} chosen: estimated {winner.step_s:.3g} s per step and "
        f"{winner.peak_bytes / 2**30:.3g} of {usable / 2**30:.3g} usable GiB"
    )
    return layers.with_knobs(winner.candidate.knobs), chosen, winner.step_s


class _Layers:
    """A user's layers as something that the tuner searches."""

    def __init__(
        self, settings: Settings, auto_names: frozenset[str], sizes: Sequence[LayerSizes]
    ) -> None:
        self._settings = replace(settings, cluster=settings.hardware)
        self._auto_names, self._sizes = auto_names, sizes
        uses = group_uses(settings, sizes)
        self._whole = whole_groups(uses)
        states = [_state(layer, uses) for layer in sizes]
        self._prices = _prices_of(LayerPrices(sizes, states))
        self.refused = ""
        knobs = {knob.name: getattr(settings, knob.name) for knob in fields(StepKnobs)}
        degrees = {axis: size for axis, size in settings.layout.axes if axis not in auto_names}
        self.knobs = _LayerKnobs(**knobs | {k: v for k, v in degrees.items() if k != "tp"})

    def contender(self) -> Contender[_LayerKnobs]:
        """What the search asks."""
        return Contender(
            name="zeropp",
            label="",
            knobs=_LayerKnobs,
            size=self._size,
            orders=drafts,
            space=Space(
                families=self._families,
                members=self._members,
                pipelines=(1, 0),
                shards=(1, 0),
                climbs=False,
            ),
            prices=self._prices,
        )

    def with_knobs(self, knobs: _LayerKnobs) -> Settings:
        """The settings with these knobs."""
        known = {knob.name: getattr(knobs, knob.name) for knob in fields(StepKnobs)}
        return replace(self._settings, **known)

    def _size(self, task: Task, knobs: _LayerKnobs, microbatch_size: int) -> SizedPlan:
        del task, microbatch_size
        try:
            return _sized(self.with_knobs(knobs), self._sizes, self._whole)
        except InfeasibleError as error:
            self.refused = str(error)
            raise

    def _families(self, point: SearchPoint[_LayerKnobs]) -> Iterator[_LayerKnobs]:
        degrees, m = point.degrees, point.num_microbatches
        for chunks, recompute in product(
            self._options("chunks", _CHUNKS), self._options("recompute", _RECOMPUTE)
        ):
            if degrees.pp * chunks <= len(self._sizes):
                yield replace(
                    point.asked,
                    pp=degrees.pp,
                    shard=degrees.shard,
                    replicate=degrees.replicate,
                    chunks=chunks,
                    recompute=recompute,
                    unit=m if "unit" in self._auto_names else point.asked.unit,
                )

    def _members(
        self, asked: _LayerKnobs, family: _LayerKnobs, plan: SizedPlan
    ) -> Iterator[_LayerKnobs]:
        del asked
        pp, m = plan.layout.pp, plan.num_microbatches
        units = sorted({min(m, unit) for unit in (pp, 2 * pp, m)})
        return (replace(family, unit=unit) for unit in self._options("unit", units))

    def _options(self, name: str, known: Iterable[Any]) -> list[Any]:
        """The values to try for one knob: all that are known, or the given one."""
        return list(known) if name in self._auto_names else [getattr(self.knobs, name)]


def _state(layer: LayerSizes, uses: Mapping[str, GroupUse]) -> LayerState:
    """The bytes of a layer's gradients and optimizer state, in fp32."""
    counts = [(uses[k.group], prod(k.shape)) for k in layer.kinds.values() if k.trained]
    kept = sum(4 * use.numbers * n for use, n in counts)
    held = sum(4 * n for use, n in counts if use.whole)
    return LayerState(4 * sum(n for _, n in counts), kept, held)


def _prices_of(layers: LayerPrices) -> Prices:
    return Prices(times=layers.times, memory=layers.memory, passes=layers.passes)
