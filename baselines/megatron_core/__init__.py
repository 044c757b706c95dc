"""Megatron-Core itself: its ``GPTModel``, schedules, data parallelism and distributed optimizer.

In: a ``Task`` and ``MegatronCoreKnobs``. Out: the ``Plan`` that ``baselines.public_3d`` makes of
them, and a trainer per rank that lets Megatron-Core run it. Read ``contender`` (the two programs:
with Transformer Engine and with Megatron-Core's own layers), ``trainer``, ``parameters`` (which
parameters of ``baselines.model`` one of Megatron-Core's holds). ``private_names`` has what
Megatron-Core does not document, and what lets it run on CPUs.
"""
