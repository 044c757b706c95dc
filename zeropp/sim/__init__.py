"""The simulator: the step time, memory and Timeline of a Plan. Imports no torch.

In: a Plan and a Cluster. Out: a ``SimResult``. Read in this order:

* ``simulator``: ``simulate(plan, cluster)`` prices a plan, runs its programs in the event loop
  (``zeropp.schedule.event_loop``) and adds what follows the last microbatch.
* ``lost_time``: why the step takes longer than the compute limit, by causes that add up.
* ``memory``: the bytes that a rank holds from action to action of its program, and their peak.
"""
