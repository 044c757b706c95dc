"""Formulas against the real models: torch's FLOP counter, and the parameters themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from baselines.model import build_model, build_piece
from benchmarks.explain import huggingface
from tests.unit.shapes import gpt
from zeropp.price import model_flops_per_token, parameter_count
from zeropp.price.flops import piece_forward_flops, piece_parameters
from zeropp.types.shape import ModelShape

GPT = gpt(3, 64, 4, vocab=96, seq=32)
LLAMA = replace(GPT, name="llama", family="llama", ffn=176)
GROUPED = replace(LLAMA, name="llama-gqa", layers=2, heads=8, kv_heads=2, ffn=112)
SHAPES = [
    GPT,
    replace(gpt(2, 48, 3, vocab=80, seq=16), name="gpt-tied", tied_embeddings=True),
    LLAMA,
    GROUPED,
    replace(GROUPED, name="llama-gelu", gated_mlp=False),
    replace(GPT, name="gpt-gated", layers=2, ffn=112, gated_mlp=True),
    replace(GROUPED, name="llama-wide", head_width=24),
    replace(GPT, name="gpt-wide", head_width=24),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_parameters(shape: ModelShape) -> None:
    model = build_model(shape, seed=0)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(shape)
    for index in range(shape.num_pieces):
        piece = build_piece(shape, index, seed=0, device="meta")
        assert sum(p.numel() for p in piece.parameters()) == piece_parameters(shape, index)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_flops(shape: ModelShape) -> None:
    """Exact forward and backward; attention by its unfused products, which the counter sees."""
    model = build_model(shape, seed=0)
    tokens = torch.randint(shape.vocab, (2, shape.seq))
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as forward,
    ):
        logits = model(tokens)
        counted = forward.get_total_flops()
        logits.sum().backward()
    pieces = (piece_forward_flops(shape, index) for index in range(shape.num_pieces))
    assert counted == tokens.numel() * sum(pieces)
    assert forward.get_total_flops() == tokens.numel() * model_flops_per_token(shape)


@pytest.mark.parametrize("kind", sorted({*huggingface.KINDS} - {"gpt2"}))
def test_models_of_transformers_have_the_sizes_that_their_file_says(kind: str) -> None:
    """All but norms and biases, at most one in a hundred parameters; also where the
    file leaves the width of heads and the tying to transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 640, "vocab_size": 4096, "pad_token_id": 0,
    }  # fmt: skip
    own = {"head_dim": 48} if kind != "qwen2_5_vl_text" else {}  # which has no such key
    for more in ({}, own, {"tie_word_embeddings": True}):
        config = transformers.CONFIG_MAPPING[kind](**sizes, **more)
        auto, head = transformers.AutoModelForCausalLM, 0
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:  # of a model that sees
            auto, head = transformers.AutoModel, 0 if "tie_word_embeddings" in more else 4096 * 256
        with torch.device("meta"):
            model = auto.from_config(config)
        read = huggingface.read({"model_type": kind, **sizes, **more}, 8).model
        whole = parameter_count(ModelShape(**read, seq=64))
        theirs = head + sum(p.numel() for p in model.parameters())
        assert whole == pytest.approx(theirs, rel=0.01), more
