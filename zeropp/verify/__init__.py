"""Checks on a CPU the order of work that a training step gives a GPU: races, memory that is given
away too early, and hangs.

    with zeropp.verify.emulated() as device:      # torch.cuda's streams are virtual
        step()
    print(device.faults)                          # what nothing orders, on this rank

    report = zeropp.verify.watch(step, times=2)   # on all ranks of a gloo job; hangs, too
    assert report.is_clean, report

``streams`` holds the rules of CUDA's streams and of torch's allocator, ``rendezvous`` those of
communication between ranks, and ``emulation`` what stands in for torch's functions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropp.verify.emulation import Report, emulated, watch

__all__ = ["Report", "emulated", "watch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("zeropp.verify.emulation"), name)
    raise AttributeError(f"module 'zeropp.verify' has no attribute {name!r}")
