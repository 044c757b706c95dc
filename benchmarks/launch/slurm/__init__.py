"""Sweeps on Slurm.

In: planned points and ``SlurmOptions``. Out: rendered scripts and submitted job arrays, and at
their ends records. Read ``submit`` (the launcher), ``script`` (which points share an array, and
what is rendered), ``submissions`` (what was submitted, and what has become of it) and ``endings``
(why an attempt ended; its record from inside the job). ``client`` alone calls Slurm's programs.
"""
