"""What a step must know of parameters: which ones anything has used, and that none was changed.

One process leaves a parameter alone that nothing has used: it has no gradient, so that neither
weight decay nor momentum moves it. In a flat buffer it has a gradient of zeros, which would. So
the parameters that nothing on any rank has used since the beginning are put back after every
update. From its first use on a parameter takes part in every update.

Freezing or unfreezing a parameter after the model was built would need other buffers, so it is an
error, on every rank, in the next step and before anything is updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zeropp.engine.flat import FlatParameters
from zeropp.engine.flat_layout import Name, Slot

_VALUES = ""  # a parameter's own values, beside the names of what an optimizer keeps of it
_Report = tuple[str, list[Name]]  # a parameter that was changed, parameters newly used


class ParameterWatch:
    """Watches the parameters of one rank. ``used``: identities of parameters whose gradients came
    in another way than through autograd, which others add to."""

    def __init__(self, flats: Sequence[FlatParameters], used: set[int]) -> None:
        held = [one for flat in flats for one in flat.held]
        trained = [one for flat in flats if flat.trainable for one in flat.held]
        self._flats, self._used = flats, used
        self._flags = [
            (one.slot.names[0], parameter, parameter.requires_grad)
            for one in held
            for parameter in one.parameters
        ]
        self._unused = {one.slot.names[0]: one for one in trained}
        self._known = False  # of no step yet what it has used
        self._hooks: dict[int, RemovableHandle] = {
            id(parameter): parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for one in self._unused.values()
            for parameter in one.parameters
            if parameter.requires_grad
        }

    def has_news(self) -> bool:
        """Whether this rank has something to report after the backwards of a step."""
        return bool(self._changed() or self._newly_used())

    def exchange(self) -> None:
        """Tell all ranks what is new on any; collective, and called where any rank has news.

        Raises RuntimeError on every rank where ``requires_grad`` of a parameter was changed.
        """
        mine = self._newly_used()
        reports: list[_Report] = [("", [])] * dist.get_world_size()
        dist.all_gather_object(reports, (self._changed(), mine))
        for rank, (changed, _) in enumerate(reports):
            if changed:
                raise RuntimeError(
                    f"train_step: requires_grad of {changed} was changed after parallelize (on "
                    f"rank {rank}); nothing was updated (save, then build the model anew with the "
                    "parameters frozen as they should be)"
                )
        for name in {name for _, names in reports for name in names}:
            held = self._unused.pop(name, None)
            for parameter in held.parameters if held is not None else ():
                if id(parameter) in self._hooks:
                    self._hooks.pop(id(parameter)).remove()
        self._known = True

    @contextmanager
    def keeping_unused(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """An update inside leaves what nothing has used yet, and what the optimizer keeps of it,
        as it was."""
        before = {key: view.clone() for key, view in self._views(optimizer)}
        with torch.no_grad():
            # Of values and gradients that are zero, an optimizer that now begins keeps what every
            # parameter's state begins with.
            for (_, kind), view in self._views(optimizer):
                if kind == _VALUES:
                    view.zero_()
        yield
        with torch.no_grad():
            for key, view in self._views(optimizer):
                if key in before:
                    view.copy_(before[key])

    def _note(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))

    def _newly_used(self) -> list[Name]:
        return [
            name
            for name, one in self._unused.items()
            if any(id(parameter) in self._used for parameter in one.parameters)
        ]

    def _changed(self) -> str:
        for (piece, name), parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                return f"layers[{piece}] {name!r}"
        return ""

    def _views(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[Name, str], Tensor]]:
        """What this rank updates of unused parameters: values, and the optimizer's tensors."""
        for flat in self._flats if self._known and self._unused else ():
            groups = dict(flat.layout.groups())
            for slot in _slots(flat, self._unused):
                if slot.group not in groups:
                    continue
                group = groups[slot.group]
                mine, owned = slot.stretch.meet(group), flat.owned[slot.group]
                kept = {_VALUES: owned.detach(), **optimizer.state.get(owned, {})}
                for kind, tensor in kept.items():
                    if len(mine) and isinstance(tensor, Tensor) and tensor.shape == owned.shape:
                        yield (slot.names[0], kind), tensor[mine.inside(group)]


def _slots(flat: FlatParameters, names: Iterable[Name]) -> Iterator[Slot]:
    wanted = set(names)
    yield from (one.slot for one in flat.held if flat.trainable and one.slot.names[0] in wanted)
