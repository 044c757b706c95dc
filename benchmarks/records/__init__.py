"""What an attempt leaves on disk, and what is derived from it.

In: the events that every rank writes while it runs. Out: one JSON record per attempt, and its
metrics. Read ``rank_events`` (what ranks write, with their ``environment``), ``step_line`` (a step
as one line of a log), ``record`` (what a launcher makes of the events), then ``metrics`` and
``stats``, which are computed when a record is read. ``recorded_spec`` reads the specs of all
versions of the suite.
"""
