"""The example scripts on four ranks, with the losses and the models that one process has."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.gloo.world import World

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
TEXT = ROOT / "benchmarks" / "worker" / "kjv_genesis_psalms.txt"
STEPS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def run_example(name: str, arguments: list[str]) -> list[float]:
    """Run a script's ``main``, with fewer layers where it makes its own model."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if name == "train_gpt":
        module.GPT = replace(module.GPT, layers=4)  # type: ignore[attr-defined]
    losses: list[float] = module.main([*arguments, "--steps", str(STEPS)])
    return losses


def test_losses_are_those_of_one_process(world: World) -> None:
    alone = [str(TEXT), "--pp", "1", "--shard", "1"]
    (expected,) = world.run(run_example, "train_gpt", alone, size=1)
    for losses in world.run(run_example, "train_gpt", [str(TEXT)], size=4):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]


def made(family: str) -> PreTrainedModel:
    """A small model with random weights, as a script on one device would make it."""
    torch.manual_seed(1)
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    attention = "eager" if family == "llama, eager attention" else "sdpa"
    config: Any = LlamaConfig  # whose keywords beyond its own fields have no types
    return LlamaForCausalLM(config(**SIZES, attn_implementation=attention))


def trained_alone(model: PreTrainedModel) -> dict[str, Tensor]:
    """The example's steps in one process, by the model's own forward."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SIZES["vocab_size"], (16, 33), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("family", ["llama", "llama, eager attention", "qwen2"])
def test_a_hugging_face_model_goes_through_and_back(
    family: str, world: World, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    made(family).save_pretrained(before)
    arguments = [str(before), "--save", str(after)]
    world.run(run_example, "train_hf", arguments, size=4)
    found = AutoModelForCausalLM.from_pretrained(after).state_dict()
    expected = trained_alone(AutoModelForCausalLM.from_pretrained(before))
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
