"""ZeroPP as a contender: all that the tuner, the suite and the report need to know of it.

In: a ``Task`` and ``ZeroppKnobs``. Out: a ``Plan``, and a trainer per rank. Read ``knobs`` (what
can be set), ``plan`` (from knobs to a Plan), ``space`` (what the tuner tries), ``trainer`` (what a
rank runs; the only file that imports torch), then ``contender``, the entry that puts them together.
They call the library: ``zeropp.schedule``, ``zeropp.planner`` and ``zeropp.engine``.
"""
