"""Pipeline schedules as data: actions, generators, passes and validation. Imports no torch."""

from zeropp.schedule.build import GENERATORS, build
from zeropp.schedule.legality import ScheduleError, validate
from zeropp.schedule.passes import lower

__all__ = ["GENERATORS", "ScheduleError", "build", "lower", "validate"]
