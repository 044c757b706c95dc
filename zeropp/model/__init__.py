"""Plain single-device GPT and Llama: lists of layers that know no parallelism."""

from zeropp.model.pieces import build_half, build_model, build_piece, cross_entropy, initial_std

__all__ = ["build_half", "build_model", "build_piece", "cross_entropy", "initial_std"]
