"""Launchers: from planned points to one record per attempt.

In: RunSpecs. Out: records in the runs folder. Read ``points`` (a spec with its plan; ``auto`` lets
the tuner choose what is open) and ``sweep`` (which gives points to the launcher of their
``options``), then one of ``sweep.LAUNCHERS``: ``local`` starts ranks on this machine, ``slurm``
submits jobs, ``trace`` runs ranks without their peers, ``simulate`` prices the plan; what they do
alike is in ``running``. ``attempt`` is what one attempt leaves on disk, whether it is at work, and
its record; ``sweep_status`` says how far every point is.
"""
