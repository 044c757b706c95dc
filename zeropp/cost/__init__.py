"""FLOPs, bytes, link times and memory: the only home of formulas. Imports no torch."""

from zeropp.cost.flops import balanced_cuts, model_flops_per_token, parameter_count

__all__ = ["balanced_cuts", "model_flops_per_token", "parameter_count"]
