"""One rank of a large job, alone, with real tensors: its memory, its compute and its kernels.

The rank runs the contender's own code over torch's ``fake`` process group, which answers at once:
a gather copies this rank's shard into every place (on the gather's own stream), a reduction hands
back this rank's part, and messages of other pipeline ranks are filled with random numbers, because
products of zeros are faster. So parameters, activations, kernels and launches are those of the
job; the network and the wait for peers are not there, and losses mean nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.contenders import CONTENDERS
from benchmarks.data import open_batches
from benchmarks.data.local import local_batch
from benchmarks.environment import capture_environment
from benchmarks.events import EventWriter
from benchmarks.kernels import kernels_of, read_trace, summarise_kernels
from benchmarks.memory import MemoryMeter
from benchmarks.spec import RunSpec
from zeropp.schedule.action import parse_action
from zeropp.timeline import Span

_YES = 1  # torch's pipeline stages ask their neighbours whether they know the shapes


def measure_lone_rank(spec: RunSpec, events: EventWriter, trace_file: Path) -> None:
    """Run the rank that the environment names and write what it does; no gate, no peers.

    ``trace_file`` (.json.gz) takes the profiler's trace of one step.
    """
    device = _open_fake_world(spec)
    events.write("environment", **capture_environment())
    contender, batches = CONTENDERS[spec.contender.name], open_batches(spec)
    plan = contender.plan(spec.request)
    index = 0

    def step() -> float:
        nonlocal index
        batch = local_batch(batches, plan.layout, index, device)
        index += 1
        _synchronise(device)
        start = time.perf_counter()
        trainer.step(*batch)
        _synchronise(device)
        return time.perf_counter() - start

    with _messages_hold_numbers():
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
    """Median duration of each stage's compute actions over the microbatches, by stage and action
    (``3F``). A median leaves out what only the first microbatch pays, as a wait for a gather."""
    samples: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.lane == "compute":
            action = parse_action(span.action)
            samples[f"{action.stage}{action.op}"].append(span.end_s - span.start_s)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def _profile(step: Any, device: torch.device, trace_file: Path) -> dict[str, Any]:
    """Profile one more step; sums over its kernels, or nothing on a device that has none."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        step()
    profiler.export_chrome_trace(str(trace_file))
    sums = summarise_kernels(kernels_of(read_trace(trace_file)))
    if sums is None:
        return {}
    return asdict(sums) | {"compute_over_kernels": sums.compute_over_kernels}


def _open_fake_world(spec: RunSpec) -> torch.device:
    rank = int(os.environ["RANK"])
    device = torch.device("cpu" if spec.cluster.device.name == "cpu" else "cuda:0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.num_gpus)
    return device


@contextmanager
def _messages_hold_numbers() -> Iterator[None]:
    """Let receives fill their tensors; the fake group leaves in them what memory held before."""
    originals = {name: getattr(distributed_c10d, name) for name in ("recv", "irecv")}

    def filling(original: Any) -> Any:
        def receive(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            with torch.no_grad():
                tensor.normal_() if tensor.is_floating_point() else tensor.fill_(_YES)
            return original(tensor, *arguments, **keywords)

        return receive

    try:
        _replace({name: filling(original) for name, original in originals.items()})
        yield
    finally:
        _replace(originals)


def _replace(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        for module in (dist, distributed_c10d):  # torch's batched messages compare them by identity
            setattr(module, name, function)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
