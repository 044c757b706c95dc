"""Wrong keyword inputs and batches, and outputs of other number types than their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.gloo.step_cases import MICROBATCH, ROWS, WIDTH, Batch, made, mean_loss, parallel
from tests.gloo.world import World


def wrong_calls() -> dict[str, str]:
    """What wrong keyword inputs and batches say."""
    found = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    def build(keywords: dict[str, Tensor]) -> None:
        inputs = Batch("keywords", "mean", 0).inputs[:MICROBATCH]
        zeropp.parallelize(
            made("keywords"), mean_loss, sample=inputs, global_batch=ROWS, pp=2,
            sample_keywords=keywords,
        )  # fmt: skip

    _, _, keywords = Batch("keywords", "mean", 0).part(slice(MICROBATCH))
    note("missing", lambda: build({"positions": keywords["positions"]}))
    note("nobody's", lambda: build({**keywords, "padding": keywords["mask"]}))
    note("a step's own", lambda: build({**keywords, "outputs": keywords["mask"]}))
    note("one row", lambda: build({**keywords, "mask": keywords["mask"][:1]}))
    model = parallel("keywords", "mean", {"pp": 2})
    inputs, targets, keywords = Batch("keywords", "mean", 0).part(slice(None))
    note("left out", lambda: model.train_step(inputs, targets, mask=keywords["mask"]))
    short = {**keywords, "mask": keywords["mask"][:4]}
    note("short", lambda: model.train_step(inputs, targets, **short))
    note("uneven", lambda: model.eval_step(inputs, targets, **short))
    part = slice(0, 4 + 2 * dist.get_rank())
    inputs, targets, keywords = Batch("keywords", "mean", 0).part(part)
    note("ranks differ", lambda: model.eval_step(inputs, targets, **keywords))
    empty = inputs[:0], targets[:0], {name: value[:0] for name, value in keywords.items()}
    note("no rows", lambda: model.eval_step(empty[0], empty[1], **empty[2]))
    return found


MESSAGES = {
    "missing": "InfeasibleError: layers[1]: cannot be called with the output of the layer before",
    "nobody's": "InfeasibleError: sample_keywords: 'padding' is named by no layer's forward",
    "a step's own": "InfeasibleError: sample_keywords: 'outputs' is an argument of every",
    "one row": "InfeasibleError: sample_keywords: 'mask' has shape (1, 8), but one row",
    "left out": "TypeError: keyword inputs are ['mask'], but parallelize got",
    "short": "ValueError: mask: 4 rows, but this rank trains on 12 rows",
    "uneven": "ValueError: inputs: numbers of rows differ",
    "ranks differ": "RowsError: eval_step: ranks of one pipeline were given different rows",
    "no rows": "RowsError: inputs: no rank was given any rows",
}


def test_wrong_keywords_and_rows_are_one_error_on_every_rank(world: World) -> None:
    first, second = world.run(wrong_calls, size=2)
    assert first == second
    assert set(first) == set(MESSAGES)
    for name, message in MESSAGES.items():
        assert first[name].startswith(message), first[name]


class Scaled(nn.Module):
    """Has a buffer that stays fp32, and so an output that is wider than what bf16 computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).tanh()
        return out * self.get_buffer("scale")


class Autocast(nn.Module):
    """Casts inside, so its output is narrower than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = self.linear(x)
            return out.tanh()


def number_types(degrees: dict[str, Any]) -> list[float]:
    """Losses of layers whose outputs are of other types than their parameters or their inputs."""
    losses = []
    kinds: tuple[tuple[type[nn.Module], Literal["fp32", "bf16"]], ...] = (
        (Scaled, "bf16"),
        (Autocast, "fp32"),
    )
    for kind, precision in kinds:
        torch.manual_seed(5)
        layers = [kind() for _ in range(6)]
        inputs, targets = (
            part.float() for part in Batch("tuples", "mean", 0).part(slice(None))[:2]
        )
        with zeropp.parallelize(
            layers, mean_loss, sample=inputs[:MICROBATCH], global_batch=ROWS,
            precision=precision, optimizer=zeropp.OptimizerConfig("sgd", lr=0.5), **degrees,
        ) as model:  # fmt: skip
            rows = model.rows
            results = [model.train_step(inputs[rows], targets[rows]) for _ in range(3)]
            losses += [float(result.loss) for result in results]
            losses.append(model.eval_step(inputs[rows], targets[rows]))
    return losses


def test_other_number_types_cross_stages(world: World) -> None:
    (alone,) = world.run(number_types, {}, size=1)
    assert alone[2] < alone[0]
    for found in world.run(number_types, {"pp": 2, "chunks": 2}, size=2):
        assert found == pytest.approx(alone, rel=1e-3)
