"""Sweeps on Slurm: points in, rendered scripts and submitted job arrays out.

``launcher`` is the door; ``script`` groups points by resources and renders, ``client`` is the only
module that calls Slurm's programs, ``jobs`` and ``attempt`` find out how submitted jobs ended.
"""
