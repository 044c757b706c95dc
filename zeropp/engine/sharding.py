"""Sorts the parameters of a chunk into flat buffers, which are gathered and reduced together.

A chunk has one buffer for weights whose gradients may be delayed (so that memory for these
gradients is allocated only with the first of them), or several of about the same size if its
gradients are reduced in parts. It has one for its other trained parameters, one for frozen
parameters, and one for each parameter that another chunk has, too (so that both divide it in the
same way).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import nn

from zeropp.engine.layers.deferred import hooks_of
from zeropp.engine.parameters.flat import FlatParameters, Types
from zeropp.engine.parameters.flat_layout import Name, lay_out
from zeropp.engine.ranks.collectives import DataGroups
from zeropp.engine.ranks.lanes import Lanes
from zeropp.engine.settings import Settings
from zeropp.engine.walk import LayerSizes
from zeropp.schedule.cuts import runs
from zeropp.schedule.plan import Plan
from zeropp.types.layout import InfeasibleError


@dataclass
class _NamedParameter:
    """A parameter with all its names in the chunk, or several that are tied."""

    names: tuple[Name, ...]
    parameters: list[nn.Parameter]


def make_flats(
    pieces: Mapping[int, nn.Module],
    deferred: Iterable[nn.Parameter],
    *,
    sizes: Sequence[LayerSizes],
    groups: DataGroups,
    lanes: Lanes,
    plan: Plan,
    settings: Settings,
) -> Iterator[FlatParameters]:
    """The buffers of a chunk's ``pieces``, which are modules by their index in the model.
    ``deferred`` are the weights whose gradients may be delayed. Raises InfeasibleError for
    parameters that cannot be sharded."""
    entries, tied = _parameters(pieces), settings.tied
    zero, rank = plan.layout.replicate_zero == 1, dist.get_rank()
    replica = plan.layout.coordinates(rank)["replicate"]
    ends = [entry for name in tied or () for entry in entries if name in entry.names]
    if len(ends) == 2 and ends[0] is not ends[1]:  # the model makes them one
        ends[0].names += ends[1].names
        ends[0].parameters += ends[1].parameters
        entries.remove(ends[1])
    delayed = {id(weight) for weight in deferred}
    buckets = defaultdict[
        tuple[bool, bool, Name | None, torch.dtype | None, int], list[_NamedParameter]
    ](list)
    weights = [e.parameters[0] for e in reversed(entries) if id(e.parameters[0]) in delayed]
    parts = runs([weight.numel() for weight in weights], plan.gradient_parts)
    part_of = dict(zip(map(id, weights), parts, strict=True))  # a backward comes to part 0 first
    for entry in entries:
        first = entry.parameters[0]
        shared = next((name for name in entry.names if name in (tied or ())), None)
        late = shared is None and first.requires_grad and id(first) in delayed
        # Layers that compute in several types keep them; mixed precision has one for all.
        kept_dtype = first.dtype if plan.precision == "fp32" else None
        part = part_of[id(first)] if late else 0
        buckets[first.requires_grad, late, shared, kept_dtype, part].append(entry)
    for (trainable, late, shared, *_), bucket in buckets.items():
        row, rows = (replica, plan.layout.replicate) if zero and trainable else (0, 1)
        # Both copies of a tied parameter are updated alike, so both ask by its first name.
        first_name = tied[0] if shared is not None and tied is not None else None
        members = []
        for entry in bucket:
            index, name = first_name or entry.names[0]
            group = sizes[index].kinds[name].group
            members.append((entry.names, entry.parameters[0].shape, group))
        layout = lay_out(
            members,
            plan.whole_groups if trainable else (),
            shard=plan.layout.shard_index(rank),
            shards=plan.layout.shards,
            row=row,
            rows=rows,
        )
        by_names = {entry.names: tuple(entry.parameters) for entry in bucket}
        yield FlatParameters(
            {slot: by_names[slot.names] for slot in layout.slots},
            layout,
            groups=groups,
            lanes=lanes,
            types=_types(bucket, plan),
            zero=zero and trainable,
            trainable=trainable,
            deferred=late,
        )


def _parameters(pieces: Mapping[int, nn.Module]) -> list[_NamedParameter]:
    """All parameters, each once, in the order of the model."""
    entries: dict[int, _NamedParameter] = {}
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
            entry = entries.setdefault(id(parameter), _NamedParameter((), [parameter]))
            entry.names += ((index, name),)
    return list(entries.values())


def _types(bucket: Sequence[_NamedParameter], plan: Plan) -> Types:
    dtypes = [parameter.dtype for entry in bucket for parameter in entry.parameters]
    # Frozen parameters are never updated, so they need no wider masters than what was given.
    least = torch.float32 if bucket[0].parameters[0].requires_grad else dtypes[0]
    master = reduce(torch.promote_types, dtypes, least)
    wire = master if plan.reduce_dtype == "fp32" else torch.bfloat16
    compute = master if plan.precision == "fp32" else torch.bfloat16
    return Types(master, compute, wire)
