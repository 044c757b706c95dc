"""Tries a caller's optimizer on a few numbers, before it is given the model's.

The engine hands an optimizer flat shards of parameters, so it must work element by element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.engine.optimizer import is_of_elements, made_optimizer
from zeropp.layout import InfeasibleError
from zeropp.settings import MakeOptimizer
from zeropp.training import OptimizerConfig

_TRIED = 4  # elements, with which an optimizer is tried before it is given the model's
_VALUES, _GRADIENTS = (0.5, -1.5, 2.5, 0.25), (1.0, 2.0, -0.5, 0.125)
_GIVEN = "groups of flat tensors (as in lambda groups: torch.optim.AdamW(groups['all']))"
_SHAPES: Mapping[str, tuple[int, ...]] = {"flat": (_TRIED,), "halves": (2,), "matrix": (2, 2)}
Groups = Mapping[str, list[nn.Parameter]]


def check_elementwise(asked: MakeOptimizer, names: Iterable[str], device: torch.device) -> None:
    """Raise InfeasibleError for an optimizer that updates an element by looking at others, which
    may be on other ranks or belong to other parameters, or at the shape of its parameter, which a
    flat shard does not have: four elements at once must be updated like two and two, and like a
    matrix of two by two. What it keeps must be one number per element or one per tensor, as no
    other topology could load anything else. ``asked`` is called once for each."""
    names, updated = list(names), dict[str, Tensor]()
    for kind, shape in _SHAPES.items():
        with _refusal(f"cannot be made from {_GIVEN}"):
            optimizer, groups = _tried(asked, names, shape, device)
        name = type(optimizer).__name__
        with _refusal(f"{name} cannot take a step"):
            optimizer.step()
            optimizer.step()
        updated[kind] = torch.cat([p.detach().flatten() for n in names for p in groups[n]])
    way_out = "so it cannot update parts of parameters (take one that does, such as AdamW or SGD"
    if not torch.allclose(updated["flat"], updated["halves"], rtol=1e-5, equal_nan=True):
        raise InfeasibleError(
            f"optimizer: {name} does not work element by element (two parameters of two elements "
            f"are updated in another way than one of four), {way_out})"
        )
    if not torch.allclose(updated["flat"], updated["matrix"], rtol=1e-5, equal_nan=True):
        raise InfeasibleError(
            f"optimizer: {name} updates a matrix in another way than the same numbers in a row, "
            f"{way_out}; weight decay of matrices alone is a group: group_of)"
        )
    for tensor, values in optimizer.state.items():
        _check_state(values, tensor)


@contextmanager
def _refusal(what: str) -> Iterator[None]:
    """Inside this context an error is an InfeasibleError of one line about the optimizer."""
    try:
        yield
    except InfeasibleError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InfeasibleError(f"optimizer: {what}: {lines[0]}") from error


def _check_state(values: Mapping[str, Any], tensor: Tensor) -> None:
    for kind, value in values.items():
        is_number = value is None or isinstance(value, bool | int | float)
        if not (is_number or (isinstance(value, Tensor) and value.shape in (tensor.shape, ()))):
            raise InfeasibleError(
                f"optimizer: keeps {kind!r} of a parameter, which is neither one number nor one "
                "per element, so no other topology could load it (take an optimizer whose state is "
                "of the size of its parameters, such as AdamW)"
            )


def state_bytes(asked: OptimizerConfig | MakeOptimizer, groups: Iterable[str]) -> dict[str, float]:
    """Bytes that the optimizer keeps of each element of each optimizer group, found by one step on
    a few numbers. Raises InfeasibleError as ``Updater.make`` does."""
    names, cpu = list(groups), torch.device("cpu")
    if not isinstance(asked, OptimizerConfig):
        check_elementwise(asked, names, cpu)
    optimizer, tensors = _tried(asked, names, _SHAPES["flat"], cpu)
    optimizer.step()
    return {
        name: sum(
            value.nbytes / _TRIED
            for value in optimizer.state.get(tensors[name][0], {}).values()
            if is_of_elements(value, tensors[name][0])
        )
        for name in names
    }


def _tried(
    asked: OptimizerConfig | MakeOptimizer,
    names: Iterable[str],
    shape: tuple[int, ...],
    device: torch.device,
) -> tuple[torch.optim.Optimizer, Groups]:
    """An optimizer of ``_TRIED`` numbers per group, in tensors of one shape with gradients."""

    def few() -> list[nn.Parameter]:
        made = []
        for values, gradients in zip(
            _parts(_VALUES, shape), _parts(_GRADIENTS, shape), strict=True
        ):
            made.append(nn.Parameter(values.to(device)))
            made[-1].grad = gradients.to(device)
        return made

    groups = defaultdict(few, {name: few() for name in names})
    return made_optimizer(asked, groups), groups


def _parts(numbers: Sequence[float], shape: tuple[int, ...]) -> Iterable[Tensor]:
    return torch.tensor(numbers).view(-1, *shape).unbind()
