"""Launchers: each takes planned points and leaves one record an attempt.

``local`` starts ranks on this machine, ``slurm`` renders and submits, ``trace`` runs one rank
alone, ``simulate`` prices the plan.
"""
