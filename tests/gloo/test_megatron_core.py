"""Megatron-Core on real processes: the numbers of one process, its program as planned."""
