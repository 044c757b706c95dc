"""The answers of docs/questions.md: every command ends as the page says, and its code runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from benchmarks import CHECKOUT
from tests.gloo.world import World

PAGE = (CHECKOUT / "docs" / "questions.md").read_text("utf-8")
COMMANDS = re.findall(r"```bash\n(.*?)\n```", PAGE, re.DOTALL)
CODE = re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL)
# In one interpreter per command, with shorter searches than a person's.
RUN = """
import runpy, sys
import benchmarks.explain.answer
benchmarks.explain.answer.SEARCH_S = 0.5
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
WIDTH = 8


def test_every_question_has_links_and_an_answer() -> None:
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 18
    for section in sections:
        assert "https://github.com/" in section, section
        assert "```" in section or "](training.md)" in section, section


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers(command: str, tmp_path: Path) -> None:
    refused = command.startswith("! ")
    module, *words = shlex.split(command.removeprefix("! python -m ").removeprefix("python -m "))
    if module == "benchmarks.run":
        words += [f"runs_dir={tmp_path / 'runs'}", f"report_dir={tmp_path / 'report'}"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, module, *words],
        capture_output=True, text=True, timeout=300, check=False, cwd=CHECKOUT,
    )  # fmt: skip
    if refused:
        assert done.returncode == 2, done.stdout + done.stderr
        assert "error: " in done.stderr
    else:
        assert done.returncode in ((0, 1) if "explain" in module else (0,)), done.stderr
        assert done.stdout


class Head(nn.Module):
    """A head whose weight is tied to the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def run_code(folder: Path) -> int:
    """Run the page's code blocks in one namespace; gives how many there were."""
    torch.manual_seed(0)

    def layers(count: int = 4) -> list[Any]:
        return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if target.dtype == torch.int64:
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        return F.mse_loss(output, target)

    inputs, targets = torch.randn(2, 8, WIDTH)
    tokens = torch.randint(0, 16, (8, 4))
    names: dict[str, Any] = {
        "zeropp": zeropp, "loss_fn": loss_fn, "inputs": inputs, "targets": targets,
        "tokens": tokens, "folder": str(folder), "print": lambda *values: None,
    }  # fmt: skip
    for block in CODE:
        names["layers"], names["five_layers"] = layers(), layers(5)
        names["tied_layers"] = [nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH), Head()]
        before = names.get("model")
        exec(block, names)  # the page's own code
        if before is not None and names["model"] is not before:
            before.close()
    names["model"].close()
    return len(CODE)


def test_the_code_runs_on_two_ranks(world: World, tmp_path: Path) -> None:
    assert world.run(run_code, tmp_path / "checkpoint", size=2) == [len(CODE)] * 2
    assert len(CODE) >= 7
