"""ZeroPP as a contender: everything that the tuner, the suite and the report know of it.

Read ``knobs`` (what can be set), ``plan`` (from knobs to a Plan), ``space`` (what is searched),
``trainer`` (a rank of it; the only file that imports torch), then ``contender``, the entry that
puts them together. The library that these call stays outside: schedules, planner and engine.
"""
