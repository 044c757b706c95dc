"""Recomputation of one block (none, selective or full), the same for every contender."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from zeropp.literals import Recompute

Result = TypeVar("Result")

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep what matrix products and attention give (each backend of attention is an operator of
    its own, with these words in its name), and recompute the rest."""
    del context, arguments, keywords
    if operator in _PRODUCTS or "scaled_dot_product" in operator.name():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def run_recomputed(
    function: Callable[..., Result], *inputs: Tensor, recompute: Recompute, random: bool
) -> Result:
    """``function(*inputs)``, whose backward computes again what ``recompute`` does not keep.

    Full keeps the inputs only; selective also keeps the outputs of matrix products and of
    attention. ``random``: the function may draw random numbers, and the second run must draw the
    same ones.
    """
    if recompute == "none":
        return function(*inputs)
    options: dict[str, Any] = {"preserve_rng_state": random}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, *inputs, use_reentrant=False, **options)  # type: ignore[no-any-return]
