"""The kernels of one step, and sums over them, from the trace of torch's profiler (Chrome format).

Every action of a program is a profiler range on the host. A kernel belongs to the action in whose
range it was launched, from any thread: autograd launches those of a backward from a thread of its
own while the range's thread waits.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from zeropp.schedule.program import STEP_END, Action, Op, parse_action

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_TORCH_PIPELINE = "PP:"  # torch.distributed.pipelining's ranges are named PP:0F1

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel, copy or fill on a stream; ``launched_s`` is when the host had launched it."""

    stream: int
    launched_s: float
    start_s: float
    end_s: float
    action: Action


@dataclass(frozen=True, kw_only=True)
class StepKernels:
    """Sums over the passes of one step, its update aside, in seconds.

    ``compute_s``: the time of compute actions on the compute stream, each from the start of its
    first kernel to the end of its last. ``kernels_s``: the time of those kernels only.
    ``host_bound_s``: the time in which the compute stream was idle because its next kernel had not
    been launched. ``gather_s``: the time in which gathers ran on other streams.
    ``gather_beside_compute_s``: the part of that in which a kernel ran on the compute stream, too.
    """

    step_s: float
    compute_s: float
    kernels_s: float
    host_bound_s: float
    gather_s: float
    gather_beside_compute_s: float

    @property
    def compute_over_kernels(self) -> float:
        """Compute time divided by the sum of its kernels; 1 if there are no gaps between them."""
        return self.compute_s / self.kernels_s


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a compressed trace file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(json.load(file)["traceEvents"])


def kernels_of(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """The kernels that actions of a program launched, sorted by their starts."""
    whole = [event for event in events if event.get("ph") == "X"]
    ranges: list[tuple[float, float, Action]] = []
    for event in whole:
        with suppress(ValueError):  # a range that is no action
            if event.get("cat") == "user_annotation":
                action = parse_action(event["name"].removeprefix(_TORCH_PIPELINE))
                ranges.append((event["ts"], event["ts"] + event["dur"], action))
    ranges.sort(key=itemgetter(0))
    begins = [begin for begin, _, _ in ranges]
    launches = {
        event["args"]["correlation"]: event
        for event in whole
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    kernels = []
    for event in whole:
        if event.get("cat") not in _ON_DEVICE:
            continue
        launch = launches.get(event["args"].get("correlation"))
        place = bisect_right(begins, launch["ts"]) - 1 if launch is not None else -1
        if launch is None or place < 0 or launch["ts"] > ranges[place][1]:
            continue  # no action launched it
        start, launched = event["ts"], launch["ts"] + launch["dur"]
        end, action = start + event["dur"], ranges[place][2]
        stream = event["args"]["stream"]
        kernels.append(
            Kernel(
                stream=stream,
                launched_s=launched / 1e6,
                start_s=start / 1e6,
                end_s=end / 1e6,
                action=action,
            )
        )
    return sorted(kernels, key=lambda kernel: kernel.start_s)


def summarise_kernels(kernels: Sequence[Kernel]) -> StepKernels | None:
    """The sums over one step; None if no action launched a kernel (a step on a CPU)."""
    kernels = [kernel for kernel in kernels if kernel.action.op not in STEP_END]
    compute = [kernel for kernel in kernels if kernel.action.op.is_compute]
    if not compute:
        return None
    busy_s: dict[int, float] = defaultdict(float)
    for kernel in compute:
        busy_s[kernel.stream] += kernel.end_s - kernel.start_s
    stream = max(busy_s, key=busy_s.__getitem__)
    on_stream = [kernel for kernel in kernels if kernel.stream == stream]
    gathers = _union(
        (k.start_s, k.end_s) for k in kernels if k.action.op is Op.UNSHARD and k.stream != stream
    )
    busy = _union((kernel.start_s, kernel.end_s) for kernel in on_stream)
    compute = [kernel for kernel in compute if kernel.stream == stream]
    extents: dict[Action, Interval] = {}
    for kernel in compute:
        start, end = extents.get(kernel.action, (kernel.start_s, kernel.end_s))
        extents[kernel.action] = min(start, kernel.start_s), max(end, kernel.end_s)
    return StepKernels(
        step_s=max(k.end_s for k in on_stream) - on_stream[0].start_s,
        compute_s=sum(end - start for start, end in extents.values()),
        kernels_s=sum(k.end_s - k.start_s for k in compute),
        host_bound_s=sum(
            max(0.0, min(after.launched_s, after.start_s) - before.end_s)
            for before, after in pairwise(on_stream)
        ),
        gather_s=_length(gathers),
        gather_beside_compute_s=_length(gathers) + _length(busy) - _length(_union(gathers + busy)),
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
