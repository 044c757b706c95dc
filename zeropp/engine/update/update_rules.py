"""How optimizers are made, from a configuration or by a caller's function, which of their groups
are given flat shards of parameters and which whole ones, and what clipping needs.

All contenders and the one-process reference call ``build_optimizer``, ``clip_factor`` and
``norm_power``.

Flat are those that optimizers of torch update element by element, and all where a caller says that
his do so. All others are whole, as an optimizer may look at a parameter's shape or at its other
elements (Muon, Shampoo, Adafactor). What looks at other parameters, ``zeropp.check`` finds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import get_total_norm

from zeropp.engine.ranks.errors import refusal
from zeropp.engine.settings import MakeOptimizer
from zeropp.types.layout import InfeasibleError
from zeropp.types.training import OptimizerConfig

_ROW = 2**16  # numbers of a tensor whose norm a CPU takes at once, within 1e-7
Groups = Mapping[str, list[nn.Parameter]]
_ELEMENTWISE = (
    *(optim.SGD, optim.ASGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop),
)
_KEPT = {optim.SGD: 0, optim.Muon: 0, optim.RMSprop: 1, optim.ASGD: 1, optim.Adagrad: 1}
_MORE = ("momentum", "centered", "amsgrad")  # each of these options keeps one number more
Shapes = Mapping[str, Sequence[tuple[int, ...]]]


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay (arXiv 1711.05101), or plain SGD without momentum.

    AdamW is fused for every contender. By default torch would update DTensors one by one, but plain
    tensors together, which would favour the contenders that have plain tensors.
    """
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one, for different parameters. Groups and state are theirs, whatever
    becomes of these, and are shown here."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts: Sequence[torch.optim.Optimizer] = ()
        self._made: list[dict[str, Any]] = []  # while torch compares the groups
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what no part would see."""
        if name not in ("param_groups", "state"):
            super().__setattr__(name, value)
        elif self.parts:
            raise AttributeError(f"optimizer.{name}: each of several optimizers has its own")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all, in their order."""
        groups = [group for part in self.parts for group in part.param_groups]
        return groups if self.parts else self._made

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """What each keeps of its parameters; to be read."""
        kept = chain.from_iterable(part.state.items() for part in self.parts)
        return MappingProxyType({k: v for k, v in kept if isinstance(k, Tensor)})

    def state_dict(self) -> dict[str, Any]:
        """The state dict of each, in their order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` has given into each."""
        for part, own in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(own)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """A step of each."""
        del closure
        for part in self.parts:
            part.step()


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that were given: several, or the one itself."""
    return optimizer.parts if isinstance(optimizer, Optimizers) else [optimizer]


def made_optimizer(asked: OptimizerConfig | MakeOptimizer, groups: Groups) -> torch.optim.Optimizer:
    """The optimizer that was asked for, of tensors by group, or several of them as one; raises
    InfeasibleError for another thing than optimizers."""
    if isinstance(asked, OptimizerConfig):
        return build_optimizer(chain.from_iterable(groups.values()), asked)
    known = " and ".join(map(repr, sorted(groups)))
    with refusal(
        f"optimizer: cannot be made from the groups {known}",
        "as in lambda groups: torch.optim.AdamW(groups['all'])",
    ):
        made: Any = asked(groups)
        parts = list(made) if isinstance(made, list | tuple) else [made]
        for part in parts or [made]:
            if not isinstance(part, torch.optim.Optimizer):
                raise InfeasibleError(
                    f"optimizer: gives {type(part).__name__}, but a torch.optim.Optimizer is "
                    "needed, or a list of them"
                )
        return parts[0] if len(parts) == 1 else Optimizers(parts)


def own_numbers(
    part: torch.optim.Optimizer, kept: Mapping[Any, Any], made: Mapping[str, Any]
) -> dict[str, Any]:
    """What an optimizer keeps beside its tensors: under other keys of its state, in a state dict of
    its own, and in attributes that are not what they were when it was ``made``."""
    has_own = type(part).state_dict is not torch.optim.Optimizer.state_dict
    saved = part.state_dict() if has_own else {}
    own = {f"own {key}": saved[key] for key in saved if key not in ("state", "param_groups")}
    moved = {k: v for k, v in vars(part).items() if is_plain(v) and v is not made.get(k, part)}
    own |= {f"attribute {key}": value for key, value in moved.items()}
    return own | {f"state {k}": v for k, v in kept.items() if not isinstance(k, Tensor)}


def plain(value: object) -> object:
    """A number instead of a tensor with one."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def is_plain(value: object) -> bool:
    """Whether a value is a number (also as a tensor), a switch or a tuple of them."""
    if isinstance(value, tuple):
        return all(is_plain(part) for part in value)
    return value is None or isinstance(plain(value), (bool, int, float))


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """The factor by which clipping scales all gradients, given their global norm, on the device. As
    in torch's ``clip_grad_norm_`` it is ``clip_norm / (norm + 1e-6)`` but at most 1, and NaN if the
    norm is NaN."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)


def norm_power(
    parts: Iterable[tuple[Tensor, float]], device: torch.device, norm_type: float = 2.0
) -> Tensor:
    """This rank's part of the gradient's ``norm_type``-norm to that power in fp64; the parts of all
    ranks add up to it. Of the infinite norm it is the largest number, and theirs the largest.

    ``parts``: (local gradient, number of ranks that hold the same).
    Torch's ``get_total_norm`` uses one kernel for many gradients, since one launch per tensor would
    cost a contender with many small tensors more than one with few large tensors. Gradients of 16
    bits are summed in fp32, one by one. On a CPU torch adds the squares of a tensor up one after
    another in fp32, which is off by 1e-3 at 20 million numbers: there tensors are taken in rows.
    """
    alike: defaultdict[tuple[float, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient, copies in parts:
        rows = (
            torch.split(gradient.reshape(-1), _ROW) if gradient.device.type == "cpu" else [gradient]
        )
        alike[copies, gradient.dtype].extend(row for row in rows if row.numel())
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, dtype), gradients in alike.items():
        if torch.finfo(dtype).bits < 32:
            gradients = [
                torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) for g in gradients
            ]
        norm = get_total_norm(gradients, norm_type).double()
        is_largest = math.isinf(norm_type)
        total = torch.maximum(total, norm) if is_largest else total + norm**norm_type / copies
    return total


class GroupUse(NamedTuple):
    """What an optimizer does with the parameters of a group: whether it gets them ``whole``, and
    how many ``numbers`` it keeps of an element."""

    whole: bool
    numbers: int


def uses_of(asked: MakeOptimizer, shapes: Shapes, device: torch.device) -> dict[str, GroupUse]:
    """What an optimizer does with its groups, of parameters of these ``shapes``. A group whose
    parameters it treats in different ways (no decay of vectors) is whole, too. Numbers are those
    that torch's own keep; any other is taken to keep two, and one more for a momentum. Raises
    InfeasibleError if it goes by places in a group, which are others on every rank."""
    try:
        groups, optimizer = _made_empty(asked, shapes, torch.device("meta"))
    except InfeasibleError:  # which says why, here or there
        groups, optimizer = _made_empty(asked, shapes, device)
    else:
        device = torch.device("meta")
    turned = {name: group[::-1] for name, group in shapes.items()}
    mirrored, other = _made_empty(asked, turned, device)
    found, again, uses = _uses(optimizer), _uses(other), {}
    # What is in no group is refused by name when the optimizer is made of real ones.
    nothing = GroupUse(False, 0), ""
    for name, members in groups.items():
        of_group = [found.get(id(one), nothing) for one in members]
        if of_group != [again.get(id(one), nothing) for one in mirrored[name][::-1]]:
            raise InfeasibleError(
                f"optimizer: treats parameters of group {name!r} by their places, where each "
                "rank has others (give group_of=, and each group its own settings)"
            )
        kinds = [use for use, _ in of_group]
        is_whole = len(set(of_group)) > 1 or any(use.whole for use in kinds)
        uses[name] = GroupUse(is_whole, max((use.numbers for use in kinds), default=0))
    return uses


def _uses(optimizer: optim.Optimizer) -> dict[int, tuple[GroupUse, str]]:
    """What an optimizer does with each parameter, by its identity, and the place and options of
    what updates it."""
    found: dict[int, tuple[GroupUse, str]] = {}
    for place, part in enumerate(parts_of(optimizer)):
        hooks = [one for name, one in vars(part).items() if "hook" in name or name == "step"]
        whole = type(part) not in _ELEMENTWISE or any(hooks)
        for group in part.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            numbers = _KEPT.get(type(part), 2) + sum(bool(group.get(name)) for name in _MORE)
            use = GroupUse(whole, numbers), f"{place} {plain}"
            found |= dict.fromkeys(map(id, group["params"]), use)
    return found


def _made_empty(
    asked: MakeOptimizer, shapes: Shapes, device: torch.device
) -> tuple[dict[str, list[nn.Parameter]], optim.Optimizer]:
    """Parameters without memory, by group, and the optimizer of them, which takes no step."""
    empty = torch.zeros((), device=device)
    groups = {
        name: [nn.Parameter(empty.expand(shape)) for shape in group]
        for name, group in shapes.items()
    }
    return groups, made_optimizer(asked, groups)
