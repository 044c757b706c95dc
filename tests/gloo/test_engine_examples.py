"""The example script: its losses are those of one process, also where it goes on elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.gloo.world import World

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "scripts" / "examples" / "train.py"
TEXT = ROOT / "benchmarks" / "worker" / "kjv_genesis_psalms.txt"
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def run_example(*arguments: str) -> list[float]:
    """Run the script's ``main``."""
    spec = importlib.util.spec_from_file_location("train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses: list[float] = module.main(list(arguments))
    return losses


def test_a_run_goes_on_with_another_number_of_ranks(world: World, tmp_path: Path) -> None:
    torch.manual_seed(1)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).save_pretrained(
        tmp_path / "begin"
    )

    def run(out: str, steps: int, pp: int, shard: int) -> list[list[float]]:
        degrees = "--pp", str(pp), "--shard", str(shard), "--steps", str(steps)
        given = str(tmp_path / "begin"), str(TEXT), "--out", str(tmp_path / out), *degrees
        return world.run(run_example, *given, size=pp * shard)

    (whole,) = run("alone", 5, 1, 1)
    for first in run("parts", 3, 2, 2):
        assert first[:3] == pytest.approx(whole[:3], rel=1e-4)
    for second in run("parts", 2, 2, 1):
        assert second == pytest.approx(whole[3:], rel=1e-4)
    make: Any = AutoModelForCausalLM
    models = [make.from_pretrained(tmp_path / out / "model") for out in ("alone", "parts")]
    expected, found = (dict(model.named_parameters()) for model in models)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3, msg=name)
