"""Tokens for every contender: the same global batch whatever the topology."""

from benchmarks.worker.data.batches import BatchSource, check_data, open_batches

__all__ = ["BatchSource", "check_data", "open_batches"]
