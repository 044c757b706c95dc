"""Checks on a CPU the order of work that a training step gives a GPU: races, memory that is given
away too early, and hangs.

    with zeropp.emulate.emulated() as device:      # torch.cuda's streams are virtual
        step()
    print(device.faults)                          # what nothing orders, on this rank

    report = zeropp.emulate.watch(step, times=2)   # on all ranks of a gloo job; hangs, too
    assert report.is_clean, report

One emulated machine: ``device`` (streams, memory, links), for which ``stand_ins`` replaces torch's
functions; ``world``, the process group without peers; ``log``, what a rank's host issues. What is
read of them: ``memory``, the bytes of one rank of a job of any size; order, by ``races`` and
``rendezvous``; and time, by ``kernels`` and ``clock``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropp.emulate.order import Report, watch
    from zeropp.emulate.stand_ins import emulated

__all__ = ["Report", "emulated", "watch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "stand_ins" if name == "emulated" else "order"
        return getattr(importlib.import_module(f"zeropp.emulate.{module}"), name)
    raise AttributeError(f"module 'zeropp.emulate' has no attribute {name!r}")
