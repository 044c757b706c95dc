"""The optimizer of what one rank updates, and the gradients that it reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from zeropp.engine.flat import FlatParameters
from zeropp.engine.options import MakeOptimizer
from zeropp.engine.owned import Updater, is_of_elements
from zeropp.engine.probe import PROBED, check_elementwise
from zeropp.layout import InfeasibleError, Layout
from zeropp.optimizer import build_optimizer, square_norm
from zeropp.training import OptimizerConfig

TORN = (
    "an optimizer's error left some ranks updated and others not; build the model anew and load "
    "the last checkpoint"
)


def make_updater(
    flats: Iterable[FlatParameters],
    asked: OptimizerConfig | MakeOptimizer,
    device: torch.device,
    lr_schedule: Callable[[int], float] | None,
) -> Updater:
    """The optimizer that was asked for, over what this rank updates of the flat buffers; a group
    that this rank has nothing of has one empty tensor.

    Raises InfeasibleError for an optimizer that does not work element by element.
    """
    groups: defaultdict[str, list[nn.Parameter]] = defaultdict(list)
    for flat in flats:
        for one in flat.owned:
            groups[one.group].append(one.tensor)
    groups.default_factory = lambda: [nn.Parameter(torch.empty(0, device=device))]
    if not groups:  # optimizers refuse to have nothing at all
        groups["all"]
    clip_norm = 0.0
    optimizer = _made(asked, groups)
    if isinstance(asked, OptimizerConfig):
        clip_norm = asked.clip_norm
    else:
        check_elementwise(optimizer)
    _check_whole(optimizer, groups)
    names = {id(one): name for name, members in groups.items() for one in members}
    return Updater(optimizer, names, clip_norm, lr_schedule)


def _check_whole(
    optimizer: torch.optim.Optimizer, groups: Mapping[str, list[nn.Parameter]]
) -> None:
    """Refuse an optimizer that has left a group out."""
    known = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for name, members in groups.items():
        if any(id(one) not in known for one in members):
            raise InfeasibleError(
                f"optimizer: has nothing of group {name!r}, whose parameters would never be "
                f"updated (give it groups[{name!r}], or freeze these parameters)"
            )


def state_bytes(asked: OptimizerConfig | MakeOptimizer, groups: Iterable[str]) -> dict[str, float]:
    """Bytes that the optimizer keeps of each element of each optimizer group, found by one step on
    a few numbers. Raises InfeasibleError as ``make_updater`` does."""
    tensors = {name: [nn.Parameter(torch.ones(PROBED))] for name in groups}
    given = defaultdict(lambda: [nn.Parameter(torch.empty(0))], tensors)
    optimizer = _made(asked, given)
    for (tensor,) in tensors.values():
        tensor.grad = torch.ones_like(tensor)
    if not isinstance(asked, OptimizerConfig):
        check_elementwise(optimizer)
    optimizer.step()
    return {
        name: sum(
            value.nbytes / PROBED
            for value in optimizer.state.get(tensor, {}).values()
            if is_of_elements(value, tensor)
        )
        for name, (tensor,) in tensors.items()
    }


def _made(
    asked: OptimizerConfig | MakeOptimizer, groups: Mapping[str, list[nn.Parameter]]
) -> torch.optim.Optimizer:
    if isinstance(asked, OptimizerConfig):
        return build_optimizer(chain.from_iterable(groups.values()), asked)
    made: object = asked(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise InfeasibleError(
            f"optimizer: gives {type(made).__name__}, but one torch.optim.Optimizer is needed"
        )
    return made


def square_norm_of(flats: Iterable[FlatParameters], layout: Layout, device: torch.device) -> Tensor:
    """This rank's part of the squared gradient norm; the parts of all ranks add up to it.

    Replicas that hold the same gradients count for one part of their number each.
    """
    copies = 1 if layout.replicate_zero else layout.replicate
    gradients = (one.tensor.grad for flat in flats for one in flat.owned)
    return square_norm(((one, copies) for one in gradients if one is not None), device)
