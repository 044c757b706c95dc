"""Measures the constants of the machine it runs on, as training uses it: through torch and NCCL, or
gloo on CPUs. ``measure`` times kernels and collectives on every rank, ``constants`` makes a preset
of ``conf/cluster`` of the times and says what looks wrong, ``__main__`` starts ranks.
"""
