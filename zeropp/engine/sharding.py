"""Sorts the parameters of a chunk into flat buffers, which are gathered and reduced together.

A chunk has one buffer for weights whose gradients may be delayed (so that memory for these
gradients is allocated only with the first of them), one for its other trained parameters, one for
frozen parameters, and one for each parameter that another chunk has, too (so that both divide it in
the same way).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from zeropp.engine.collectives import DataGroups
from zeropp.engine.deferred import hooks_of
from zeropp.engine.flat import FlatParameters, Name, Partition, SlotParameters, Types, lay_out
from zeropp.engine.lanes import Lanes
from zeropp.engine.options import EngineOptions
from zeropp.layout import InfeasibleError

WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class _Found:
    """A parameter with all its names in the chunk, or several that are tied."""

    names: tuple[Name, ...]
    parameters: list[nn.Parameter]


def make_flats(
    pieces: Mapping[int, nn.Module],
    deferred: Iterable[nn.Parameter],
    *,
    groups: DataGroups,
    lanes: Lanes,
    options: EngineOptions,
    zero: bool,
    keeps_sums: bool,
) -> Iterator[FlatParameters]:
    """The buffers of a chunk's ``pieces``, which are modules by their index in the model.
    ``deferred`` are the weights whose gradients may be delayed; ``zero``: replicas split the
    optimizer's work (ZeRO-1); ``keeps_sums`` as in ``FlatParameters``. Raises InfeasibleError for
    parameters that cannot be sharded."""
    found = _parameters(pieces)
    modules = (module for piece in pieces.values() for module in piece.modules())
    wide = [module for module in modules if isinstance(module, options.fp32_modules)]
    in_fp32 = {id(parameter) for module in wide for parameter in module.parameters()}
    _tie(found, options.tied)
    delayed = {id(weight) for weight in deferred}
    lots: defaultdict[tuple[bool, bool, Name | None, torch.dtype | None], list[_Found]]
    lots = defaultdict(list)
    for one in found:
        first = one.parameters[0]
        shared = next((name for name in one.names if name in (options.tied or ())), None)
        late = shared is None and first.requires_grad and id(first) in delayed
        # Layers that compute in several types keep them; mixed precision has one for all.
        own = first.dtype if options.precision == "fp32" or id(first) in in_fp32 else None
        lots[first.requires_grad, late, shared, own].append(one)
    for (trainable, late, shared, _), lot in lots.items():
        rows = (groups.replica, groups.replicas) if zero and trainable else (0, 1)
        # Both copies of a tied parameter are updated alike, so both ask by its first name.
        asked = options.tied[0] if shared is not None and options.tied is not None else None
        layout = lay_out(
            (
                (
                    one.names,
                    one.parameters[0].shape,
                    options.group_of(asked or one.names[0], one.parameters[0]),
                )
                for one in lot
            ),
            Partition(groups.shard, groups.shards, *rows),
        )
        by_names = {one.names: tuple(one.parameters) for one in lot}
        yield FlatParameters(
            [SlotParameters(slot, by_names[slot.names]) for slot in layout.slots],
            layout,
            groups=groups,
            lanes=lanes,
            types=_types(lot, options, wide=id(lot[0].parameters[0]) in in_fp32),
            zero=zero and trainable,
            trainable=trainable,
            deferred=late,
            keeps_sums=keeps_sums,
        )


def _parameters(pieces: Mapping[int, nn.Module]) -> list[_Found]:
    """All parameters, each once, in the order of the model."""
    found: dict[int, _Found] = {}
    for index, piece in pieces.items():
        for name, parameter in piece.named_parameters(remove_duplicate=False):
            if not parameter.is_floating_point():
                raise InfeasibleError(
                    f"{index}.{name}: parameters of type {parameter.dtype} cannot be sharded "
                    "(make it a buffer)"
                )
            if parameter.requires_grad and hooks_of(parameter.register_post_accumulate_grad_hook):
                raise InfeasibleError(
                    f"{index}.{name}: has a hook of register_post_accumulate_grad_hook, but a "
                    "gradient is whole only after the sums over all ranks (remove the hook; "
                    "register_hook works)"
                )
            one = found.setdefault(id(parameter), _Found((), [parameter]))
            one.names += ((index, name),)
    return list(found.values())


def _tie(found: list[_Found], tied: tuple[Name, Name] | None) -> None:
    """Make two parameters of this chunk one, if the model ties them."""
    ends = [one for name in tied or () for one in found if name in one.names]
    if len(ends) == 2 and ends[0] is not ends[1]:
        original, copy = ends
        original.names += copy.names
        original.parameters += copy.parameters
        found.remove(copy)


def _types(lot: Sequence[_Found], options: EngineOptions, *, wide: bool) -> Types:
    """The types of a buffer; ``wide``: its parameters compute in fp32 also in mixed precision."""
    dtypes = [parameter.dtype for one in lot for parameter in one.parameters]
    # Frozen parameters are never updated, so they need no wider masters than what was given.
    least = torch.float32 if lot[0].parameters[0].requires_grad else dtypes[0]
    master = reduce(torch.promote_types, dtypes, least)
    wire = master if options.reduce_dtype == "fp32" else WIRE[options.reduce_dtype]
    compute = master if options.precision == "fp32" else torch.bfloat16
    if wide:
        compute = torch.promote_types(master, torch.float32)
    return Types(master, compute, wire)
