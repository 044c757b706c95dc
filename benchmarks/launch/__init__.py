"""Launchers: each takes planned points and leaves one record per attempt.

Points come from ``points`` (spec and plan together), ``sweep`` hands them to the launcher that the
options name: ``local`` starts ranks on this machine, ``slurm`` renders and submits, ``trace`` runs
one rank alone, ``simulate`` prices the plan. ``processes`` and ``finish`` start and close attempts.
"""
