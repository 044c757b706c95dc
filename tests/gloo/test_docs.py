"""The Python examples of the pages on training scripts and of the answers, run page by page on two
ranks; and the scripts."""

from __future__ import annotations

import contextlib
import copy
import csv
import math
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from types import EllipsisType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import zeropp
from tests.gloo.layers import WIDTH, One, linear
from tests.gloo.world import World, on_ranks
from zeropp import huggingface
from zeropp.train.parallel_model import ParallelModel

DOCS = Path(__file__).parents[2] / "docs"
ROWS = 64


def examples(page: str) -> list[str]:
    """The Python code of a page, block by block."""
    blocks = r"^( *)```python\n(.*?)^ *```$"
    found = re.findall(blocks, (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


class Masked(One):
    """Takes the page's mask."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out = self.linear(x)
        return out if attention_mask is None else out * attention_mask[:, None]


def is_of_a_folder(block: str) -> bool:
    """Whether an example needs a model of transformers."""
    return "huggingface" in block or "logits" in block


def run_folders(place: Path) -> tuple[bool, int, int]:
    """Run the blocks of the page that need a model of transformers, in a folder that has one:
    whether what they saved can be read, and the lengths of what they gave."""
    torch.manual_seed(0)
    made: list[ParallelModel] = []
    longest = 0

    def parallelize(*given: Any, **more: Any) -> ParallelModel:
        for model in made:
            model.close()
        made[:] = [zeropp.parallelize(*given, **{**more, "pp": 2, "shard": 1})]
        return made[0]

    tokens = torch.randint(3, 32, (ROWS, 6))
    names: dict[str, Any] = {
        "zeropp": SimpleNamespace(parallelize=parallelize, huggingface=huggingface),
        "torch": torch,
        "tokens": tokens,
        "labels": tokens.clone(),
        "mask": torch.ones_like(tokens),
        "classes": tokens[:, 0] % 3,
        "folder": "folder",
        "count": 2,
        "dataset": torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:]),
    }
    with contextlib.chdir(place):
        found = filter(is_of_a_folder, examples("training.md"))
        blocks = sorted(found, key=lambda block: "Classification" in block)  # it takes a mask
        for block in blocks:
            exec(block.replace("import zeropp\n", ""), names)  # the page's own code
            longest = max(longest, names["tokens"].shape[1])  # with generated tokens
            names["tokens"] = tokens
        saved = Path("other/folder").is_dir()
    made[0].close()
    return saved, len(blocks), longest


def test_the_examples_of_transformers_run(world: World, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=2, pad_token_id=0, **sizes)
    for folder in ("folder/of/save_pretrained", "folder"):
        LlamaForCausalLM(config).save_pretrained(tmp_path / folder)
    assert set(world.run(run_folders, tmp_path, size=2)) == {(True, 3, 8)}


def paste_readme(place: Path) -> tuple[str, float, int]:
    """Run README's example as it stands, in a folder that has a model: precision, loss, steps."""
    tokens = torch.arange(ROWS * 6).reshape(ROWS, 6) % 29 + 3
    dataset = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    names: dict[str, Any] = {"tokens": tokens[:, :-1], "dataset": dataset}
    (block,) = examples("../README.md")
    with contextlib.chdir(place):
        exec(block, names)
    model = names["model"]
    model.close()
    return model.plan.precision, float(names["loss"]), model.engine.steps_done


def test_the_readme_runs_as_pasted(world: World, tmp_path: Path) -> None:
    """On its eight ranks and in bf16: every rank has the loss of untrained guesses."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=4, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "folder")
    ((precision, loss, steps),) = set(world.run(paste_readme, tmp_path, size=8))
    assert (precision, steps) == ("bf16", 1)
    assert loss == pytest.approx(math.log(32), abs=0.1)


def run_training(folder: Path) -> tuple[list[float], int]:
    """Run all blocks of the page on training in one namespace; gives the losses that they printed,
    and the steps of the last model."""
    torch.manual_seed(0)
    layers = [linear(), *(Masked() for _ in range(4)), linear()]
    inputs, targets = torch.randn(2, ROWS, WIDTH)
    usual: dict[str, Any] = {"sample": inputs[:1], "global_batch": ROWS, "pp": 2}
    made: list[ParallelModel] = []

    def parallelize(first: Any = ..., loss_fn: Any = F.mse_loss, **more: Any) -> ParallelModel:
        """An ellipsis on the page stands for what the page has said; here are two ranks."""
        given = layers if isinstance(first, EllipsisType) else first
        own = copy.deepcopy(given)  # each model takes its layers over
        made.append(zeropp.parallelize(own, loss_fn, **{**usual, **more, "pp": 2, "shard": 1}))
        return made[-1]

    def check(given: Any, loss_fn: Any, batches: Any, **more: Any) -> None:
        zeropp.check(given, loss_fn, batches, **{**more, **usual})

    printed: list[float] = []
    names: dict[str, Any] = {
        "zeropp": SimpleNamespace(parallelize=parallelize, check=check),
        "nn": nn,
        "layers": layers,
        "loss_fn": F.mse_loss,
        "inputs": inputs,
        "targets": targets,
        "batches": [(inputs, targets)] * 2,
        "mask": torch.ones(ROWS),
        "dataset": torch.utils.data.TensorDataset(inputs, targets),
        "rows": slice(None),
        "held_out": inputs,
        "held_out_targets": targets,
        "folder": str(folder),
        "other_folder": f"{folder}_other",
        "loader_state": {"epoch": 1},
        "print": lambda *values: printed.extend(values),
    }
    with mock.patch.object(dist, "init_process_group"):
        for block in examples("training.md"):
            if is_of_a_folder(block):
                continue
            exec(block.replace("import zeropp\n", ""), names)  # the page's own code
            names["model"] = made[-1]
            assert isinstance(names.get("loss", 0.0), float)
    steps = made[-1].engine.steps_done
    for model in made:
        model.close()
    return printed, steps


def test_the_examples_of_training_run(world: World, tmp_path: Path) -> None:
    assert len(examples("training.md")) >= 6
    first, second = world.run(run_training, tmp_path / "checkpoint", size=2)
    assert first == second
    printed, _ = first
    assert len(printed) == 4  # loss and gradient norm of two steps
    assert all(value > 0 for value in printed)


class Head(nn.Module):
    """A head whose weight is tied to the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


@on_ranks(2)
def test_the_answers_run(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if target.dtype == torch.int64:
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        return F.mse_loss(output, target)

    inputs, targets = torch.randn(2, 8, WIDTH)
    names: dict[str, Any] = {
        "zeropp": zeropp, "loss_fn": loss_fn, "inputs": inputs, "targets": targets,
        "tokens": torch.randint(0, 16, (8, 4)), "folder": str(tmp_path / "checkpoint"),
        "print": lambda *values: None,
    }  # fmt: skip
    blocks = examples("questions.md")
    assert len(blocks) >= 7
    for block in blocks:
        names["layers"], names["five_layers"] = ([linear() for _ in range(n)] for n in (4, 5))
        names["tied_layers"] = [nn.Embedding(16, WIDTH), linear(), Head()]
        before = names.get("model")
        exec(block, names)  # the page's own code
        if before is not None and names["model"] is not before:
            before.close()
    names["model"].close()


ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "scripts" / "examples" / "train.py"
TEXT = ROOT / "benchmarks" / "worker" / "kjv_genesis_psalms.txt"
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def example() -> dict[str, Any]:
    """The names of the script, which is to be read in one go."""
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 95
    return runpy.run_path(str(EXAMPLE))


def run_example(*arguments: str) -> list[float]:
    """Run the script's ``main``."""
    with mock.patch.object(dist, "init_process_group"):
        return example()["main"](list(arguments))  # type: ignore[no-any-return]


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
    text = folder / "text.txt"
    text.write_text(TEXT.read_text("utf-8")[:60_000], "utf-8")

    def run(out: str, steps: int, pp: int, ranks: int) -> list[list[float]]:
        options = {"pp": pp, "steps": steps, "length": 32, "every": 2, "keep": 2, "lr": 1e-3}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words += ["--check"] if ranks == 4 else []
        given = str(folder), str(text), "--out", str(folder / out), "--separator", "\n", *words
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
    rows = example()["packed_rows"](["123", "45", "6789"], tokenizer, 5)
    inputs, targets, places = (part.tolist() for part in rows.tensors)
    assert inputs == [[1, 2, 3, 0, 4], [5, 0, 6, 7, 8]]
    assert targets == [[2, 3, 0, -100, 5], [0, -100, 7, 8, 9]]
    assert places == [[0, 1, 2, 3, 0], [0, 1, 0, 1, 2]]


def test_a_lone_rank_is_measured_and_reported(tmp_path: Path) -> None:
    out, specs = tmp_path / "out", tmp_path / "specs"
    small = {"GPU_READY_SMALL": "1", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    places = {"OUT": str(out), "SPECS": str(specs), "TMPDIR": str(tmp_path)}
    variables = os.environ | small | places | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    variables |= {"S": "400", "LONG": "300", "ONLY": "lone_a1 overlap"}
    freeze = [sys.executable, "scripts/gpu/specs.py", str(specs), "--small", "--only=a_zeropp"]
    for command in (freeze, ["bash", "scripts/gpu/run.sh"]):
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not (out / "failed.txt").exists()
    steps = (out / "steps.log").read_text()
    assert "end lone_a1: 0" in steps
    assert "skip" not in steps
    with (out / "report" / "actions.csv").open(newline="") as file:
        rows = {row["action"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["forward", "B + W", "update", "all"]
    assert all(float(row["measured_s"]) > 0 and not row["described_s"] for row in rows.values())
    assert "Described against" in (out / "summary.txt").read_text()
    assert (out / "all.tar.gz").is_file()
