"""Races, reuse of memory, and hangs of a step that all ranks of a gloo job run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from zeropp.emulate.log import Issued
from zeropp.emulate.rendezvous import hanging_waits, mismatches, stuck
from zeropp.emulate.stand_ins import emulated


@dataclass(frozen=True)
class Report:
    """What ``watch`` has found on all ranks. ``faults``: races and reuse of memory, as text;
    ``unmatched``: messages and collectives that do not match; ``hangs``: by rank what it waits for
    without an end; ``hanging_waits``: by rank at how many of its places the host must not wait
    for its device (the allocator's retry, a kernel's first use), and at how many it may."""

    faults: tuple[str, ...]
    unmatched: tuple[str, ...]
    hangs: dict[int, str]
    hanging_waits: dict[int, tuple[int, int]]

    @property
    def is_clean(self) -> bool:
        """Whether nothing races and everything ends, also where one host waits for its device."""
        waits = any(bad for bad, _ in self.hanging_waits.values())
        return not (self.faults or self.unmatched or self.hangs or waits)

    def __str__(self) -> str:
        lines = [*self.faults, *(f"does not match: {mismatch}" for mismatch in self.unmatched)]
        lines += [f"hang: rank {rank}: {what}" for rank, what in self.hangs.items()]
        lines += [
            f"rank {rank}: a wait for the device would hang at {bad} of {bad + good} places"
            for rank, (bad, good) in self.hanging_waits.items()
            if bad
        ]
        return "\n".join(lines) or "no race, no hang"


def watch(work: Callable[[], object], *, times: int = 1) -> Report:
    """Run ``work`` so many times under emulation, on all ranks of the default process group (gloo,
    tensors on CPUs), and report what was found on any of them; every rank gets the same report.

    Streams that ``work`` uses must be made in it. All ranks must call this together.
    """
    with emulated() as device:
        for _ in range(times):
            work()
    seen = ([f"rank {dist.get_rank()}: {fault}" for fault in device.faults], device.log.issued)
    seen_by_rank: list[tuple[list[str], list[Issued]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(seen_by_rank, seen)
    logs = {rank: log for rank, (_, log) in enumerate(seen_by_rank)}
    hangs = stuck(logs)
    bad = {} if hangs else {rank: len(hanging_waits(logs, rank)) for rank in logs}
    waits = {rank: (count, len(logs[rank]) + 1 - count) for rank, count in bad.items()}
    faults = tuple(text for texts, _ in seen_by_rank for text in texts)
    return Report(faults, tuple(mismatches(logs)), hangs, waits)
