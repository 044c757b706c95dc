"""Launchers: from planned points to one record per attempt.

In: RunSpecs. Out: records in the runs folder. Read ``points`` (a spec with its plan; ``auto`` lets
the tuner choose what is open) and ``sweep`` (which gives points to the launcher of their options),
then a launcher: ``local`` starts ranks on this machine, ``slurm`` submits jobs, ``trace`` runs
ranks without their peers, ``simulate`` prices the plan. ``processes`` starts the ranks of an
attempt (``rank_process``), and ``finish`` makes its record. ``owner`` and ``folder_lock`` say which
process works on a folder, ``frozen`` reads what an attempt was started with, and ``standing`` says
how far every point is.
"""
