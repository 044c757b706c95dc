"""Searches for the best feasible Plan of a contender on a cluster. Imports no torch.

In: a Task and a ``Contender``. Out: an ``Outcome`` with the best plan and its simulated step. Read
``contender`` (what a contender provides), ``space`` (which settings are tried), ``search`` (its
queue holds what ``entry`` describes), ``simulated`` (the orders of one plan), ``outcome`` (a
search's result), ``bound`` and ``least_memory`` (why a plan need not be simulated; ``latency`` and
``hold_time`` are parts of ``bound``), ``describe`` (a plan in one line).
"""
