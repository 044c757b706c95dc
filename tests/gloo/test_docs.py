"""The Python examples of the page on training scripts, run one after another on two ranks."""

from __future__ import annotations

import copy
import re
import textwrap
from pathlib import Path
from types import EllipsisType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from tests.gloo.world import World
from zeropp.train.parallel_model import ParallelModel

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
WIDTH, ROWS = 8, 64


def examples() -> list[str]:
    """The page's Python code, block by block."""
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in blocks]


class Masked(nn.Module):
    """Takes the page's mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.linear(x)
        return out if attention_mask is None else out * attention_mask[:, None]


def batch_names(inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """The page's names for a batch and its parts."""
    return {
        "inputs": inputs,
        "targets": targets,
        "batches": [(inputs, targets)] * 2,
        "mask": torch.ones(ROWS),
        "dataset": torch.utils.data.TensorDataset(inputs, targets),
        "rows": slice(None),
        "held_out": inputs,
        "held_out_targets": targets,
    }


def run_page(folder: Path) -> tuple[int, list[float], int]:
    """Run all blocks in one namespace; gives how many there were, the losses that they printed, and
    the steps of the last model."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), *(Masked() for _ in range(4)), nn.Linear(WIDTH, WIDTH)]
    inputs, targets = torch.randn(2, ROWS, WIDTH)
    usual: dict[str, Any] = {"sample": inputs[:1], "global_batch": ROWS, "pp": 2}
    made: list[ParallelModel] = []

    def parallelize(first: Any = ..., loss_fn: Any = F.mse_loss, **more: Any) -> ParallelModel:
        """An ellipsis on the page stands for what the page has said; here are two ranks."""
        given = layers if isinstance(first, EllipsisType) else first
        own = copy.deepcopy(given)  # each model takes its layers over
        made.append(zeropp.parallelize(own, loss_fn, **{**usual, **more, "pp": 2, "shard": 1}))
        return made[-1]

    printed: list[float] = []
    names: dict[str, Any] = {
        "zeropp": SimpleNamespace(parallelize=parallelize),
        "nn": nn,
        "layers": layers,
        "loss_fn": F.mse_loss,
        **batch_names(inputs, targets),
        "folder": str(folder),
        "other_folder": f"{folder}_other",
        "loader_state": {"epoch": 1},
        "print": lambda *values: printed.extend(values),
    }
    blocks = examples()
    with mock.patch.object(dist, "init_process_group"):
        for block in blocks:
            exec(block.replace("import zeropp\n", ""), names)  # the page's own code
            names["model"] = made[-1]
            assert isinstance(names.get("loss", 0.0), float)
    steps = made[-1].engine.steps_done
    for model in made:
        model.close()
    return len(blocks), printed, steps


def test_the_examples_of_the_page_run(world: World, tmp_path: Path) -> None:
    first, second = world.run(run_page, tmp_path / "checkpoint", size=2)
    assert first == second
    count, printed, _ = first
    assert count == len(examples()) >= 6
    assert len(printed) == 4  # loss and gradient norm of two steps
    assert all(value > 0 for value in printed)
