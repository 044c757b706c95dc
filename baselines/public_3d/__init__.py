"""Public 3D programs that are priced but do not run here, and a bound that has all their parts.

In: a ``Task`` and the program's knobs. Out: a ``Plan``. Read ``offers`` (what each program can be
set to, by its released version), then the files that they share: ``knobs``, ``plan``, ``space``,
``contender``.
"""
