"""Activation recomputation of one block: none, selective or full, the same for every contender."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zeropp.literals import Recompute

Result = TypeVar("Result")

_ATEN = torch.ops.aten
_KEPT = (
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
)


def run_recomputed(
    function: Callable[..., Result], *inputs: Tensor, recompute: Recompute, random: bool
) -> Result:
    """``function(*inputs)``; backward computes again what ``recompute`` does not keep.

    Selective keeps the outputs of matrix products and of attention. ``random``: the function may
    draw random numbers, and the second run must draw the same.
    """
    if recompute == "none":
        return function(*inputs)
    options: dict[str, Any] = {"preserve_rng_state": random}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(_KEPT))
    return checkpoint(function, *inputs, use_reentrant=False, **options)  # type: ignore[no-any-return]
