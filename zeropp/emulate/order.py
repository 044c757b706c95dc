"""Races, reuse of memory, and hangs of a step that all ranks of a gloo job run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist

from zeropp.emulate.log import Issued
from zeropp.emulate.rendezvous import hanging_waits, mismatches, stuck
from zeropp.emulate.stand_ins import emulated


@dataclass(frozen=True)
class Report:
    """What ``watch`` has found on all ranks. ``faults``: races and reuse of memory, as text;
    ``unmatched``: messages and collectives that do not match; ``hangs``: by rank what it waits for
    without an end; ``hanging_waits``: by rank at how many of its places the host must not wait
    for its device (the allocator's retry, a kernel's first use), and at how many it may.
    ``host_waits``: by rank, what the host has waited for in the last run, in order; a number that
    it reads counts, also where it lies on the CPU. They are no fault."""

    faults: tuple[str, ...]
    unmatched: tuple[str, ...]
    hangs: dict[int, str]
    hanging_waits: dict[int, tuple[int, int]]
    host_waits: dict[int, tuple[str, ...]]

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

    Streams that ``work`` uses must be made in it, but for those of a ``zeropp.ParallelModel``, such
    as the one whose ``train_step`` it calls. All ranks must call this together.
    """
    begin = 0
    with emulated() as device:
        for _ in range(times):
            begin = len(device.log.issued)
            work()
    log = device.log.issued
    last = tuple(issued.what for issued in log[begin:] if issued.kind == "sync")
    seen = ([f"rank {dist.get_rank()}: {fault}" for fault in device.faults], log, last)
    gathered: list[tuple[list[str], list[Issued], tuple[str, ...]]] = [([], [], ())]
    gathered *= dist.get_world_size()
    dist.all_gather_object(gathered, seen)
    texts, issued_by, waited = zip(*gathered, strict=True)
    logs = dict(enumerate(issued_by))
    hangs = stuck(logs)
    bad = {} if hangs else {rank: len(hanging_waits(logs, rank)) for rank in logs}
    waits = {rank: (count, len(logs[rank]) + 1 - count) for rank, count in bad.items()}
    faults = tuple(chain.from_iterable(texts))
    return Report(faults, tuple(mismatches(logs)), hangs, waits, dict(enumerate(waited)))
