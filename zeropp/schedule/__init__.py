"""Pipeline schedules as data: actions, generators, passes and validation. Imports no torch."""
