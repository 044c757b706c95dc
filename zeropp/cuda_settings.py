"""What ZeroPP needs of CUDA: two environment variables that CUDA reads when it is initialised.

Without them steps may hang. A kernel that is loaded on its first use would wait for receives that
were posted early; and of the 8 hardware queues that are the default, two streams could share one,
in which a send would wait for a receive that waits for its own sender.
"""

from __future__ import annotations

import os
import sys

SETTINGS = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def prepare() -> None:
    """Set the variables that the caller has not set, unless CUDA is initialised and would not read
    them. ``import zeropp`` does this; it imports no torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)


def missing() -> list[str]:
    """The settings, as ``NAME=value``, that CUDA was initialised without."""
    return [f"{name}={value}" for name, value in SETTINGS.items() if name not in os.environ]
