"""Checks on a CPU the order of work that a training step gives a GPU: races, memory that is given
away too early, and hangs.

    with zeropp.emulate.emulated() as device:      # torch.cuda's streams are virtual
        step()
    print(device.faults)                          # what nothing orders, on this rank

    report = zeropp.emulate.watch(step, times=2)   # on all ranks of a gloo job; hangs, too
    assert report.is_clean, report

One emulated machine: ``device``, for whose streams ``emulation`` gives torch stand-ins; ``world``,
the process group without peers; ``log``, what a rank's host issues. What is read of them:
``memory``, the bytes of one rank of a job of any size; order, by ``races`` and ``rendezvous``; and
time, by ``kernels`` and ``clock``. ``trace`` runs ranks of plans and of scripts, each alone;
``recorder`` finds what a user's layer computes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropp.emulate.emulation import Report, emulated, watch

__all__ = ["Report", "emulated", "watch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("zeropp.emulate.emulation"), name)
    raise AttributeError(f"module 'zeropp.emulate' has no attribute {name!r}")
