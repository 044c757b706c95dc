"""The private names of torch that checkpoints use: an optimizer's hooks.

A release of torch may move or change them; ``tests/gloo/test_private_names.py`` says what no longer
works without each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
