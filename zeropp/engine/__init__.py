"""The engine: runs a plan's programs over one rank's part of a model, in real processes.

In: this rank's layers, a plan, and settings. Out: losses, gradients and updated parameters. Read
``engine`` (what a rank has) and ``interpreter`` (one method per action), ``loss`` and ``evaluator``
(what runs outside of a step), then the four rooms: ``layers`` (forward and backward),
``parameters`` (sharded rows, gathered and summed), ``update`` (the end of a step) and ``ranks``
(how ranks meet and send). ``sharding`` makes parameters, ``checkpoint`` saves and loads. Before
training, ``settings`` and ``walk`` find what layers need, and refuse what cannot be trained.
``private_names`` is what is private in torch.
"""
