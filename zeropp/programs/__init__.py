"""One registry of training programs: what each has, overlaps, copies and keeps, with sources.

``program_named("deepspeed_3d")`` gives the ``Program`` that the cost model reads. A plan names its
program (``Plan.program``), so whoever prices a plan prices the same one.
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
