"""ZeroPP as a contender: all that the tuner, the suite and the report need to know of it.

In: a ``Task`` and ``ZeroppKnobs``. Out: a ``Plan``, and a trainer per rank. Read
``contender`` (what can be set, from knobs to a Plan, what the tuner tries), then ``trainer`` (what
runs per rank; the only file that imports torch).
They call the library: ``zeropp.schedule``, ``zeropp.planner`` and ``zeropp.engine``.
"""
