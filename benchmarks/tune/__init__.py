"""The best plan of every contender on a cluster (``zeropp tune``).

In: a model, a cluster and a batch. Out: one screen of simulated plans, and commands that run them.
"""
