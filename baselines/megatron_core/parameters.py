"""Which parameters of ``baselines.model`` a parameter of Megatron-Core holds, and how ranks cut it.

Megatron-Core joins queries, keys and values in one matrix, group of heads by group of heads, and
the two input projections of a gated MLP in another, tensor-parallel rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Size, Tensor

from zeropp.types.shape import ModelShape

# How tensor-parallel ranks cut a parameter: along its rows (the outputs of a product), along its
# columns (the inputs), or not at all.
Cut = Literal["rows", "columns", "whole"]

_BLOCK: dict[str, tuple[Cut, tuple[str, ...]]] = {
    "input_layernorm": ("whole", ("attention_norm",)),
    "self_attention.linear_qkv": ("rows", ("attention.query", "attention.key", "attention.value")),
    "self_attention.linear_proj": ("columns", ("attention.output",)),
    "pre_mlp_layernorm": ("whole", ("mlp_norm",)),
    "mlp.linear_fc1": ("rows", ("mlp.gate", "mlp.up")),
    "mlp.linear_fc2": ("columns", ("mlp.down",)),
    # Transformer Engine's layers have the norm before a product inside.
    "self_attention.linear_qkv.layer_norm": ("whole", ("attention_norm",)),
    "mlp.linear_fc1.layer_norm": ("whole", ("mlp_norm",)),
}
_EMBEDDING: dict[str, tuple[Cut, tuple[str, ...]]] = {
    "embedding.word_embeddings": ("rows", ("tokens",)),
    "embedding.position_embeddings": ("whole", ("positions",)),
}
_HEAD: dict[str, tuple[Cut, tuple[str, ...]]] = {
    "decoder.final_layernorm": ("whole", ("norm",)),
    "output_layer": ("rows", ("output",)),
}


@dataclass(frozen=True)
class Contents:
    """What one parameter of Megatron-Core holds: parameters ``names`` of piece ``piece`` of
    ``baselines.model``, joined in ``groups`` groups of rows that hold a part of each of them."""

    piece: int
    names: tuple[str, ...]
    cut: Cut
    groups: int

    def parts(self, values: Sequence[Tensor], tp: int) -> list[Tensor]:
        """The parameter on each of ``tp`` ranks, from the values of ``names`` in their order."""
        if self.cut == "whole":
            return [values[0]] * tp
        if self.cut == "columns":
            return list(values[0].chunk(tp, dim=1))
        grouped = [value.view(self.groups, -1, *value.shape[1:]) for value in values]
        return list(torch.cat(grouped, dim=1).flatten(0, 1).chunk(tp))

    def values(self, parts: Sequence[Tensor], shapes: Sequence[Size]) -> list[Tensor]:
        """The values of ``names``, which have these shapes, from the parts of all ranks."""
        if self.cut == "whole":
            return [parts[0]]
        if self.cut == "columns":
            return [torch.cat(list(parts), dim=1)]
        whole = torch.cat(list(parts))
        grouped = whole.view(self.groups, -1, *whole.shape[1:])
        rows = [shape[0] // self.groups for shape in shapes]
        return [value.flatten(0, 1) for value in torch.split(grouped, rows, dim=1)]


def contents_of(shape: ModelShape, name: str, piece: int, tp: int) -> Contents:
    """What the parameter ``name`` of a ``GPTModel`` holds; in a layer, ``name`` is the name inside
    the layer and ``piece`` the layer's number, which counts from 1. Raises KeyError for a name that
    Megatron-Core did not have."""
    module, _, kind = name.rpartition(".")
    if kind.startswith("layer_norm_"):
        module, kind = f"{module}.layer_norm", kind.removeprefix("layer_norm_")
    if module in _BLOCK:
        cut, names = _BLOCK[module]
    elif module in _EMBEDDING or (module == "output_layer" and shape.tied_embeddings):
        cut, names = _EMBEDDING.get(module, _EMBEDDING["embedding.word_embeddings"])
        piece = 0
    else:
        cut, names = _HEAD[module]
        piece = shape.num_pieces - 1
    if names[0] == "mlp.gate" and shape.gates == 1:
        names = ("mlp.up",)
    if cut == "columns" and kind == "bias":  # added once, after the sum over the ranks
        cut = "whole"
    groups = shape.kv_heads if len(names) == 3 else tp
    return Contents(piece, tuple(f"{module_name}.{kind}" for module_name in names), cut, groups)
