"""FSDP2 alone: ZeRO-3, optionally with replicas, without pipeline and tensor parallelism.

In: a ``Task`` and ``FSDPKnobs``. Out: a ``Plan`` with one pipeline rank, and a trainer per rank on
``fully_shard``. Read ``contender``, then ``trainer``.
"""
