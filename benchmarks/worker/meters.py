"""Measures one rank of a large job, alone, with real tensors: its memory, compute and kernels.

The rank runs the contender's own code in a ``fake_world``. So parameters, activations, kernels and
launches are those of the job, but network and waiting for peers are missing, and losses mean
nothing.
"""

from __future__ import annotations

import ctypes
import gc
import gzip
import json
import os
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.records.environment import capture_environment, read_code
from benchmarks.records.events import EventWriter
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import local_batch, open_batches
from zeropp.engine.tracing import fake_world
from zeropp.schedule.program import Action, Op, parse_action
from zeropp.timeline import Span

# The code that this rank runs, read when its modules are imported: the files may be edited later.
# Ranks that are forked from one process have its modules, and so its digest.
LOADED = read_code(ask_git=os.environ.get("RANK", "0") == "0")


_RESET_PEAK = "5"  # proc(5): writing 5 to clear_refs resets VmHWM


class MemoryMeter:
    """Measures a rank's peak memory from its construction on, just before the trainer is built: on
    CUDA the allocator's allocated and reserved peaks; on a CPU, which has no such allocator, the
    peak resident set above that at the start, with what libraries allocate on first use."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._device = device
        self._start_bytes = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # freed pages of the process would hide later growth
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        self._start_bytes = _status_bytes("VmRSS")

    def peaks(self) -> dict[str, int]:
        """The peaks in bytes, with the field names of RankRecord."""
        if self._device.type == "cuda":
            return {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            }
        return {"peak_rss_bytes": max(0, _status_bytes("VmHWM") - self._start_bytes)}

    def peak_bytes(self) -> int:
        """The largest of the peaks: on a GPU what the allocator reserved."""
        return max(self.peaks().values())


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# From the trace of torch's profiler (Chrome format): every action of a program is a profiler range
# on the host. A kernel belongs to the action in whose range it was launched, from any thread:
# autograd launches those of a backward from a thread of its own while the range's thread waits.
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
    """Sums over one step, in seconds.

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
    with gzip.open(path, "rt") as file:
        return list(json.load(file)["traceEvents"])


def kernels_of(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """The kernels that actions of a program launched, sorted by their starts."""
    whole = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(_ranges(whole), key=lambda found: found[0])
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


def _ranges(events: Iterable[dict[str, Any]]) -> Iterable[tuple[float, float, Action]]:
    for event in events:
        if event.get("cat") == "user_annotation":
            try:
                action = parse_action(event["name"].removeprefix(_TORCH_PIPELINE))
            except ValueError:
                continue  # a range that is no action
            yield event["ts"], event["ts"] + event["dur"], action


def summarise_kernels(kernels: Sequence[Kernel]) -> StepKernels | None:
    """The sums over one step; None if no action launched a kernel (a step on a CPU)."""
    compute = [kernel for kernel in kernels if kernel.action.op.is_compute]
    if not compute:
        return None
    busy_s: dict[int, float] = defaultdict(float)
    for kernel in compute:
        busy_s[kernel.stream] += kernel.end_s - kernel.start_s
    stream = max(busy_s, key=busy_s.__getitem__)
    mine = [kernel for kernel in kernels if kernel.stream == stream]
    gathers = _union(
        (k.start_s, k.end_s) for k in kernels if k.action.op is Op.UNSHARD and k.stream != stream
    )
    busy = _union((kernel.start_s, kernel.end_s) for kernel in mine)
    compute = [kernel for kernel in compute if kernel.stream == stream]
    return StepKernels(
        step_s=max(k.end_s for k in mine) - mine[0].start_s,
        compute_s=_extents(compute),
        kernels_s=sum(k.end_s - k.start_s for k in compute),
        host_bound_s=sum(
            max(0.0, min(after.launched_s, after.start_s) - before.end_s)
            for before, after in pairwise(mine)
        ),
        gather_s=_length(gathers),
        gather_beside_compute_s=_length(gathers) + _length(busy) - _length(_union(gathers + busy)),
    )


def _extents(kernels: Iterable[Kernel]) -> float:
    """The sum over actions of the time from the start of the first kernel to the end of the
    last."""
    extents: dict[Action, Interval] = {}
    for kernel in kernels:
        start, end = extents.get(kernel.action, (kernel.start_s, kernel.end_s))
        extents[kernel.action] = min(start, kernel.start_s), max(end, kernel.end_s)
    return sum(end - start for start, end in extents.values())


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


def measure_lone_rank(spec: RunSpec, events: EventWriter, trace_file: Path) -> None:
    """Run the rank that the environment names, without gate and peers, and write its events.

    The profiler's trace of one step is written to ``trace_file`` (.json.gz).
    """
    device = torch.device("cpu" if spec.cluster.device.is_cpu else "cuda:0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    contender, batches = CONTENDERS[spec.contender.name], open_batches(spec)
    plan = spec.plan()
    index = 0

    def step() -> float:
        nonlocal index
        batch = local_batch(batches, plan.layout, index, device)
        index += 1
        synchronise(device)
        start = time.perf_counter()
        trainer.step(*batch)
        synchronise(device)
        return time.perf_counter() - start

    rank, fill_integers = int(os.environ["RANK"]), partial(contender.fill_integers, plan)
    with fake_world(rank, spec.num_gpus, fill_integers):
        events.write("environment", **capture_environment(), code=asdict(LOADED))
        meter = MemoryMeter(device)
        trainer = contender.build(plan, spec.optimizer, device, spec.seed)
        for _ in range(spec.measure.warmup_steps):
            events.write("lone_warmup", index=index, seconds=step())
        for _ in range(spec.measure.steps):
            events.write("lone_step", index=index, seconds=step())
        events.write("memory", **meter.peaks())
        events.write("counters", **trainer.counters())
        trainer.record_spans(True)
        step()
        events.write("compute", seconds=compute_seconds(trainer.spans()))
        trainer.record_spans(False)
        events.write("kernels", **_profile(step, device, trace_file))
    events.write("done")


def compute_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """The median duration over the microbatches of each stage's compute actions, by stage and kind
    (``3F``). The median ignores what only the first microbatch waits for, such as a gather."""
    samples: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.lane == "compute":
            action = parse_action(span.action)
            samples[f"{action.stage}{action.op}"].append(span.end_s - span.start_s)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def _profile(step: Callable[[], float], device: torch.device, trace_file: Path) -> dict[str, Any]:
    """Profile one more step, after a warm-up of the profiler; returns the sums over its kernels,
    which are empty on a device without kernels."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    steps = schedule(wait=0, warmup=1, active=1)
    with profile(
        activities=activities,
        schedule=steps,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace_file)),
    ) as profiler:
        for _ in range(2):
            step()
            profiler.step()
    sums = summarise_kernels(kernels_of(read_trace(trace_file)))
    if sums is None:
        return {}
    return asdict(sums) | {"compute_over_kernels": sums.compute_over_kernels}


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
