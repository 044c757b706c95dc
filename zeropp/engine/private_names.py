"""The private names of torch that training uses: for a timeout, the walk and checkpoints.

A release of torch may move or change them; ``tests/gloo/test_private_names.py`` says what no longer
works without each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled as is_profiled
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",
    "as_before",
    "default_timeout",
    "is_profiled",
    "is_traceable_wrapper_subclass",
    "kept_by_selective",
    "step_hooks",
    "tree_leaves",
]


def kept_by_selective(context: Any) -> Iterator[Any]:
    """What keeps a tensor in torch's context of selective recomputation: ``val``, with its
    ``version``. Torch 2.11 has lists of them by operator, later releases dictionaries."""
    for kept in context.storage.values():
        entries = kept.values() if isinstance(kept, dict) else kept
        for entry in tree_leaves(list(entries)):
            if isinstance(getattr(entry, "val", None), torch.Tensor):
                yield entry


def default_timeout(device: torch.device) -> timedelta | None:
    """How long the default group's collectives on a device wait for their peers, which torch does
    not pass on to other groups; None if its backend does not say."""
    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def step_hooks(optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
    """The hooks before and after steps of these optimizers, also those of every optimizer."""
    tables: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    for one in optimizers:
        tables += [one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks]
    return [hook for table in tables for hook in table.values()]


@contextmanager
def as_before(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside this context the optimizer has copies of all that it keeps beside its tensors, and its
    steps call no hooks, since no update is under way, in which they could clip; after it all is as
    before."""
    own, tensors = dict(vars(optimizer)), [x for g in optimizer.param_groups for x in g["params"]]
    inner = [one for one in own.values() if isinstance(one, torch.optim.Optimizer)]
    memo: dict[int, Any] = {id(one): one for one in (optimizer, *inner, *tensors)}
    hooks: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}
    try:
        for name, value in (own | hooks).items():
            # What cannot be copied stays, unless a step would change it.
            with nullcontext() if name in ("state", "param_groups") else suppress(Exception):
                vars(optimizer)[name] = copy.deepcopy(value, memo)
        with torch.random.fork_rng({one.device for one in tensors if one.is_cuda}):
            yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(own)
