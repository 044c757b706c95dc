"""Tokens for every contender: in every topology the same global batches.

In: a RunSpec. Out: each rank's inputs and targets of a step. Read ``batches`` (global batches by
step number), ``megatron`` (Megatron's files), ``local_batch`` (a rank's part, on its device).
"""

from benchmarks.worker.data.batches import BatchSource, check_data, open_batches

__all__ = ["BatchSource", "check_data", "open_batches"]
