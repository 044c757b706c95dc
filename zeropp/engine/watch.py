"""What a step must know of parameters: which ones anything has used, and that none was changed.

One process leaves a parameter alone in a step in which nothing has used it: it has no gradient, so
that neither weight decay nor momentum moves it, and Adam does not count the step. In a flat buffer
the parameter has a gradient of zeros, with which all of this would happen. So the sums that end
every step anyway also say which parameters no rank has used, and the optimizer is given no gradient
for those.

Freezing or unfreezing a parameter after the model was built would need other buffers, and some
hooks that are registered then would not be called as autograd calls them: those that
``register_hook`` adds to weights whose gradients layers compute, and those that
``register_post_accumulate_grad_hook`` adds. So these are errors, on every rank, in the next step
and before anything is updated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Sized

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine.deferred import StageMicrobatch, Uses, hooks_of
from zeropp.engine.errors import gathered_texts, largest_of_all, sum_of_all
from zeropp.engine.flat import FlatParameters, Held
from zeropp.engine.flat_layout import Name, Slot, Updater, runs
from zeropp.engine.options import Piece
from zeropp.layout import Layout

# Places of a report's numbers; the parameters' own follow, each at ``_FIRST`` plus its number.
_CHANGED, _CUT, _HOLDS_TIED, _IDLE, _FIRST = range(5)


class ParameterWatch:
    """Watches the parameters of one rank; all ranks must construct it.

    ``uses``: the parameters that backwards have reached. Hooks that the watch registers add those
    whose gradients autograd makes; delayed weight gradients add themselves.
    ``tied``: two names of one parameter, whose two copies may be on two ranks. ``pieces``: the
    modules that have the parameters.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        uses: Uses,
        layout: Layout,
        *,
        tied: tuple[Name, Name] | None,
        pieces: Iterable[Piece],
    ) -> None:
        self._known = [(one, [*map(id, one.module.parameters())]) for one in pieces]
        self._flats = [flat for flat in flats if flat.trainable]
        self._uses, self._tied, self._dp_index = uses, tied, layout.dp_index(dist.get_rank())
        self._flags = [
            (one.slot.names[0], parameter, parameter.requires_grad)
            for flat in flats
            for one in flat.held
            for parameter in one.parameters
        ]
        trained = [one for flat in self._flats for one in flat.held]
        own = [one.slot for one in trained if not self._is_tied(one.slot)]
        # Parameters are numbered over all pipeline ranks, rank 0's first, with room for as many on
        # each rank as the fullest has. The tied parameter, which two ranks may hold, is last.
        most = largest_of_all(len(own))
        first = most * layout.coordinates(dist.get_rank())["pp"]
        self._tied_place = most * layout.pp
        self._places = {slot.names: first + number for number, slot in enumerate(own)}
        self._parameters: dict[int, list[Tensor]] = {}  # by their numbers
        for one in trained:
            self._parameters.setdefault(self._place(one.slot), []).extend(one.parameters)
        self.size = _FIRST + self._tied_place + 1  # of a report
        self._holders = layout.dp  # ranks that hold the same parameter
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(uses.add)  # type: ignore[no-untyped-call]
            for one in trained
            for parameter in one.parameters
            if parameter.requires_grad
        ]
        self._watched_hooks = [*self._hooks_to_watch(trained)]

    def check_same(self) -> None:
        """Raise RuntimeError if a module has other parameters than when the watch was made. They
        would compute, but nothing would train them."""
        for piece, known in self._known:
            if [*map(id, piece.module.parameters())] != known:
                raise RuntimeError(
                    f"layers[{piece.index}]: parameters were replaced, added or taken away after "
                    "parallelize, which would train none of them (change layers before, or build "
                    "the model anew)"
                )

    def report(self) -> Tensor:
        """What this rank has to say after the backwards of a step, as numbers to be added to those
        of all others: whether a parameter was changed, whether a graph was cut, whether it holds
        the tied parameter, whether it has used no parameter, and which of its parameters it has not
        used (1 for each of these)."""
        return self._report(self._uses.cuts)

    def leave_out_unused(self, reports: Sequence[float], updater: Updater) -> None:
        """Take the gradients of what no rank has used from the optimizer's tensors, given the sum
        of all ranks' reports; collective.

        Raises RuntimeError on every rank where a parameter was frozen, unfrozen or given a hook
        since the model was built, or where no parameter at all was used.
        """
        if reports[_CHANGED]:
            self._raise_changed()
        if reports[_CUT]:
            reports = self._reports_without_cut_off()
        if reports[_IDLE] == dist.get_world_size():
            raise RuntimeError(
                "train_step: the loss depends on nothing that is trained (are all parameters "
                "frozen, or does a layer detach what it gives?); nothing was updated"
            )
        without, tied_holders = reports[_FIRST:], reports[_HOLDS_TIED]
        unused = {
            place
            for place in self._parameters
            if 0 < without[place] == (tied_holders if place == self._tied_place else self._holders)
        }
        if not unused:
            return
        for flat in self._flats:
            made = []
            for one in flat.owned:
                found = runs(one, flat.layout.slots, lambda slot: self._place(slot) in unused)
                parts = updater.split(one, [stretch for stretch, _ in found])
                for part, (_, is_unused) in zip(parts, found, strict=True):
                    if is_unused:
                        part.tensor.grad = None
                made += parts
            flat.owned = made

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _report(self, cuts: Collection[StageMicrobatch]) -> Tensor:
        used = self._uses.found(cuts)
        found = torch.zeros(self.size, dtype=torch.float64)
        found[_CHANGED] = bool(self._changed())
        found[_CUT] = bool(cuts)
        found[_HOLDS_TIED] = self._tied_place in self._parameters
        found[_IDLE] = not used
        for place, parameters in self._parameters.items():
            if not any(id(parameter) in used for parameter in parameters):
                found[_FIRST + place] = 1.0
        return found

    def _reports_without_cut_off(self) -> list[float]:
        """The sum of all ranks' reports, when all ranks know where later stages have cut the graph;
        collective."""
        known: list[tuple[int, set[StageMicrobatch]]] = [(0, set())] * dist.get_world_size()
        dist.all_gather_object(known, (self._dp_index, self._uses.cuts))
        mine = {cut for dp_index, cuts in known if dp_index == self._dp_index for cut in cuts}
        return sum_of_all(self._report(mine)).tolist()

    def _is_tied(self, slot: Slot) -> bool:
        return any(name in slot.names for name in self._tied or ())

    def _place(self, slot: Slot) -> int:
        return self._tied_place if self._is_tied(slot) else self._places[slot.names]

    def _hooks_to_watch(self, trained: Iterable[Held]) -> Iterator[tuple[Name, Sized, int]]:
        """Every parameter's hooks that a step would not call, with their number today."""
        for one in trained:
            for parameter in one.parameters:
                for hooks in self._hooks_that_fail(parameter):
                    yield one.slot.names[0], hooks, len(hooks)

    def _hooks_that_fail(self, parameter: Tensor) -> Iterator[Sized]:
        """The hooks of a parameter by kind, of the kinds that a step would not call as autograd
        does."""
        if parameter.requires_grad:
            yield hooks_of(parameter.register_post_accumulate_grad_hook)
            if id(parameter) in self._uses.by_layers:
                yield hooks_of(parameter.register_hook)

    def _changed(self) -> str:
        """What was done to a parameter that would need another model; empty if nothing was."""
        for (piece, name), parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                return f"requires_grad of layers[{piece}] {name!r} was changed"
        for (piece, name), hooks, count in self._watched_hooks:
            if len(hooks) > count:
                return f"a hook of layers[{piece}] {name!r} was registered"
        return ""

    def _raise_changed(self) -> None:
        for rank, changed in enumerate(gathered_texts(self._changed())):
            if changed:
                raise RuntimeError(
                    f"train_step: {changed} after parallelize (on rank {rank}); nothing was "
                    "updated (save, then build the model anew from layers with the hooks and "
                    "frozen parameters that they should have)"
                )
