"""Parameters of Megatron-Core: cut and joined again they are the suite's, under both programs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from baselines.megatron_core.parameters import contents_of
from baselines.model import build_piece
from tests.gloo.cases import request
from zeropp.types.shape import ModelShape

BLOCK = {  # as Megatron-Core's own layers and as Transformer Engine's name them
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight": "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight": "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
}
OF_GPT = {
    name.replace("weight", "bias"): te.replace("weight", "bias") for name, te in BLOCK.items()
}


def shape_of(family: str) -> ModelShape:
    model = {"family": family, "kv_heads": 2 if family == "llama" else 4}
    return request(4, {"name": "megatron_core", "tp": 2, "pp": 2}, model=model).model


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("engine", [False, True], ids=["own layers", "Transformer Engine"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_block_is_cut_and_joined(family: str, engine: bool, tp: int) -> None:
    shape, seen = shape_of(family), set[str]()
    block = build_piece(shape, 3, seed=1).state_dict()
    for own, theirs in (BLOCK | (OF_GPT if family == "gpt" else {})).items():
        part = contents_of(shape, theirs if engine else own, 3, tp)
        values = [block[name] for name in part.names]
        parts = part.parts(values, tp)
        assert len(parts) == tp
        if part.cut != "whole":
            assert sum(each.numel() for each in parts) == sum(each.numel() for each in values)
        again = part.values(parts, [value.shape for value in values])
        assert all(map(torch.equal, again, values))
        assert part.piece == 3
        seen |= set(part.names)
    assert seen == set(block)


def test_queries_keys_and_values_lie_group_by_group() -> None:
    shape = shape_of("llama")
    part = contents_of(shape, "self_attention.linear_qkv.weight", 1, 2)
    rows = [(shape.hidden, "q"), (2 * shape.head_dim, "k"), (2 * shape.head_dim, "v")]
    numbered = [torch.arange(count).view(-1, 1) + 1000 * i for i, (count, _) in enumerate(rows)]
    first = part.parts(numbered, 2)[0].flatten().tolist()
    half = shape.hidden // 2
    expected = [*range(half), *range(1000, 1000 + shape.head_dim)]
    assert first == [*expected, *range(2000, 2000 + shape.head_dim)]


def test_ends_belong_to_the_first_and_the_last_piece() -> None:
    shape = shape_of("gpt")
    assert contents_of(shape, "embedding.word_embeddings.weight", 0, 2).names == ("tokens.weight",)
    assert contents_of(shape, "output_layer.weight", 0, 2).piece == shape.num_pieces - 1
    with pytest.raises(KeyError):
        contents_of(shape, "decoder.renamed.weight", 1, 2)
