"""Discrete-event run of a Plan: its time, its memory, its Timeline. Imports no torch.

* ``simulator``: ``simulate(plan, cluster)`` prices a plan, runs its programs through the event
  loop (``zeropp.schedule.event_loop``) and adds what follows the last microbatch.
* ``losses``: why the step takes longer than the compute limit, by kinds that add up.
* ``memory_curve``: the bytes that live on a rank while its program runs, and their peak.
"""
