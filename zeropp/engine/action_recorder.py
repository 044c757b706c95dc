"""What a rank has run, action by action: the same counts and the same clock for every contender."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.profiler import record_function

from zeropp.engine.private_names import is_profiled
from zeropp.schedule.event_loop import LANES
from zeropp.schedule.program import Op
from zeropp.types.timeline import Span


class ActionRecorder:
    """Counts what pipeline rank ``rank`` runs and, while spans are recorded, notes when it ran.

    It is the base of what runs a step on ``device``, and has those methods of
    ``zeropp.types.training.Trainer`` that do not depend on how the step is run.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._counts: Counter[str] = Counter()
        self._spans: list[Span] | None = None
        self._begin = 0.0

    def counters(self) -> dict[str, int]:
        """See ``Trainer.counters``."""
        return dict(self._counts)

    def record_spans(self, enabled: bool) -> None:
        """See ``Trainer.record_spans``."""
        self._spans = [] if enabled else None

    def spans(self) -> list[Span]:
        """See ``Trainer.spans``."""
        return list(self._spans or [])

    def _begin_step(self) -> None:
        """Start the clock of a step."""
        self._begin = time.perf_counter()

    def _clock(self) -> float:
        """Seconds since the step began, once compute is done; 0.0 while no spans are recorded."""
        if self._spans is None:
            return 0.0
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter() - self._begin

    def _add_span(self, op: Op, action: str, start: float) -> None:
        """Record the span of an action that began at ``start`` and ends now, while spans are on."""
        if self._spans is not None:
            self._spans.append(Span(self._rank, LANES[op], action, start, self._clock()))

    @contextmanager
    def _running(self, op: Op, action: str) -> Iterator[None]:
        """Inside, an action runs: it is marked for the profiler, counted, and gets its span."""
        start = self._clock()
        # Which takes long without a profiler, too.
        with record_function(action) if is_profiled() else nullcontext():
            yield
        self._counts[op.name.lower()] += 1
        self._add_span(op, action, start)
