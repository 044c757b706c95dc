"""How optimizers are made, from a configuration or by a caller's function, and what clipping needs.

All contenders and the one-process reference call ``build_optimizer``, ``clip_factor`` and
``norm_power``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from zeropp.engine.ranks.errors import refusal
from zeropp.engine.settings import MakeOptimizer
from zeropp.types.layout import InfeasibleError
from zeropp.types.training import OptimizerConfig

_ROW = 2**16  # numbers of a tensor whose norm a CPU takes at once, within 1e-7
Groups = Mapping[str, list[nn.Parameter]]


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
