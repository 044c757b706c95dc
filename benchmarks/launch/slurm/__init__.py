"""Sweeps on Slurm.

In: planned points and ``SlurmOptions``. Out: rendered scripts and submitted job arrays, and at
their ends records. Read ``launcher`` (the entry), ``options``, ``arrays`` (which points share an
array), ``script`` (what is rendered) and ``submit``; then ``submissions`` (what was submitted),
``jobs`` (what became of it), ``attempt`` (makes the record inside a job), ``reasons`` (why it
ended) and ``view`` (submissions beside Slurm's queue). ``client`` and ``slurm_command`` are the
only modules that call Slurm's programs.
"""
