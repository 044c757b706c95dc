"""Which parameters the backwards of a step have reached.

A pipeline rank sends zeros where the output of a stage does not depend on its inputs (a layer that
detaches them), because its peer waits for a message. In one process no backward would go on there.
So uses are noted by backward, and those of earlier stages do not count where a later stage has cut
the graph of the same microbatch. For example, if stage 2 detaches microbatch 5, the backwards of
stages 0 and 1 for microbatch 5 run on zeros and use nothing, while those of stage 2 and later do.
"""

from __future__ import annotations

from collections.abc import Iterable

Cut = tuple[int, int]  # stage and microbatch whose backward gave its inputs no gradient


class Uses:
    """What this rank's backwards have reached in a step, by the identities of parameters.

    ``by_layers`` are the weights whose layers compute their gradients and note them here; autograd
    has no part in these, so it calls no hooks of theirs.
    """

    def __init__(self) -> None:
        self.by_layers: set[int] = set()
        self.cuts: set[Cut] = set()
        self._by_backward: dict[tuple[int, int], set[int]] = {}
        self._current: set[int] = set()

    def begin_step(self) -> None:
        """Forget what the last step has used."""
        self.cuts.clear()
        self._by_backward.clear()
        self._current = set()

    def begin_backward(self, stage: int, microbatch: int) -> None:
        """Count what is added from here on as used by this backward."""
        self._current = self._by_backward.setdefault((stage, microbatch), set())

    def add(self, parameter: object) -> None:
        """Note a parameter that has had a gradient."""
        self._current.add(id(parameter))

    def found(self, cuts: Iterable[Cut] = ()) -> set[int]:
        """The parameters that were used, given all cuts of this rank's pipeline."""
        last: dict[int, int] = {}  # by microbatch, the last stage that has cut its graph
        for stage, microbatch in cuts:
            last[microbatch] = max(stage, last.get(microbatch, 0))
        return {
            parameter
            for (stage, microbatch), parameters in self._by_backward.items()
            if stage >= last.get(microbatch, 0)
            for parameter in parameters
        }
