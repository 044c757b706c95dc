"""Checkpoints through torch.distributed.checkpoint, readable in any other topology.

Everything is saved under the model's own names, ``{piece}.{parameter}``, as DTensors that say
which part of the whole a rank holds; the pipeline rank, the shard and the replica are no part of
a name. So torch reshards on load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from zeropp.engine.checkpoint_directory import checked, write_whole
from zeropp.engine.replicas import Name, Replicas


def state_of(
    owned: Mapping[Name, tuple[Replicas, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    steps_done: int,
) -> dict[str, Any]:
    """The state dict of one rank; its tensors share memory with what they describe."""
    prepare_optimizer(optimizer)
    state: dict[str, Any] = {"steps_done": torch.tensor(steps_done)}
    for (piece, name), (replicas, parameter) in owned.items():
        key = f"{piece}.{name}"
        state[f"model.{key}"] = replicas.distributed((piece, name), parameter.detach())
        for kind, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                state[f"optimizer.{key}.{kind}"] = replicas.distributed((piece, name), value)
    return state


def save(state: dict[str, Any], directory: Path | str) -> None:
    """Write a state dict, whole or not at all; collective."""
    write_whole(
        Path(directory), lambda place: state_dict_saver.save(state, checkpoint_id=str(place))
    )


def load(state: dict[str, Any], directory: Path | str) -> int:
    """Read into the tensors of a state dict; collective. Gives the number of steps done.

    Raises CheckpointError where the checkpoint is not whole.
    """
    state_dict_loader.load(state, checkpoint_id=str(checked(Path(directory))))
    return int(state["steps_done"])


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's state exist, all zeros, if it has none yet: one step of rate zero."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
