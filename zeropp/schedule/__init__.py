"""Pipeline schedules as data: who computes what, in which order. Imports no torch.

In: sizes (ranks, chunks, microbatches, unit, activation cap) and, where known, durations.
Out: a ``Schedule``, one list of actions per pipeline rank, ready for engine and simulator.

Read in this order: ``program`` (actions, a schedule, the placement of its stages, the order in
which actions can be timed), ``zeropp_order`` (ZeroPP's orders of a step, made by
``list_scheduler``); ``passes`` adds gathers, reductions, transfers and the end of a step;
``legality`` refuses what must not run; ``event_loop`` times actions. ``build`` makes any schedule
by its name, with the ``generators`` of all others.
"""

from zeropp.schedule.legality import ScheduleError, validate
from zeropp.schedule.passes import lower

__all__ = ["ScheduleError", "lower", "validate"]
