"""The private names of torch that training uses: for a timeout, for hooks, and for the walk.

A release of torch may move or change them; ``tests/gloo/test_private_names.py`` says what no longer
works without each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "default_timeout", "without_hooks"]


def default_timeout(device: torch.device) -> timedelta | None:
    """How long the default group's collectives on a device wait for their peers, which torch does
    not pass on to other groups; None if its backend does not say."""
    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside this context a step of the optimizer, or of those it consists of, calls no hooks."""
    parts = [optimizer, *getattr(optimizer, "parts", ())]
    hooks = [(x, x._optimizer_step_pre_hooks, x._optimizer_step_post_hooks) for x in parts]
    for part in parts:
        part._optimizer_step_pre_hooks, part._optimizer_step_post_hooks = {}, {}
    try:
        yield
    finally:
        for part, before, after in hooks:
            part._optimizer_step_pre_hooks, part._optimizer_step_post_hooks = before, after
