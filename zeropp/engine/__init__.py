"""The engine: runs a plan's programs over one rank's part of a model, in real processes.

In: pieces of a model and a schedule. Out: losses, gradients and updated parameters. Read
``engine`` (what a rank has) and ``interpreter`` (one method per action), then ``chunk`` (forward
and backward, with ``deferred`` weight gradients and ``recompute``), ``sharding`` and ``flat``
(parameters), ``lanes``, ``reductions`` and ``groups`` (collectives), ``channels`` (messages),
``updates`` and ``owned`` (the optimizer), ``evaluation``, ``together`` (an error of one rank
reaches all) and ``checkpoint``. Before training, ``checks``, ``trial``, ``saved``, ``rehearsal``
and ``probe`` find what layers and optimizer need, and refuse what cannot be trained; ``watch`` and
``claim`` do so afterwards. ``traced_ranks`` runs one rank of a large job without its peers.
"""
