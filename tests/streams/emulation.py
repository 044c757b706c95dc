"""The engine on virtual streams: what a rank runs, and what was found of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zeropp
from baselines.model import build_model, cross_entropy
from tests.streams.faults import CONTROLS, FAULTS
from zeropp.emulate import Report, emulated, watch
from zeropp.emulate.log import Issued
from zeropp.types.shape import ModelShape

SEQUENCE, WORDS = 4, 13


@dataclass(frozen=True)
class Case:
    """One configuration: what ``parallelize`` is given, and what is done besides training."""

    name: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 4
    tied: bool = False
    dropout: float = 0.0
    whole: bool = False  # matrices are updated whole, by Muon
    passes_weights: bool = False  # layers give the next one a view of a weight, too
    then: tuple[str, ...] = ()  # names of functions below

    def __str__(self) -> str:
        return self.name


class PassesWeights(nn.Module):
    """A layer that multiplies what it gives by the weight that the layer before gives beside its
    output, and gives a view of its own weight, unless it is the last."""

    def __init__(self, layer: nn.Module, is_last: bool) -> None:
        super().__init__()
        self.layer, self.is_last = layer, is_last
        self.scale = nn.Parameter(torch.ones(1, 2))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        y: Tensor = self.layer(x)
        y = y if scale is None else y * scale.mean()
        return y if self.is_last else (y, self.scale.view(2))


@dataclass
class Found:
    """What one rank has found: losses and other numbers, faults as text, and its log."""

    numbers: list[float]
    faults: list[str]
    log: list[Issued]
    program: list[str]  # what the engine was told to do in a step


def run_case(case: Case, emulate: bool, folder: str) -> Found:
    """Train on this rank, on virtual streams if ``emulate``; ``folder`` is for checkpoints."""
    with ExitStack() as stack:
        device = stack.enter_context(emulated()) if emulate else None
        mark = (lambda _: None) if device is None else device.log.place
        numbers, program = _train(case, folder, mark)
    if device is None:
        return Found(numbers, [], [], program)
    return Found(numbers, [str(one) for one in device.faults], device.log.issued, program)


def watch_case(case: Case, fault: str | None = None) -> tuple[Report, list[float]]:
    """What ``watch`` reports of two steps of a model that has done one before, with a fault or a
    control of ``faults.py`` by its name; and the losses of these and of one more step."""
    make = nullcontext if fault is None else (FAULTS | CONTROLS)[fault][0]
    model, batches = built(case)
    losses: list[float] = []

    def step() -> None:
        batch = batches[len(losses)][model.rows]
        losses.append(float(model.train_step(batch[:, :-1], batch[:, 1:]).loss))

    step()
    with make():
        report = watch(step, times=2)
    if fault is None:
        step()
    model.close()
    return report, losses


def built(case: Case) -> tuple[zeropp.ParallelModel, torch.Tensor]:
    """The model of a case, and global batches."""
    shape = ModelShape(
        name="test", family="gpt", layers=2, hidden=8, heads=2, kv_heads=2, ffn=16,
        vocab=WORDS, seq=SEQUENCE, tied_embeddings=False, dropout=case.dropout,
    )  # fmt: skip
    layers: list[Any] = list(build_model(shape, 3))
    if case.passes_weights:
        layers = [PassesWeights(layer, layer is layers[-1]) for layer in layers]
    options = dict(case.options)
    if case.dropout:
        options["dropout_seed"] = 3
    if case.tied:
        options["tied"] = ((0, "tokens.weight"), (len(layers) - 1, "output.weight"))
        layers[-1].output.weight.data.copy_(layers[0].tokens.weight.data)
    generator = torch.Generator().manual_seed(5)
    batches = torch.randint(WORDS, (6, case.batch, SEQUENCE + 1), generator=generator)
    optimizer: Any = zeropp.OptimizerConfig("adamw", lr=1e-2, weight_decay=0.1, clip_norm=0.05)
    if case.whole:
        optimizer = _muon_and_adamw
        options |= {"group_of": lambda _, parameter: str(parameter.dim()), "clip_norm": 0.05}
    model = zeropp.parallelize(
        layers, cross_entropy, sample=batches[0][:1, :-1], global_batch=case.batch,
        optimizer=optimizer, **options,
    )  # fmt: skip
    return model, batches


def _train(case: Case, folder: str, mark: Callable[[str], None]) -> tuple[list[float], list[str]]:
    model, batches = built(case)
    numbers: list[Any] = []

    def step(index: int) -> None:
        batch = batches[index][model.rows]
        result = model.train_step(batch[:, :-1], batch[:, 1:])
        numbers.extend((result.loss, result.grad_norm))

    program = [str(action) for action in model.engine.interpreter._program]
    mark("the first step")
    step(0)
    mark("its end")
    mark("the second step")
    step(1)
    mark("the end of the second step")
    for name in case.then:
        numbers += BETWEEN_STEPS[name](model, batches[4], folder)
        step(5)
    model.close()
    return [float(number) for number in numbers], program


def _muon_and_adamw(groups: Mapping[str, list[Any]]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Muon(groups["2"], lr=1e-2),
        torch.optim.AdamW(groups["1"], lr=1e-2, fused=True),
    ]


def _evaluate(model: zeropp.ParallelModel, batch: torch.Tensor, folder: str) -> list[float]:
    del folder
    mine = batch[model.data_parallel_rank :: model.data_parallel_size][:3]
    return [model.eval_step(mine[:, :-1], mine[:, 1:])]


def _save_and_load(model: zeropp.ParallelModel, batch: torch.Tensor, folder: str) -> list[float]:
    del batch
    model.save(folder)
    model.load(folder)
    return []


def _state(model: zeropp.ParallelModel, batch: torch.Tensor, folder: str) -> list[float]:
    del batch, folder
    model.load_state_dict(model.state_dict())
    whole = model.full_state_dict()
    return [float(sum(value.double().sum() for value in whole.values()))]


def _parameters(model: zeropp.ParallelModel, batch: torch.Tensor, folder: str) -> list[float]:
    del batch, folder
    return [float(sum(value.double().sum() for _, value in model.full_parameters()))]


def _gradients(model: zeropp.ParallelModel, batch: torch.Tensor, folder: str) -> list[float]:
    del batch, folder
    return [float(sum(value.double().sum() for _, value in model.gradients()))]


def _norms(model: zeropp.ParallelModel, batch: torch.Tensor, folder: str) -> list[float]:
    """What a moving average or a log of weights does between steps."""
    del batch, folder
    found = [
        parameter.detach().float().norm()
        for flat in model.engine.flats
        for parameters in flat.members.values()
        for parameter in parameters
    ]
    return [float(norm) for norm in found if not norm.isnan()]


def _spans(model: zeropp.ParallelModel, batch: torch.Tensor, folder: str) -> list[float]:
    del batch, folder
    model.engine.interpreter.record_spans(True)
    return []


BETWEEN_STEPS = {
    "evaluate": _evaluate,
    "gradients": _gradients,
    "norms": _norms,
    "parameters": _parameters,
    "save and load": _save_and_load,
    "spans": _spans,
    "state": _state,
}
