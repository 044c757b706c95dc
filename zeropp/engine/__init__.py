"""The engine: runs a plan's programs over one rank's part of a model, in real processes.

In: pieces of a model and a schedule. Out: losses, gradients and updated parameters. Read
``engine`` (what a rank has) and ``interpreter`` (one method per action), then ``chunk`` (forward
and backward), ``sharding`` and ``flat`` (parameters), ``lanes``, ``reductions`` and ``groups``
(collectives), ``channels`` (messages), ``together`` (an error of one rank reaches all) and
``checkpoint``. ``traced_ranks`` runs one rank of a large job without its peers.
"""
