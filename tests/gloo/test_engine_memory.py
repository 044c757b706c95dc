"""Gathered parameters and unreduced gradients of a rank, measured after every action of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest

from tests.gloo.cases import Case, build_model_of, local_microbatches
from tests.gloo.models import error_of
from tests.gloo.world import World, on_ranks
from zeropp.engine.engine import Engine
from zeropp.engine.parameters import flat as sums
from zeropp.engine.parameters.flat import FlatParameters, Gathering, Sharded, Unsharded
from zeropp.schedule.program import Op

CASE = Case(pp=2, shard=2, chunks=5, layers=10, unit=2, batch=16)
PREFETCH = 1  # the default of the settings


@dataclass
class Peaks:
    """Bytes of one rank; ``chunk`` is its largest chunk, whole."""

    gathered: int
    gradients: int
    reducing: int  # reductions that compute has not waited for
    chunk: int
    resident: int  # chunks that its program holds gathered at once
    unshards: int


def measure(case: Case) -> Peaks:
    engine = build_model_of(case).engine
    flats = [chunk.flats for chunk in engine.chunks.values()]
    sizes = [sum(flat.layout.size * 4 for flat in lot) for lot in flats]
    peaks = Peaks(0, 0, 0, max(sizes), _resident(engine), 0)

    def gathered() -> int:
        return sum(flat._storage.nbytes() for flat in engine.flats if not flat._resident)

    def gradients() -> int:
        return sum(flat._sums.nbytes for flat in engine.flats if flat._sums is not None)

    def look() -> None:
        for flat in engine.flats:  # never two buffers of sums
            assert flat._sums is None or flat not in engine.lanes.shard_reductions
        peaks.gathered = max(peaks.gathered, gathered())
        peaks.reducing = max(peaks.reducing, len(engine.lanes.shard_reductions))
        peaks.gradients = max(peaks.gradients, gradients())

    _after_every_action(engine, look)
    engine.step(local_microbatches(case, 0))
    assert not gathered() + gradients()
    assert not engine.lanes.shard_reductions
    peaks.unshards = engine.interpreter.counters()["unshard"]
    return peaks


def _after_every_action(engine: Engine, look: Callable[[], None]) -> None:
    handlers = engine.interpreter._handlers  # private: nobody else looks in between actions

    def looking(handler: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: object) -> None:
            handler(*arguments)
            look()

        return run

    for op, handler in handlers.items():
        handlers[op] = looking(handler)


def _resident(engine: Engine) -> int:
    gathered, most = 0, 0
    for action in engine.interpreter._program:  # private: what this rank runs, as lowered
        gathered += (action.op is Op.UNSHARD) - (action.op is Op.RESHARD)
        most = max(most, gathered)
    return most


def test_chunks_are_gathered_and_reduced_as_planned(world: World) -> None:
    """And gradients that wait for their reduction grow with no number of microbatches."""
    few = world.run(measure, replace(CASE, batch=8), size=CASE.world)
    many = world.run(measure, CASE, size=CASE.world)
    whole = world.run(measure, replace(CASE, reduce_every="step"), size=CASE.world)
    for peaks in many:
        assert 0 < peaks.gathered <= peaks.resident * peaks.chunk
        assert 0 < peaks.gradients <= (peaks.resident + PREFETCH) * peaks.chunk
        units = CASE.batch // CASE.shard // CASE.unit
        assert peaks.unshards <= 2 * CASE.chunks * units
        assert peaks.reducing == 2  # one chunk at a time, which has two buffers
    for small, large, once in zip(few, many, whole, strict=True):
        # Norms and biases take their gradients early: how many chunks' at a time is the order's.
        assert large.gradients <= 1.05 * small.gradients
        assert large.gradients < once.gradients


@pytest.mark.parametrize("chunks", [1, 2])
@on_ranks(1)
def test_a_lone_rank_keeps_the_sums_of_its_only_chunk(chunks: int) -> None:
    case = Case(pp=1, shard=1, chunks=chunks, layers=4, batch=4)
    engine, made = build_model_of(case).engine, []
    for step in range(3):
        with mock.patch.object(sums, "zeros", wraps=sums.zeros) as zeros:
            engine.step(local_microbatches(case, step))
        made.append(zeros.call_count)
    flats = len(engine.flats)
    assert flats >= chunks
    assert made == ([flats, 0, 0] if chunks == 1 else [flats] * 3)


@on_ranks(2)
def test_a_buffer_is_used_and_freed_only_after_its_gather() -> None:
    """The order is a step's, except what is refused."""
    flat = build_model_of(Case(pp=1, shard=2)).engine.flats[0]
    missing = "RuntimeError: parameters are used or freed without being gathered"
    twice = "RuntimeError: parameters are gathered while they are gathered already"
    for call, state, said in (
        (FlatParameters.wait, Sharded, missing),
        (FlatParameters.reshard, Sharded, missing),
        (FlatParameters.unshard, Gathering, ""),
        (FlatParameters.unshard, Gathering, twice),
        (FlatParameters.wait, Unsharded, ""),
        (FlatParameters.wait, Unsharded, ""),  # of the next microbatch
        (FlatParameters.unshard, Unsharded, twice),
        (FlatParameters.reshard, Sharded, ""),
        (FlatParameters.unshard, Gathering, ""),
        (FlatParameters.reshard, Sharded, ""),
    ):
        assert (error_of(partial(call, flat)), type(flat.state)) == (said, state)
