"""Chooses plans: what a contender offers, and the search for its best plan. Imports no torch.

In: a Task and a ``Contender``. Out: an ``Outcome`` with the best plan and its simulated step. Read
``task`` (what is trained, on what), ``contender`` (what a contender provides, and a plan in one
line), ``planner`` (degrees), ``space`` (which settings are tried), ``search`` (its queue, and its
result), ``bounds`` (why a plan need not be simulated). ``layer_prices`` prices a user's own layers,
which are known by the operators that ``zeropp.emulate.recorder`` finds in them.
"""
