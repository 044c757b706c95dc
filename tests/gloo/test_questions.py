"""The Python answers of docs/questions.md, one after another on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from tests.gloo.world import World

PAGE = (Path(__file__).parents[2] / "docs" / "questions.md").read_text("utf-8")
CODE = re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL)
WIDTH = 8


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
