"""Searches for the best feasible Plan of a contender on a cluster. Imports no torch.

In: a Task and a ``Contender``. Out: an ``Outcome`` with the best plan and its simulated step. Read
``contender`` (what a contender provides, and a plan in one line), ``space`` (which settings are
tried), ``search`` (its queue, and its result), ``bounds`` (why a plan need not be simulated).
"""
