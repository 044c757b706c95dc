"""The example script: its losses are those of one process, also where it goes on elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.gloo.world import World

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "scripts" / "examples" / "train.py"
TEXT = ROOT / "benchmarks" / "worker" / "kjv_genesis_psalms.txt"
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def example() -> ModuleType:
    """The script as a module; it is to be read in one go."""
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 90
    spec = importlib.util.spec_from_file_location("train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(*arguments: str) -> list[float]:
    """Run the script's ``main``."""
    with mock.patch.object(dist, "init_process_group"):
        losses: list[float] = example().main(list(arguments))
    return losses


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model with a tokenizer of its own."""
    torch.manual_seed(1)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator([TEXT.read_text("utf-8")[:100_000]], made)
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=tokens, eos_token="</s>").save_pretrained(tmp_path)
    return tmp_path


def test_a_run_goes_on_with_another_number_of_ranks(world: World, folder: Path) -> None:
    def run(out: str, steps: int, pp: int, ranks: int) -> list[list[float]]:
        options = {"pp": pp, "steps": steps, "length": 32, "every": 2, "keep": 2, "lr": 1e-3}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        given = str(folder), str(TEXT), "--out", str(folder / out), "--separator", "\n", *words
        return world.run(run_example, *given, size=ranks)

    (whole,) = run("alone", 5, 1, 1)
    for first in run("parts", 3, 2, 4):
        assert first[:3] == pytest.approx(whole[:3], rel=1e-4)
    for second in run("parts", 2, 2, 2):
        assert second == pytest.approx(whole[3:], rel=1e-4)
    kept = [path.name for path in sorted((folder / "parts").glob("checkpoint*"))]
    assert kept == ["checkpoint_000004", "checkpoint_000005"]
    make: Any = AutoModelForCausalLM
    trained = [make.from_pretrained(folder / out / "model") for out in ("alone", "parts")]
    expected, found = (dict(model.named_parameters()) for model in trained)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3, msg=name)
    read: Any = AutoTokenizer
    tokenizer = read.from_pretrained(folder / "parts" / "model")
    assert tokenizer.decode(tokenizer.encode("In the beginning")) == "In the beginning"


def test_rows_are_documents_that_do_not_see_each_other() -> None:
    """And the end of one has no target: what follows it is another one's."""
    tokenizer = SimpleNamespace(eos_token_id=0, encode=lambda text, **_: [*map(int, text)])
    rows = example().packed_rows(["123", "45", "6789"], tokenizer, 5)
    inputs, targets, places = (part.tolist() for part in rows.tensors)
    assert inputs == [[1, 2, 3, 0, 4], [5, 0, 6, 7, 8]]
    assert targets == [[2, 3, 0, -100, 5], [0, -100, 7, 8, 9]]
    assert places == [[0, 1, 2, 3, 0], [0, 1, 0, 1, 2]]
