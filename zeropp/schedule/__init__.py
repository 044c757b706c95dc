"""Pipeline schedules as data: who computes what, in which order. Imports no torch.

In: sizes (ranks, chunks, microbatches, unit, activation cap) and, where known, durations.
Out: a ``Schedule``, one list of actions per pipeline rank, ready for engine and simulator.

Read in this order: ``program`` (actions, a schedule, the placement of its stages, the order in
which actions can be timed), ``build`` (the entry, from a name or ZeroPP's sizes); then
``generators`` and, for ZeroPP, ``zeropp_order`` with ``list_scheduler``; ``passes`` adds gathers,
reductions and transfers; ``legality`` refuses what must not run; ``event_loop`` times actions.
"""

from zeropp.schedule.build import GENERATORS, build
from zeropp.schedule.legality import ScheduleError, validate
from zeropp.schedule.passes import lower

__all__ = ["GENERATORS", "ScheduleError", "build", "lower", "validate"]
