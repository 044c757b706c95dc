"""Lanes: work that runs beside compute, in the order in which it was asked for.

A lane is a stream of its own on CUDA and a thread of its own on a CPU. The work is the same code in
both cases (a cast, a collective, a sum), so that tests on a CPU run the overlap that a GPU runs.

Memory: tensors that a lane works on are allocated and freed by compute. A lane begins behind what
compute was asked for before, and compute waits for the lane's ticket before it reads or frees such
a tensor, so no allocator ever needs to know of the lane's stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Protocol

import torch

Work = Callable[[], None]


class Ticket(Protocol):
    """Stands for work that a lane was given; keeps the work's tensors as long as it lives."""

    def wait(self) -> None:
        """Let what the caller asks for next run behind the work: on CUDA the current stream waits,
        on a CPU the calling thread. Raises what the work raised on a CPU."""
        ...


class Lane(Protocol):
    """Runs work in order, beside compute."""

    def run(self, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
        """Start ``work`` behind what compute was asked for so far, and behind the tickets."""
        ...

    def close(self) -> None:
        """End the lane, its work done; it takes no more."""
        ...


def make_lane(device: torch.device, name: str) -> Lane:
    """A lane for a device's work."""
    if device.type == "cuda":
        return _StreamLane(device)
    return _InlineLane() if _inline else _ThreadLane(name)


_inline = False


@contextmanager
def inline_lanes() -> Iterator[None]:
    """Lanes that are made for a CPU while this is open run their work at once, in the caller's
    thread: for ranks without peers, whose dispatch modes other threads do not have."""
    global _inline
    before, _inline = _inline, True
    try:
        yield
    finally:
        _inline = before


class _StreamTicket:
    def __init__(self, event: torch.cuda.Event, work: Work) -> None:
        self._event, self._work = event, work

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _StreamLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for ticket in after:
                ticket.wait()
            work()
            return _StreamTicket(self._stream.record_event(), work)

    def close(self) -> None:
        self._stream.synchronize()


class _DoneTicket:
    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Nothing: the work is done."""


class _InlineLane:
    def run(self, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
        del after
        with torch.no_grad():
            work()
        return _DoneTicket(work)

    def close(self) -> None:
        """Nothing to end."""


class _ThreadTicket:
    def __init__(self, work: Work, after: Sequence[Ticket]) -> None:
        self._work, self._after = work, after
        self._done: Future[None] = Future()

    def execute(self) -> None:
        """Run the work, in the lane's thread."""
        try:
            for ticket in self._after:
                ticket.wait()
            with torch.no_grad():
                self._work()
            self._done.set_result(None)
        except BaseException as error:
            self._done.set_exception(error)
        self._after = ()

    def wait(self) -> None:
        self._done.result()


class _ThreadLane:
    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_ThreadTicket | None] = SimpleQueue()
        # A daemon: a rank that fails must not wait for collectives that its peers never join.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
        ticket = _ThreadTicket(work, after)
        self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (ticket := self._queue.get()) is not None:
            ticket.execute()
