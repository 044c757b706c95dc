"""Faults to inject into the engine, each of which takes one ordering or one reference away, and
controls, which change an order and are none. Each is a context manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from zeropp.engine.interpreter import Interpreter
from zeropp.engine.layers.chunk import Chunk
from zeropp.engine.parameters import flat as flat_module
from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.ranks import lanes
from zeropp.engine.update.optimizer import ParameterUpdate

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
    run = lanes._StreamLane.run
    with mock.patch.object(lanes._StreamLane, "run", lambda self, work, after=(): run(self, work)):
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
        self.state = flat_module.Sharded()


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
        self.state = flat_module.Gathering(self._lanes.gather.run(self._gather))


def _wait_for_gather_alone(self: Any) -> None:
    if isinstance(self.state, flat_module.Gathering):
        self.state.gather.wait()
        self._row_gathers.clear()
        self.state = flat_module.Unsharded()


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


def _sum_tied_without_waiting(self: Any) -> None:
    self.tied.sum_gradients()


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

    self.state = flat_module.Gathering(self._lanes.gather.run(work, tuple(self._row_gathers)))


# Name -> the fault, and the configuration (of ``cases.py``) that has what it breaks.
FAULTS: dict[str, tuple[Fault, str]] = {
    "no lane is waited for": (_instead(lanes._StreamTicket, wait=_nothing), "bf16"),
    "lanes ignore each other": (_lanes_ignore_after, "shards and replicas"),
    "lanes ignore compute": (_instead(lanes._StreamLane, run=_run_without_compute), "bf16"),
    "parameters freed under their gather": (
        _instead(FlatParameters, reshard=_reshard_at_once, wait=_nothing),
        "bf16",
    ),
    "forward before its gather": (_instead(Chunk, _wait=_nothing), "bf16"),
    "update before the reductions": (
        _instead(
            lanes.Lanes,
            join_shard_reductions=lambda self: self.shard_reductions.clear(),
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
    "replicas summed before shards": (_crosses_before_reducing, "shards and replicas"),
    "tied gradients before their sums": (
        _instead(ParameterUpdate, sum_tied=_sum_tied_without_waiting),
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
