"""What an optimizer keeps, and whether it works element by element: tried on a few numbers.

The optimizer itself takes the steps, with its own settings, but on other tensors in place of its
own. Afterwards it is as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.layout import InfeasibleError

PROBED = 4  # elements
_VALUES, _GRADIENTS = (0.5, -1.5, 2.5, 0.25), (1.0, 2.0, -0.5, 0.125)


def kept_by(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the optimizer keeps of a tensor of ``PROBED`` elements after one step, by its own names,
    for each of its groups."""
    places = [[slice(0, PROBED)] for _ in optimizer.param_groups]
    with _standing_in(optimizer, places) as tensors:
        optimizer.step()
        return [dict(optimizer.state.get(one, {})) for (one,) in tensors]


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise InfeasibleError for an optimizer that updates an element by looking at others, which
    may be on other ranks or belong to other parameters.

    Four elements at once must be updated like two and two. An optimizer that has made its state at
    construction (Adagrad) has none for other tensors and is not tried.
    """
    if optimizer.state:
        return
    name = type(optimizer).__name__
    try:
        whole, parts = (_after_two_steps(optimizer, size) for size in (PROBED, 2))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InfeasibleError(f"optimizer: {name} cannot take a step: {lines[0]}") from error
    if not torch.allclose(whole, parts, rtol=1e-5, equal_nan=True):
        raise InfeasibleError(
            f"optimizer: {name} does not work element by element (two parameters of two elements "
            "are updated in another way than one of four), so it cannot update parts of parameters "
            "(take one that does, such as AdamW or SGD)"
        )


def _after_two_steps(optimizer: torch.optim.Optimizer, size: int) -> Tensor:
    """Four numbers per group of the optimizer after two steps, in tensors of ``size`` elements."""
    places = [
        [slice(begin, begin + size) for begin in range(0, PROBED, size)]
        for _ in optimizer.param_groups
    ]
    with _standing_in(optimizer, places) as tensors:
        optimizer.step()
        optimizer.step()
        return torch.cat([one.detach().double().cpu() for lot in tensors for one in lot])


@contextmanager
def _standing_in(
    optimizer: torch.optim.Optimizer, places: Sequence[Sequence[slice]]
) -> Iterator[list[list[nn.Parameter]]]:
    """Inside this context the optimizer has no state, and each of its groups has small tensors
    instead of its own: one tensor per slice of ``places``, with those of the four test values."""
    groups, state = optimizer.param_groups, optimizer.state
    tensors = [
        [_stand_in(group["params"][0], place) for place in lot]
        for group, lot in zip(groups, places, strict=True)
    ]
    pairs = zip(groups, tensors, strict=True)
    optimizer.param_groups = [{**group, "params": list(lot)} for group, lot in pairs]
    optimizer.state = defaultdict(dict)
    try:
        yield tensors
    finally:
        optimizer.param_groups, optimizer.state = groups, state


def _stand_in(like: Tensor, place: slice) -> nn.Parameter:
    made = nn.Parameter(like.new_tensor(_VALUES[place]))
    made.grad = like.new_tensor(_GRADIENTS[place])
    return made
