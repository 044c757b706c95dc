"""The lanes of one rank, and the reductions in them that compute has not waited for."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from zeropp.engine.lanes import Lane, Ticket, make_lane


@dataclass(frozen=True)
class Lanes:
    """The lanes of one rank, for all of its chunks.

    ``reducing`` and ``crossing`` hold the reductions over the shards and over the replicas that
    compute has not waited for; a ticket keeps the gradients that its reduction reads. Those over
    the shards are found by the flat buffer that they belong to, which has at most one.
    """

    device: torch.device
    gather: Lane
    reduce: Lane
    replicate: Lane
    reducing: dict[object, Ticket] = field(default_factory=dict, init=False)
    crossing: list[Ticket] = field(default_factory=list, init=False)

    def join_reductions(self) -> None:
        """Let compute wait for all reductions over the shards, and free what they read."""
        for ticket in self.reducing.values():
            ticket.wait()
        self.reducing.clear()

    def join_reduction_of(self, flat: object) -> None:
        """Like ``join_reductions``, for the reduction of one flat buffer, if there is one."""
        ticket = self.reducing.pop(flat, None)
        if ticket is not None:
            ticket.wait()

    def join_crossings(self) -> None:
        """Let compute wait for all reductions over the replicas, and free what they read."""
        for ticket in self.crossing:
            ticket.wait()
        self.crossing.clear()

    def abandon(self) -> None:
        """Drop all work that has not begun, and forget what compute has not waited for."""
        for lane in (self.gather, self.reduce, self.replicate):
            lane.abandon()
        self.reducing.clear()
        self.crossing.clear()


def make_lanes(device: torch.device, undo: ExitStack) -> Lanes:
    """Make the lanes of a rank on a device; ``undo`` collects how to finish their work and end
    them, each as soon as it is made."""
    lanes = []
    for name in ("zeropp gathers", "zeropp reductions", "zeropp replicas"):
        lanes.append(make_lane(device, name))
        undo.callback(lanes[-1].close)
    gather, reduce, replicate = lanes
    return Lanes(device, gather, reduce, replicate)
