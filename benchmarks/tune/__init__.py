"""The best plan of every contender on a cluster (``zeropp tune``), and the error of a ratio.

In: a model, a cluster and a batch. Out: one screen of simulated plans, and commands that run them.
"""
