"""Pipeline schedules as data: actions, generators, passes and validation. Imports no torch."""

from zeropp.schedule.build import GENERATORS, build
from zeropp.schedule.passes import lower
from zeropp.schedule.validate import ScheduleError, validate

__all__ = ["GENERATORS", "ScheduleError", "build", "lower", "validate"]
