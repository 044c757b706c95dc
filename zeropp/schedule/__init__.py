"""Pipeline schedules as data: who computes what, in which order. Imports no torch.

In: sizes (ranks, chunks, microbatches, unit, activation cap) and, where known, durations.
Out: a ``Schedule``, one list of actions per pipeline rank, ready for engine and simulator.

Read in this order: ``action`` (the vocabulary), ``program`` (a schedule and its stages' places),
``build`` (the entry: from a name or ZeroPP's sizes to a schedule); then the generators
(``generators``, ``zero_bubble``, and ZeroPP's: ``zeropp_order`` with ``greedy`` for stages in a
loop, ``lean_order`` with ``pattern`` and ``justify`` for stages on a V); ``passes`` adds gathers,
reductions and transfers; ``legality`` refuses what must not run; ``sequence`` finds an order in
which all actions can be timed, and ``event_loop`` times them (``event_result``).
"""

from zeropp.schedule.build import GENERATORS, build
from zeropp.schedule.legality import ScheduleError, validate
from zeropp.schedule.passes import lower

__all__ = ["GENERATORS", "ScheduleError", "build", "lower", "validate"]
