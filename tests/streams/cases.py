"""The engine on virtual streams: what a rank runs, and what was found of it; faults to inject into
the engine (each takes one ordering or one reference away), controls, which change an order
and are none; and thirteen configurations that differ in what its streams do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zeropp
from baselines.model import build_model, cross_entropy
from zeropp.emulate import Report, emulated, watch
from zeropp.emulate.log import Issued
from zeropp.engine.interpreter import Interpreter
from zeropp.engine.layers.chunk import Chunk
from zeropp.engine.parameters import flat as flat_module
from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.parameters.parts import GradientRoom
from zeropp.engine.ranks import lanes
from zeropp.engine.update.optimizer import ParameterUpdate
from zeropp.types.shape import ModelShape

Fault = Callable[[], AbstractContextManager[Any]]


def _instead(owner: Any, **methods: Any) -> Fault:
    """Other methods in the place of an owner's."""
    return lambda: mock.patch.multiple(owner, **methods)


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


@contextmanager
def _lanes_ignore_after() -> Iterator[None]:
    run = lanes.StreamLane.run
    with mock.patch.object(lanes.StreamLane, "run", lambda self, work, after=(): run(self, work)):
        yield


def _run_without_compute(self: Any, work: Any, after: Any = ()) -> Any:
    with torch.cuda.stream(self._stream), torch.no_grad():
        for ticket in after:
            ticket.wait()
        work()
        return lanes._StreamTicket(self._stream.record_event(), work)


def _reshard_at_once(self: Any) -> None:
    if not self._resident:
        self._row_gathers.clear()
        self._storage.resize_(0)


@contextmanager
def _tickets_keep_nothing() -> Iterator[None]:
    made = lanes._StreamTicket.__init__
    forgets = lambda self, event, work: made(self, event, None)  # type: ignore[arg-type] # noqa: E731
    with mock.patch.object(lanes._StreamTicket, "__init__", forgets):
        yield


def _arrived_at_once(self: Any, op: Any, key: Any, local: Any, step: Any) -> Any:
    message = step.receiving.pop((op, key), None)
    if message is None:
        return local.pop(key)
    for _, work in message:
        for inner in work.inner:  # so that the values are there; the stream does not wait
            inner.wait()
    return [tensor for tensor, _ in message]


def _unshard_at_once(self: Any) -> None:
    if not self._resident:
        self._storage.resize_(self.layout.size * self._buffer.element_size())
        self._gather_begun = self._lanes.gather.run(self._gather)


def _wait_for_gather_alone(self: Any) -> None:
    if self._gather_begun is not None:
        self._gather_begun.wait()
        self._row_gathers.clear()
        self._gather_begun = None


@contextmanager
def _zeros_in_a_lane() -> Iterator[None]:
    """Gradient sums are zeroed in a lane that compute does not wait for."""
    lane = lanes.make_lane(torch.device("cpu"), "zeros")

    def zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        out = torch.empty(size, dtype=dtype, device=device)
        lane.run(partial(_zero, out))
        return out

    with mock.patch.object(flat_module, "zeros", zeros):
        yield


@contextmanager
def _crosses_before_reducing() -> Iterator[None]:
    cross = FlatParameters._reduce_over_replicas
    early = lambda self, after: cross(self, [])  # noqa: E731
    with mock.patch.object(FlatParameters, "_reduce_over_replicas", early):
        yield


@contextmanager
def _wire_allocated_in_the_lane() -> Iterator[None]:
    """The place for gradients in the wire's type is allocated in the lane, which alone uses it."""
    reduce_scatter = flat_module._reduce_scatter

    def late(source: torch.Tensor, sent: torch.Tensor, *arguments: Any) -> None:
        reduce_scatter(source, torch.empty_like(sent), *arguments)

    with mock.patch.object(flat_module, "_reduce_scatter", late):
        yield


def _unshard_in_the_lane(self: Any) -> None:
    """The lane waits for compute before it allocates what compute has freed."""
    if self._resident:
        return

    def work() -> None:
        self._storage.resize_(self.layout.size * self._buffer.element_size())
        self._gather()

    self._gather_begun = self._lanes.gather.run(work, tuple(self._row_gathers))


def _room_at_once(self: Any, flat: FlatParameters) -> None:
    """The memory of the oldest parts is given away while they are reduced."""
    for other in [other for other in self.lanes.shard_reductions if other.room is self]:
        del self.lanes.shard_reductions[other]


# Name -> the fault, and the configuration that has what it breaks.
FAULTS: dict[str, tuple[Fault, str]] = {
    "no lane is waited for": (_instead(lanes._StreamTicket, wait=_nothing), "bf16"),
    "lanes ignore each other": (_lanes_ignore_after, "shards and replicas"),
    "lanes ignore compute": (_instead(lanes.StreamLane, run=_run_without_compute), "bf16"),
    "parameters freed under their gather": (
        _instead(FlatParameters, reshard=_reshard_at_once, wait=_nothing),
        "bf16",
    ),
    "forward before its gather": (_instead(Chunk, _wait=_nothing), "bf16"),
    "update before the reductions": (
        _instead(
            lanes.Lanes,
            join_shard_reductions=lambda self, but=(): self.shard_reductions.clear(),
            join_reduction_of=lambda self, flat: self.shard_reductions.pop(flat, None),
        ),
        "prefetch",
    ),
    "update before the replicas' sums": (
        _instead(lanes.Lanes, join_replica_reductions=lambda self: self.replica_reductions.clear()),
        "replicas",
    ),
    "a ticket keeps nothing": (_tickets_keep_nothing, "bf16 on the wire"),
    "a receive is not waited for": (
        _instead(Interpreter, _arrived=_arrived_at_once),
        "reduced once per step",
    ),
    "gather before the replicas' update": (
        _instead(FlatParameters, unshard=_unshard_at_once, wait=_wait_for_gather_alone),
        "replicas with ZeRO-1",
    ),
    "forward before the replicas' update": (
        _instead(FlatParameters, settle=_nothing),
        "visible parameters",
    ),
    "sums zeroed in a lane": (_zeros_in_a_lane, "prefetch"),
    "a part's room is taken too early": (_instead(GradientRoom, make=_room_at_once), "parts"),
    "replicas summed before shards": (_crosses_before_reducing, "shards and replicas"),
    "tied gradients before their sums": (
        _instead(ParameterUpdate, sum_tied=lambda self: self.tied.sum_gradients()),
        "units, tied weights",
    ),
}
CONTROLS: dict[str, tuple[Fault, str]] = {
    "wire allocated in the lane": (_wire_allocated_in_the_lane, "bf16 on the wire"),
    "buffer allocated in the lane": (
        _instead(FlatParameters, unshard=_unshard_in_the_lane),
        "bf16",
    ),
}


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
    then: tuple[str, ...] = ()  # what ``_between`` does

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
    control by its name; and the losses of these and of one more step."""
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
        numbers += _between(name, model, batches[4], folder)
        step(5)
    model.close()
    return [float(number) for number in numbers], program


def _muon_and_adamw(groups: Mapping[str, list[Any]]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Muon(groups["2"], lr=1e-2),
        torch.optim.AdamW(groups["1"], lr=1e-2, fused=True),
    ]


def _between(what: str, model: zeropp.ParallelModel, batch: torch.Tensor, folder: str) -> list[Any]:
    """What is done between two steps, as a case names it, and what it gives."""
    given: list[Any] = []
    if what == "evaluate":
        mine = batch[model.data_parallel_rank :: model.data_parallel_size][:3]
        given = [model.eval_step(mine[:, :-1], mine[:, 1:])]
    elif what == "save and load":
        model.save(folder)
        model.load(folder)
    elif what == "state":
        model.load_state_dict(model.state_dict())
        given = [*model.full_state_dict().values()]
    elif what == "spans":
        model.engine.interpreter.record_spans(True)
    elif what == "norms":  # as a moving average or a log of weights takes them
        slots = [slot for flat in model.engine.flats for slot in flat.members.values()]
        norms = [one.detach().float().norm() for slot in slots for one in slot]
        given = [norm for norm in norms if not norm.isnan()]
    else:
        reads = {"parameters": model.full_parameters, "gradients": model.gradients}
        given = [value for _, value in reads[what]()]
    return [float(torch.as_tensor(one).double().sum()) for one in given]


_PARTS = {"gradient_parts": 3, "unit": 2}
_BASE = {"pp": 2, "shard": 2, "chunks": 2}
CASES = {
    case.name: case
    for case in (
        Case("bf16", 2, {"pp": 1, "shard": 2, "chunks": 2, "precision": "bf16"}),
        Case("bf16 on the wire", 2, {"pp": 1, "shard": 2, "chunks": 2, "reduce_dtype": "bf16"}),
        Case(
            "units, tied weights",
            4,
            {**_BASE, "unit": 2},
            batch=8,
            tied=True,
            then=("evaluate", "parameters"),
        ),
        Case("replicas", 2, {"pp": 1, "replicate": 2, "chunks": 2}, then=("save and load",)),
        Case(
            "replicas with ZeRO-1",
            2,
            {"pp": 1, "replicate": 2, "replicate_zero": 1, "chunks": 2, "precision": "bf16"},
            then=("save and load", "evaluate", "state"),
        ),
        Case(
            "shards and replicas",
            4,
            {"pp": 1, "shard": 2, "replicate": 2, "replicate_zero": 1, "chunks": 2, "unit": 2}
            | {"reduce_dtype": "bf16"},
            then=("parameters", "gradients"),
        ),
        Case("prefetch", 2, {"pp": 1, "shard": 2, "chunks": 4, "prefetch": 2}),
        Case("parts", 2, {**_PARTS, "pp": 1, "shard": 2, "chunks": 4}, batch=8),
        Case("parts, delayed", 4, {**_PARTS, **_BASE, "reduce_dtype": "bf16"}, batch=8),
        Case(
            "recomputation",
            2,
            {"pp": 1, "shard": 2, "chunks": 2, "recompute": "full", "precision": "bf16"},
            dropout=0.1,
        ),
        Case(
            "offload",
            2,
            {"pp": 1, "shard": 2, "chunks": 4, "unit": 2, "offload_blocks": 2},
            batch=8,
            then=("evaluate", "save and load"),
        ),
        Case("weights are passed on", 4, {**_BASE, "chunks": 1}, passes_weights=True),
        Case("reduced once per step", 2, {"pp": 2, "chunks": 2, "reduce_every": "step"}),
        Case(
            "whole parameters",
            4,
            {"pp": 1, "shard": 2, "replicate": 2, "replicate_zero": 1, "chunks": 2, "unit": 2},
            whole=True,
            then=("save and load",),
        ),
        Case(
            "visible parameters",
            2,
            {"pp": 1, "replicate": 2, "replicate_zero": 1},
            then=("norms", "spans"),
        ),
    )
}
