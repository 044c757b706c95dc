"""Lanes: queues of work that overlaps compute; each lane runs its work in order.

A lane is a stream on CUDA and a thread on a CPU. The work (a cast, a collective, a sum) is the same
code in both cases, so that tests on a CPU run the overlap that a GPU runs.

The tensors of a lane's work are allocated and freed by compute. Work in a lane begins after the
compute that was issued before it, and compute waits for the lane's ticket before it reads or frees
such a tensor. So the allocator does not need to know the lane's stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

Work = Callable[[], None]
REPLICAS = "zeropp replicas"  # the lane of what replicas send each other


def make_lane(device: torch.device, name: str) -> Lane:
    """Make a lane for a device: a stream or a thread."""
    return StreamLane(device, name) if device.type == "cuda" else ThreadLane(name)


class _StreamTicket:
    """Represents work in a lane; as long as the ticket exists, it keeps the work's tensors."""

    def __init__(self, event: torch.cuda.Event, work: Work) -> None:
        self._event, self._work = event, work

    def wait(self) -> None:
        """Let the caller's next operations, on the current stream, run after the work."""
        self._event.wait()


class StreamLane:
    """Runs work in order, overlapping compute."""

    def __init__(self, device: torch.device, name: str) -> None:
        # What compute waits for inside a step goes first, as in FSDP2; replicas have until its end.
        priority = 0 if name == REPLICAS else -1
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def run(self, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
        """Run ``work`` after the compute that was issued so far and after the tickets' work."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for ticket in after:
                ticket.wait()
            work()
            return _StreamTicket(self._stream.record_event(), work)

    def close(self) -> None:
        """Finish the lane's work and end it."""
        self._stream.synchronize()


class _ThreadTicket:
    """As that of a stream; ``wait`` blocks the thread, and raises what the work has raised."""

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
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)
        self._after = ()

    def wait(self) -> None:
        self._done.result()


class ThreadLane:
    """Runs work in order, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.name, self._queue = name, SimpleQueue[_ThreadTicket | None]()
        # A daemon, because a rank that fails must not wait for collectives that its peers never
        # join.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
        """As that of a stream."""
        ticket = _ThreadTicket(work, after)
        self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        """Finish the lane's work and end it."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (ticket := self._queue.get()) is not None:
            ticket.execute()
            del ticket  # else its tensors would live until the next ticket


Ticket = _StreamTicket | _ThreadTicket
Lane = StreamLane | ThreadLane


@dataclass(frozen=True)
class Lanes:
    """The lanes of one rank, for all of its chunks.

    ``shard_reductions`` and ``replica_reductions`` hold the reductions over the shards and over the
    replicas that compute has not waited for; a ticket keeps the gradients that its reduction reads.
    Those over the shards are found by the flat buffer that they belong to, which has at most one.
    """

    device: torch.device
    gather: Lane
    reduce: Lane
    replicate: Lane
    shard_reductions: dict[object, Ticket] = field(default_factory=dict, init=False)
    replica_reductions: list[Ticket] = field(default_factory=list, init=False)

    def join_reductions(self) -> None:
        """Let compute wait for all reductions, and free what they read."""
        self.join_shard_reductions()
        self.join_replica_reductions()

    def join_shard_reductions(self, but: Collection[object] = ()) -> None:
        """Let compute wait for all reductions over the shards, ``but`` for those of some flat
        buffers, and free what they read."""
        for flat in [flat for flat in self.shard_reductions if flat not in but]:
            self.join_reduction_of(flat)

    def join_reduction_of(self, flat: object) -> None:
        """Like ``join_shard_reductions``, for that of one flat buffer, if there is one."""
        ticket = self.shard_reductions.pop(flat, None)
        if ticket is not None:
            ticket.wait()

    def join_replica_reductions(self) -> None:
        """Let compute wait for all reductions over the replicas, and free what they read."""
        for ticket in self.replica_reductions:
            ticket.wait()
        self.replica_reductions.clear()


def make_lanes(device: torch.device, undo: ExitStack) -> Lanes:
    """Make the lanes of a rank on a device; ``undo`` collects how to finish their work and end
    them, each as soon as it is made."""
    lanes = []
    for name in ("zeropp gathers", "zeropp reductions", REPLICAS):
        lanes.append(make_lane(device, name))
        undo.callback(lanes[-1].close)
    return Lanes(device, *lanes)
