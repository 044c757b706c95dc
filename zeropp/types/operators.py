"""The operators of a layer as data: products, attention, and the kernels between them.

In: what ``zeropp.emulate.recorder`` sees of a layer's forward. Out: shapes, from which the
functions of ``zeropp.price.kernels`` make seconds, on any device and in any number type. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What the gradient of an operand is: that of an activation, which the input gradient's pass
# computes; that of a trained parameter, which the weight gradient's pass computes; or not needed.
Gradient = Literal["input", "weight", "none"]


@dataclass(frozen=True, kw_only=True)
class Product:
    """``batch`` products of a left factor [m, k] and a right one [k, n], in one kernel."""

    m: int
    k: int
    n: int
    batch: int = 1
    left: Gradient = "input"
    right: Gradient = "weight"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Scores, softmax and their product with the values, in one kernel that keeps no scores.

    ``heads``: those of the queries, over all rows of a microbatch. ``queries`` and ``keys``: the
    tokens of a row; ``width``: the elements of a head.
    """

    heads: int
    queries: int
    keys: int
    width: int
    causal: bool
    has_backward: bool = True


@dataclass(frozen=True)
class Elementwise:
    """One kernel that computes no product, or the one of its backward, or both: the elements that
    each reads and writes, 0 if there is none."""

    forward: int
    backward: int
    gradient: Gradient = "input"  # that its backward computes


@dataclass(frozen=True, kw_only=True)
class LayerOperators:
    """All operators of one layer for one microbatch.

    ``launches``: kernels that the host starts in the forward; ``elementwise`` may take several of
    them for one. ``trained``: elements of the layer's trained parameters. ``ends_in_product``:
    whether the backward needs nothing that is made after the last product.
    """

    products: tuple[Product, ...] = ()
    attentions: tuple[Attention, ...] = ()
    elementwise: tuple[Elementwise, ...] = ()
    launches: int = 0
    trained: int = 0
    ends_in_product: bool = False
