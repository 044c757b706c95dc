"""The engine: runs a plan's programs over one rank's part of a model, in real processes.

In: this rank's layers, a plan, and settings. Out: losses, gradients and updated parameters. Read
``engine`` (what a rank has) and ``interpreter`` (one method per action), ``loss`` and ``evaluator``
(what runs outside of a step), then ``chunk`` (forward and backward), ``deferred`` (weight
gradients), ``sharding``, ``flat_layout`` and ``flat`` (parameters), ``tied`` and ``whole`` (those
that two stages share, and those that one rank updates), ``lanes`` and ``collectives`` (overlap,
groups, messages), ``optimizer`` and ``update_rules`` (the end of a step), ``errors`` (an error of
one rank reaches all), and ``checkpoint`` with ``optimizer_state``. Before training, ``walk``,
``preflight`` and ``users_optimizer`` find what layers and optimizers need, and refuse what cannot
be trained. ``values`` are what layers take and return; ``private_names`` is what is private in
torch.
"""
