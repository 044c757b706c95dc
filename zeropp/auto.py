"""What ``auto`` stands for: the fastest setting that fits the memory, on a described cluster.

The search is the tuner's (``zeropp.tune``), and so are its simulator and its model of a rank's
memory; the prices are those of the user's own layers (``zeropp.stages``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist

from zeropp.contender.contender import StepKnobs
from zeropp.engine.optimizer import state_bytes
from zeropp.engine.walk import LayerSizes
from zeropp.layout import InfeasibleError
from zeropp.literals import Recompute
from zeropp.plan import SizedPlan, Task
from zeropp.planner import drafts
from zeropp.settings import Settings
from zeropp.stages import LayerPrices, LayerState, shape_of, size_layers
from zeropp.tune.contender import Contender, Prices
from zeropp.tune.search import OOM, search
from zeropp.tune.space import SearchPoint, Space

_CHUNKS = (1, 2, 4)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
SEARCHED = ("pp", "shard", "replicate", "chunks", "unit", "recompute")


@dataclass(frozen=True, kw_only=True)
class _LayerKnobs(StepKnobs):
    """The knobs of a search over a user's layers."""

    name: str = "zeropp"


def choose(
    settings: Settings, asked: frozenset[str], sizes: Sequence[LayerSizes]
) -> tuple[Settings, str]:
    """The settings with everything chosen that was ``asked`` for as ``auto``, and one line about
    the choice.

    Raises InfeasibleError where no cluster was named, where no setting makes up the ranks and the
    batch, or where none fits.
    """
    words, cluster = ", ".join(sorted(asked)), settings.hardware
    if unknown := sorted(asked - set(SEARCHED)):
        raise InfeasibleError(f"{unknown[0]}='auto': give a value (only {SEARCHED} may be 'auto')")
    if cluster is None:
        raise InfeasibleError(
            f"{words}='auto': needs cluster=, whose rates and memory decide (or give a value)"
        )
    layers = _Layers(settings, asked, sizes)
    task = Task(
        shape=shape_of(sizes),
        cluster=cluster,
        num_gpus=dist.get_world_size(),
        global_batch=settings.global_batch,
        precision=settings.precision,
    )
    found = search(task, layers.contender(), layers.knobs, len(settings.sample), runner_up=False)
    if found.winner is None:
        raise InfeasibleError(f"{words}='auto': {_why_none(found.rejected, layers.refused, task)}")
    winner, usable = found.winner, cluster.device.usable_bytes
    chosen = (
        f"{words} chosen: estimated {winner.step_s:.3g} s per step and "
        f"{winner.peak_bytes / 2**30:.3g} of {usable / 2**30:.3g} usable GiB"
    )
    return layers.with_knobs(winner.candidate.knobs), chosen


def _why_none(rejected: dict[str, int], refused: str, task: Task) -> str:
    """Why no setting is left; ``refused`` is what the last one that cannot be cut said."""
    if rejected.get(OOM):
        return f"{rejected[OOM]} settings need more memory than a device has"
    if refused:
        return f"no setting can be cut; the last one: {refused}"
    return f"no degrees make up {task.num_gpus} ranks and a batch of {task.global_batch} rows"


class _Layers:
    """A user's layers as something that the tuner searches."""

    def __init__(
        self, settings: Settings, asked: frozenset[str], sizes: Sequence[LayerSizes]
    ) -> None:
        self._settings = replace(settings, cluster=settings.hardware)
        self._asked, self._sizes = asked, sizes
        self._prices = LayerPrices(sizes, _states(settings, sizes))
        self.refused = ""
        knobs = {one.name: getattr(settings, one.name) for one in fields(StepKnobs)}
        degrees = {axis: size for axis, size in settings.layout.axes if axis not in asked}
        self.knobs = _LayerKnobs(**knobs | {k: v for k, v in degrees.items() if k != "tp"})

    def contender(self) -> Contender[_LayerKnobs]:
        """What the search asks."""
        prices = self._prices
        return Contender(
            name="zeropp",
            label="",
            knobs=_LayerKnobs,
            size=self._size,
            orders=drafts,
            space=Space(
                families=self._families, members=self._members, pipelines=(1, 0), shards=(1, 0)
            ),
            prices=Prices(times=prices.times, memory=prices.memory, passes=prices.passes),
        )

    def with_knobs(self, knobs: _LayerKnobs) -> Settings:
        """The settings with these knobs."""
        known = {one.name: getattr(knobs, one.name) for one in fields(StepKnobs)}
        return replace(self._settings, mesh=None, **known)

    def _size(self, task: Task, knobs: _LayerKnobs, microbatch_size: int) -> SizedPlan:
        del task, microbatch_size
        try:
            return size_layers(self.with_knobs(knobs), self._sizes)
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
                    unit=m if "unit" in self._asked else point.asked.unit,
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
        return list(known) if name in self._asked else [getattr(self.knobs, name)]


def _states(settings: Settings, sizes: Sequence[LayerSizes]) -> list[LayerState]:
    """The bytes of every layer's gradients and optimizer state; what the optimizer keeps depends on
    each parameter's group."""
    trained = [{name: kind for name, kind in one.kinds.items() if kind.trained} for one in sizes]
    groups = [
        {name: settings.group_of((index, name), kind.empty()) for name, kind in kinds.items()}
        for index, kinds in enumerate(trained)
    ]
    kept = state_bytes(settings.optimizer, sorted({g for one in groups for g in one.values()}))
    found = []
    for kinds, group in zip(trained, groups, strict=True):
        counts = {name: prod(kind.shape) for name, kind in kinds.items()}
        state = sum(kept[group[name]] * count for name, count in counts.items())
        found.append(LayerState(4 * sum(counts.values()), state))
    return found
