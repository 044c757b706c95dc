"""Writes results/reference/closed_circle.csv: replayed steps against measured ones on this machine.

Two ranks, one core each, over gloo. Each contender's step is timed for real. Its code is also
traced with fake tensors. The kernels of its log are then run with real tensors in the log's order,
with nothing between them, and each is timed; so is every message and collective, alone. The logs
are replayed with those times. So nothing is priced: what is tested is whether the sum of the parts,
in the order of the logs, is the step.

Python between kernels is measured, too: the CPU time that a rank's thread takes for a step of the
same layers so narrow that kernels take next to none, over the number of its kernels. It leaves out
what the thread waits for.

The C library hands memory back to the system and takes it anew, page by page, in every step. The
caching allocator of a GPU does not, and kernels that are timed alone do not meet it. So the pages
that a rank's real step takes are counted, and each takes as long as one was measured to take.

    python -m benchmarks.studies.closed_circle [results/reference/closed_circle.csv]
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.records.environment import git_state
from benchmarks.records.simulated import commit_of
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.reading import preset, validated
from benchmarks.studies.renew import REFERENCE
from zeropp.choose.task import Candidate, Task
from zeropp.cluster import Cluster
from zeropp.emulate.clock import replay
from zeropp.emulate.kernels import Strided
from zeropp.emulate.log import COMPUTE, Issued, Kernel, Logs, RankPart
from zeropp.emulate.trace import trace_ranks
from zeropp.plan import Plan
from zeropp.shape import ModelShape
from zeropp.training import OptimizerConfig

OUT = REFERENCE / "closed_circle.csv"
CASES: tuple[Mapping[str, Any], ...] = (
    {"name": "zeropp", "pp": 2, "chunks": 2, "unit": 2},
    {"name": "zeropp", "pp": 1, "shard": 2},
    {"name": "torch_pp", "pp": 2, "schedule": "1f1b"},
    {"name": "torch_pp", "pp": 2, "schedule": "interleaved_1f1b", "chunks": 2},
    {"name": "fsdp", "shard": 2},
    {"name": "deepspeed_3d", "pp": 2},
    {"name": "deepspeed_3d", "pp": 1, "replicate": 2, "replicate_zero": 1},
)
SHAPE = ModelShape(
    name="closed_circle", family="gpt", layers=4, hidden=256, heads=4, kv_heads=4,
    ffn=1024, vocab=2048, seq=128,
)  # fmt: skip
NARROW = replace(SHAPE, name="narrow", hidden=4, ffn=4, vocab=8, seq=2)
BATCH, WARMUP, STEPS = 8, 2, 9
WARMUP_OF_KERNELS, RUNS_OF_KERNELS = 1, 5
ROUNDS = 3  # in each of which new processes measure everything
ADAMW = OptimizerConfig(kind="adamw", clip_norm=0.0)
Transfer = tuple[str, int]  # the name of a collective, or "message", and its bytes


@dataclass(frozen=True)
class Times:
    """What one rank has measured: seconds of steps by plan, of its thread's CPU in them, and the
    pages that they take; seconds of a page, of kernels, and of transfers."""

    steps: list[list[float]]
    cpu: list[list[float]]
    pages: list[list[int]]
    page_s: float
    kernels: dict[Kernel, float]
    transfers: list[float]


def plan_of(case: Mapping[str, Any], shape: ModelShape) -> Plan:
    """The plan of a contender on two ranks, with microbatches of one sequence."""
    contender = CONTENDERS[case["name"]]
    cluster = preset("cluster", "cpu_gloo", Cluster)
    task = Task(shape=shape, cluster=cluster, num_gpus=2, global_batch=BATCH, precision="fp32")
    knobs = validated(contender.knobs, dict(case), "case")
    return contender.plan(task, Candidate(knobs, 1))


def transfer_of(issued: Issued, part: RankPart) -> Transfer:
    """What is measured of a message or a collective."""
    return "message" if part.ends else issued.what, part.moved


def last_step(log: Sequence[Issued]) -> list[Issued]:
    """What a rank issues in the step that a replay is of."""
    places = [index for index, issued in enumerate(log) if issued.kind == "place"]
    return list(log[places[-2] : places[-1]])


def transfers_of(logs: Sequence[Logs]) -> list[Transfer]:
    """The distinct transfers of the last steps of logs."""
    steps = [last_step(log) for by_rank in logs for log in by_rank.values()]
    communications = [issued for step in steps for issued in step if issued.kind == "communication"]
    return list(dict.fromkeys(transfer_of(i, part) for i in communications for part in i.parts))


def kernels_of(log: Sequence[Issued]) -> list[Kernel]:
    """The kernels of the last step of a log, in its order."""
    return [issued.kernel for issued in last_step(log) if issued.kernel is not None]


def measure(
    rank: int,
    plans: Sequence[Plan],
    kernels: Sequence[Kernel],
    transfers: Sequence[Transfer],
    store: str,
) -> Times:
    """Measure everything on one of two ranks, both of which do the same at the same time."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    page_s = _page_s()  # first, while the C library holds no memory that it could give again
    steps = [_steps(plan) for plan in plans]
    transfer_s = [_transfer_s(*transfer) for transfer in transfers]
    dist.barrier()
    kernel_s = seconds_of(kernels)
    dist.destroy_process_group()
    wall, cpu, pages = (list(part) for part in zip(*steps, strict=True))
    return Times(wall, cpu, pages, page_s, kernel_s, transfer_s)


def _steps(plan: Plan) -> tuple[list[float], list[float], list[int]]:
    trainer = CONTENDERS[plan.contender].build(plan, ADAMW, torch.device("cpu"), 0)
    rows = plan.num_microbatches * plan.microbatch_size
    generator = torch.Generator().manual_seed(0)  # ranks of one pipeline get the same rows
    batch = torch.randint(plan.shape.vocab, (rows, plan.shape.seq), generator=generator)
    samples = [_together(lambda: trainer.step(batch, batch)) for _ in range(WARMUP + STEPS)]
    wall, cpu, pages = zip(*samples[WARMUP:], strict=True)
    return list(wall), list(cpu), list(pages)


def _together(run: Callable[[], object]) -> tuple[float, float, int]:
    """Seconds from when both ranks begin to when both have ended, and of this thread's CPU; and the
    pages that the process took."""
    dist.barrier()
    begin, cpu, pages = time.perf_counter(), time.thread_time(), _pages()
    run()
    cpu, pages = time.thread_time() - cpu, _pages() - pages
    dist.barrier()
    return time.perf_counter() - begin, cpu, pages


def _pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _page_s() -> float:
    """Seconds that a page takes which the system gives anew: what it takes longer to write memory
    for the first time than for the second."""
    samples = []
    for _ in range(STEPS):
        memory = torch.empty(2**24)  # so large that the C library asks the system for it
        before = _pages()
        first, second = (_timed(memory.zero_) for _ in range(2))
        samples.append((first - second) / (_pages() - before))
        del memory
    return median(samples)


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def seconds_of(kernels: Sequence[Kernel]) -> dict[Kernel, float]:
    """Seconds of each kernel, with real tensors of the shapes and strides that it had: the mean of
    its calls where all run in this order, of some such runs the median. So a call finds in the
    caches what the kernels before it have left there."""
    calls = {kernel: _call_of(kernel) for kernel in kernels}
    means: dict[Kernel, list[float]] = {kernel: [] for kernel in calls}
    with torch.no_grad():
        for _ in range(WARMUP_OF_KERNELS + RUNS_OF_KERNELS):
            samples: dict[Kernel, list[float]] = {kernel: [] for kernel in calls}
            for kernel in kernels:
                samples[kernel].append(_timed(calls[kernel]))
            for kernel, seconds in samples.items():
                means[kernel].append(fmean(seconds))
    return {kernel: median(found[WARMUP_OF_KERNELS:]) for kernel, found in means.items()}


def _call_of(kernel: Kernel) -> Callable[[], object]:
    space, _, operator = kernel.name.partition("::")
    function = getattr(getattr(torch.ops, space), operator)
    return partial(function, **{key: _with_values(value) for key, value in kernel.call})


def _with_values(value: Any) -> Any:
    """Random numbers; indices are zeros, which are in every table."""
    if isinstance(value, Strided):
        values = torch.zeros(value.elements, dtype=value.dtype)
        if value.dtype.is_floating_point:
            values.normal_()
        return values.as_strided(value.shape, value.stride)
    return [_with_values(part) for part in value] if isinstance(value, tuple) else value


def _transfer_s(what: str, size: int) -> float:
    whole = torch.zeros(max(2, size // 4 // 2 * 2))
    part = whole[: len(whole) // 2].clone()
    runs: dict[str, Callable[[], object]] = {
        "message": lambda: _there_and_back(whole),
        "c10d::allreduce_": lambda: dist.all_reduce(whole),
        "c10d::broadcast_": lambda: dist.broadcast(whole, 0),
        "c10d::_allgather_base_": lambda: dist.all_gather_into_tensor(whole, part),
        "c10d::_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    ways = 2 if what == "message" else 1
    samples = []
    for _ in range(WARMUP + STEPS):
        dist.barrier()
        samples.append(_timed(runs[what]) / ways)
    return median(samples[WARMUP:])


def _there_and_back(tensor: Tensor) -> None:
    peer = 1 - dist.get_rank()
    first, second = (dist.send, dist.recv) if peer else (dist.recv, dist.send)
    first(tensor, peer)
    second(tensor, peer)


def rounds_of(plans: Sequence[Plan], narrow: Sequence[Plan]) -> Iterator[list[dict[str, Any]]]:
    """Trace all plans; then, several times, measure and replay them. Yields the rows of a round."""
    logs = [_logs(plan) for plan in [*plans, *narrow]]
    kernels = [[k for log in logs for k in kernels_of(log[rank])] for rank in (0, 1)]
    transfers = transfers_of(logs)
    for number in range(1, ROUNDS + 1):
        with tempfile.TemporaryDirectory() as folder:
            given = [
                (rank, [*plans, *narrow], kernels[rank], transfers, f"{folder}/s")
                for rank in (0, 1)
            ]
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                times = pool.starmap(measure, given, chunksize=1)
        yield [
            {"contender": plan.contender, "plan": _words(case), "round": number}
            | _replay_of(index, logs, transfers, times)
            for index, (case, plan) in enumerate(zip(CASES, plans, strict=True))
        ]


def _words(case: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items() if key != "name")


def _replay_of(
    index: int, logs: Sequence[Logs], transfers: Sequence[Transfer], times: Sequence[Times]
) -> dict[str, Any]:
    """One plan's replay from what the two ranks have measured, beside its measured step. The logs
    of narrow models come after those of all plans."""
    narrow = len(CASES) + index
    seconds = {
        kernel: fmean(t.kernels[kernel] for t in times if kernel in t.kernels)
        for kernel in chain(*(t.kernels for t in times))
    }
    sent = {key: fmean(t.transfers[i] for t in times) for i, key in enumerate(transfers)}
    step_s = median(max(pair) for pair in zip(*(t.steps[index] for t in times), strict=True))
    between_s = _between(logs[narrow], seconds, [median(t.cpu[narrow]) for t in times])
    pages_s = max(median(t.pages[index]) * t.page_s for t in times)
    replayed_s = _replayed(logs[index], seconds, sent, between_s) + pages_s
    return {
        "provenance": "replayed",
        "measured_step_s": step_s,
        "replayed_step_s": replayed_s,
        "ratio": replayed_s / step_s,
        "kernels_s": max(_sum(log, seconds) for log in logs[index].values()),
        "between_us": between_s * 1e6,
        "pages_s": pages_s,
        "commit": commit_of(*git_state()),
    }


def _logs(plan: Plan) -> Logs:
    program = CONTENDERS[plan.contender]
    traces = trace_ranks(plan, (0, 1), optimizer=ADAMW, program=program, steps=2, here=True)
    return _on_one_core({trace.rank: trace.log for trace in traces})


def _on_one_core(logs: Logs) -> Logs:
    """The logs where a rank has one core: what a GPU would run beside compute, kernels of other
    streams and collectives, takes its turn. A message alone stays beside compute."""
    streams = {
        issued.stream
        for log in logs.values()
        for issued in log
        for part in issued.parts
        if issued.kind == "communication" and part.ends
    }
    return {
        rank: [
            issued if issued.stream in {None, *streams} else issued._replace(stream=COMPUTE)
            for issued in log
        ]
        for rank, log in logs.items()
    }


def _sum(log: Sequence[Issued], seconds: Mapping[Kernel, float]) -> float:
    return sum(seconds[kernel] for kernel in kernels_of(log))


def _between(logs: Logs, seconds: Mapping[Kernel, float], cpu_s: Sequence[float]) -> float:
    """Seconds of Python per kernel, by the CPU time of every rank's step of a narrow model."""
    of_kernels = sum(_sum(log, seconds) for log in logs.values())
    count = sum(len(kernels_of(log)) for log in logs.values())
    return max(0.0, sum(cpu_s) - of_kernels) / count


def _replayed(
    logs: Logs,
    seconds: Mapping[Kernel, float],
    sent: Mapping[Transfer, float],
    between_s: float,
) -> float:
    """The step that the logs give, where the host runs every kernel itself."""
    return replay(
        logs,
        preset("cluster", "cpu_gloo", Cluster),
        2,
        kernel_prices=lambda kernel: seconds.get(kernel, 0.0) + between_s,
        network_prices=lambda issued, part: sent.get(transfer_of(issued, part), 0.0),
        launch_s=0.0,
    ).step_s


@command
def main() -> int:
    """Command line; see ``--help``."""
    parser = CommandParser(
        description="Replay each contender's step on two ranks of this machine from the measured "
        "times of its kernels and messages, hold it against the real step, and write a CSV.",
        epilog="example: python -m benchmarks.studies.closed_circle /tmp/closed_circle.csv",
    )
    parser.add_argument(
        "out", nargs="?", type=Path, default=OUT, help="the CSV (the committed one)"
    )
    options = parser.parse_args()
    plans, narrow = ([plan_of(case, shape) for case in CASES] for shape in (SHAPE, NARROW))
    rows: list[dict[str, Any]] = []
    for rows_of_round in rounds_of(plans, narrow):
        rows += rows_of_round
        pd.DataFrame(rows).to_csv(options.out, index=False)
        print(pd.DataFrame(rows_of_round).to_string(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
