"""The door: ``parallelize`` (``api``) cuts a list of layers into ``stages`` and returns a
``ParallelModel`` (``parallel_model``), which trains, saves and loads, and whose ``loader`` gives
this rank its rows. ``auto`` chooses what was left open, and is loaded only then.
"""
