"""Sweeps on Slurm: points in, rendered scripts and submitted job arrays out.

``launcher`` is the door and ``submit`` hands a sweep over. ``options`` is what may be asked for,
``arrays`` groups points by their needs, ``script`` renders. ``client`` asks Slurm by ``command``,
the only module that calls its programs. ``submissions`` reads what was handed over, ``jobs`` finds
out what became of it, ``attempt`` closes an attempt from inside its job, ``reasons`` says why.
"""
