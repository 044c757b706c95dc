"""Searches for the best feasible Plan of a contender on a cluster. Imports no torch.

In: a Task and a ``Contender``. Out: an ``Outcome`` with the best plan and its simulated step. Read
``contender`` (what a contender provides), ``space`` (which settings are tried), ``search``,
``outcome`` (its result), ``bound`` (why a plan need not be simulated), ``describe`` (a plan in one
line).
"""
