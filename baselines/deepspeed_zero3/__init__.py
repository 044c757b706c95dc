"""DeepSpeed's ZeRO-3: parameters, gradients and optimizer state are cut over all ranks; neither
pipeline nor tensor parallelism.

In: a ``Task`` and ``Zero3Knobs``. Out: a ``Plan`` with one stage, and a trainer per rank that lets
DeepSpeed's ordinary engine run it. Read ``contender``, then ``trainer``; what all of DeepSpeed's
engines share is in ``baselines.deepspeed_3d``. ``zeropp/price/zero3.py`` says what it sends when.
"""
