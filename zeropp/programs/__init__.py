"""One registry of training programs, such as DeepSpeed 0.19 or Megatron-Core r0.8.0.

In: the name that a plan gives (``Plan.program``). Out: the ``Program``, that is all properties of
the software which change the time or memory of a step: what it overlaps, copies and keeps.
Read ``traits`` (the properties), ``entry`` (a program with the source of each property), then the
entries in ``ours``, ``megatron`` and ``fully_sharded``, and ``registry``. Imports no torch.
"""

from zeropp.programs.entry import Entry
from zeropp.programs.registry import ENTRIES, entry_named, program_named
from zeropp.programs.traits import Program, Spread, StateBytes

__all__ = [
    "ENTRIES",
    "Entry",
    "Program",
    "Spread",
    "StateBytes",
    "entry_named",
    "program_named",
]
