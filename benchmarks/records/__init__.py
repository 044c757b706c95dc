"""What an attempt leaves on disk, and what is derived from it.

In: the events that every rank writes while it runs. Out: one JSON record per attempt, and its
metrics. Read ``events`` (what ranks write, and the fields of a record that follow from it),
``environment`` (what a process says of its machine and code), ``record``, ``recorded_spec`` (what
reports read of its spec), ``metrics``, which are computed when a record is read, and ``simulated``
(what is kept of a simulated step, and a study's records as a table).
"""
