"""Measures one rank of a large job, alone, with real tensors: its memory, compute and kernels.

The rank runs the contender's own code in a ``fake_world``. So parameters, activations, kernels and
launches are those of the job, but network and waiting for peers are missing, and losses mean
nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.records.environment import capture_environment, read_code
from benchmarks.records.events import EventWriter
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import local_batch, open_batches
from benchmarks.worker.kernels import kernels_of, read_trace, summarise_kernels
from zeropp.emulate.world import fake_world
from zeropp.schedule.program import parse_action
from zeropp.types.timeline import Span

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
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="utf-8")
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
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


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
        action = parse_action(span.action)
        if action.op.is_compute:
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
