"""The private names of torch that training uses: for a timeout, and for the walk.

A release of torch may move or change them; ``tests/gloo/test_private_names.py`` says what no longer
works without each.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ["TorchDispatchMode", "default_timeout", "is_traceable_wrapper_subclass"]


def default_timeout(device: torch.device) -> timedelta | None:
    """How long the default group's collectives on a device wait for their peers, which torch does
    not pass on to other groups; None if its backend does not say."""
    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
