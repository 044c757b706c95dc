"""Measures what the engine costs beside a plain loop and beside FSDP2, and writes it as JSON.

``one_rank``: a step of ZeroPP on one rank over a plain loop on the same layers. ``two_ranks``: the
same on two ranks that shard the model, over FSDP2 with the same wrapping: layer by layer, each
gathered when it is needed, or gathered once per step. ``split_backward``: B + W over a full
backward of one block, with the weight-gradient store and with a split of the autograd graph.

All ways of a size run in turn in the same processes, so that other work on the machine slows all
alike. Durations are wall times between barriers; CPU times are those of all threads of all ranks.

    python -m benchmarks.evidence.engine_overhead --out results/reference/engine_overhead.json
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing.spawn import start_processes

import zeropp
from baselines.fsdp2 import finish_step
from baselines.model import build_piece, cross_entropy
from baselines.torch_pp.private_names import stage_backward_input, stage_backward_weight
from benchmarks.specification.command import CommandParser, command
from zeropp.engine.deferred import WeightGradStore, defer_weight_grads
from zeropp.engine.optimizer import build_optimizer
from zeropp.types.layout import Layout
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SGD = OptimizerConfig(kind="sgd", lr=1e-3)
LAYERS, VOCAB, MICROBATCHES = 4, 512, 4
REPEATS, WARMUP = 9, 2  # of every pair; smaller models have more repeats
Steps = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Size:
    """A GPT of four blocks, and how many times as many of its steps are timed as of the largest."""

    name: str
    hidden: int
    seq: int
    more: int

    @property
    def shape(self) -> ModelShape:
        """The model, with heads of 64."""
        heads = self.hidden // 64
        return ModelShape(
            name="gpt", family="gpt", layers=LAYERS, hidden=self.hidden, heads=heads,
            kv_heads=heads, ffn=4 * self.hidden, vocab=VOCAB, seq=self.seq,
        )  # fmt: skip

    def layers(self) -> list[nn.Module]:
        """The model's layers, the same at every call."""
        return [build_piece(self.shape, index, 0, DEVICE) for index in range(LAYERS + 2)]

    def batch(self, ranks: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a step: sequences, one per microbatch of every rank."""
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(VOCAB, (MICROBATCHES * ranks, self.seq + 1), generator=generator)
        return rows[:, :-1].to(DEVICE), rows[:, 1:].to(DEVICE)


SIZES = (Size("tiny", 64, 32, 12), Size("small", 256, 64, 4), Size("mid", 512, 128, 1))


@dataclass(frozen=True)
class Sample:
    """A step on one rank, from a barrier of all ranks to the next: wall time, and the CPU time and
    the new pages of memory (of 4 KiB, usually) that this process took."""

    wall_s: float
    cpu_s: float
    pages: int


def timed(step: Callable[[], object]) -> Sample:
    """The duration of a step; the device is waited for before and after."""
    _together()
    pages, cpu, begin = _pages(), time.process_time(), time.perf_counter()
    step()
    _together()
    return Sample(time.perf_counter() - begin, time.process_time() - cpu, _pages() - pages)


def _pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _together() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    if dist.get_world_size() > 1:
        dist.barrier()


def in_turn(steps: Steps, size: Size) -> dict[str, list[Sample]]:
    """Samples of every way to take a step, taken in turn."""
    samples: dict[str, list[Sample]] = {way: [] for way in steps}
    for _ in range(WARMUP + REPEATS * size.more):
        for way, step in steps.items():
            samples[way].append(timed(step))
    return {way: series[WARMUP:] for way, series in samples.items()}


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of at least two values."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high}


def compared(
    by_rank: Sequence[Mapping[str, Sequence[Sample]]], size: Size, pairs: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One row per pair of a way to train and what it is held against, from the samples of every
    rank. Walls are those of the first rank, because barriers begin and end a sample; CPU times and
    pages are added over the ranks. ``best``: the ratio of the shortest of each, which other work on
    the machine has disturbed least."""
    rows = []
    for way, base in pairs.items():
        way_steps, base_steps = (
            [
                (ranks[0].wall_s, sum(r.cpu_s for r in ranks), sum(r.pages for r in ranks))
                for ranks in zip(*(samples[name] for samples in by_rank), strict=True)
            ]
            for name in (way, base)
        )
        row: dict[str, Any] = {"size": size.name, "way": way, "base": base}
        row["samples"] = len(way_steps)
        row["pages"], row["base_pages"] = (
            statistics.median(step[2] for step in steps) for steps in (way_steps, base_steps)
        )
        for kind, place in (("wall", 0), ("cpu", 1)):
            row[f"base_{kind}_s"] = statistics.median(step[place] for step in base_steps)
            values, base_values = ([s[place] for s in steps] for steps in (way_steps, base_steps))
            ratios = [own / other for own, other in zip(values, base_values, strict=True)]
            row[f"{kind}_ratio"] = quartiles(ratios)
            row[f"best_{kind}_ratio"] = min(values) / min(base_values)
        rows.append(row)
    return rows


def parallel_step(size: Size, **degrees: int) -> Callable[[], object]:
    """A step of the engine, with all microbatches in one unit."""
    inputs, targets = size.batch(dist.get_world_size())
    model = zeropp.parallelize(
        size.layers(), cross_entropy, sample=inputs[:1], global_batch=len(inputs), optimizer=SGD,
        unit=MICROBATCHES, device=DEVICE, **degrees,  # type: ignore[arg-type]
    )  # fmt: skip
    inputs, targets = inputs[model.rows], targets[model.rows]
    return lambda: model.train_step(inputs, targets)


def plain_step(size: Size) -> Callable[[], object]:
    """A step without the engine: microbatches, the gradient norm, the optimizer."""
    model = nn.Sequential(*size.layers())
    optimizer, (inputs, targets) = build_optimizer(model.parameters(), SGD), size.batch(1)

    def step() -> None:
        optimizer.zero_grad()
        total = torch.zeros((), device=DEVICE)
        for x, y in zip(inputs[:, None], targets[:, None], strict=True):
            loss = cross_entropy(model(x), y) / MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()

    return step


def fsdp_step(size: Size, *, gathers_once: bool) -> Callable[[], object]:
    """A step of FSDP2, every layer wrapped, which reduces gradients once per step. By default a
    layer is gathered when it is needed; ``gathers_once``: it then stays until its last use."""
    ranks = dist.get_world_size()
    layers, layout = size.layers(), Layout(shard=ranks)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=not gathers_once)
    model = nn.Sequential(*layers)
    sharded = fully_shard(model)
    assert isinstance(sharded, FSDPModule)
    optimizer = build_optimizer(model.parameters(), SGD)
    first = dist.get_rank() * MICROBATCHES
    inputs, targets = (part[first : first + MICROBATCHES, None] for part in size.batch(ranks))

    def step() -> None:
        optimizer.zero_grad()
        total = torch.zeros((), device=DEVICE)
        for index, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            is_last = index == MICROBATCHES - 1
            sharded.set_requires_gradient_sync(is_last)
            sharded.set_reshard_after_backward(is_last or not gathers_once)
            loss = cross_entropy(model(x), y) / MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        finish_step(model.parameters(), total / ranks, layout=layout, device=DEVICE, clip_norm=0.0)
        optimizer.step()

    return step


def one_rank(size: Size) -> list[dict[str, Any]]:
    """The engine over a plain loop, in this process."""
    steps = {"plain loop": plain_step(size), "engine": parallel_step(size)}
    return compared([in_turn(steps, size)], size, {"engine": "plain loop"})


_OVER_FSDP2 = {"engine, by layer": "FSDP2, by layer", "engine, once": "FSDP2, once"}


def _rank(rank: int, place: Path) -> None:
    """One of two ranks: all sizes, each with all ways in turn; rank 0 writes what both found."""
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{place}/store", rank=rank, world_size=2)
    rows = []
    for size in SIZES:
        steps = {
            "FSDP2, by layer": fsdp_step(size, gathers_once=False),
            "engine, by layer": parallel_step(size, shard=2, chunks=LAYERS + 2),
            "FSDP2, once": fsdp_step(size, gathers_once=True),
            "engine, once": parallel_step(size, shard=2),
        }
        by_rank: list[Any] = [None, None]
        dist.all_gather_object(by_rank, in_turn(steps, size))
        rows += compared(by_rank, size, _OVER_FSDP2)
    if rank == 0:
        (place / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo may abort a rank whose peers end while it destroys its groups


def two_ranks() -> list[dict[str, Any]]:
    """The engine over FSDP2, in two processes; nothing where there is only one GPU."""
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        return []
    with tempfile.TemporaryDirectory() as name:
        place, start = Path(name), cast("Any", start_processes)
        start(_rank, (place,), nprocs=2, start_method="spawn")
        rows: list[dict[str, Any]] = json.loads((place / "rows.json").read_text(encoding="utf-8"))
    return rows


Backward = Callable[[Tensor, Tensor], None]


def split_backward() -> dict[str, Any]:
    """The ratios of a split backward to a full one, for one transformer block."""
    size = Size("block", 1024, 256, 1)
    plain, split = (build_piece(size.shape, 1, 0, DEVICE) for _ in range(2))
    store = WeightGradStore()
    defer_weight_grads([split], store)
    x = torch.randn(1, size.seq, size.hidden, device=DEVICE)
    gradient = torch.randn_like(x)

    def full(_: Tensor, output: Tensor) -> None:
        output.backward(gradient)  # type: ignore[no-untyped-call]

    def by_graph(source: Tensor, output: Tensor) -> None:
        _, groups = stage_backward_input([output], [gradient], [source], plain.parameters())
        stage_backward_weight(plain.parameters(), groups)

    def by_store(_: Tensor, output: Tensor) -> None:
        store.begin(0)
        output.backward(gradient)  # type: ignore[no-untyped-call]
        store.end()
        store.run(0)

    def backward_s(block: nn.Module, way: Backward) -> float:
        source = x.clone().requires_grad_()
        output = block(source)
        return timed(lambda: way(source, output)).wall_s

    ways: list[tuple[nn.Module, Backward]] = [(plain, full), (plain, by_graph), (split, by_store)]
    rows = [[backward_s(block, way) for block, way in ways] for _ in range(WARMUP + REPEATS)]
    rows = rows[WARMUP:]
    return {
        "hidden": size.hidden,
        "seq": size.seq,
        "full_s": statistics.median(row[0] for row in rows),
        "graph_over_full": quartiles([row[1] / row[0] for row in rows]),
        "store_over_full": quartiles([row[2] / row[0] for row in rows]),
    }


@command
def main() -> int:
    """Measure and write; see ``--help``."""
    parser = CommandParser(
        description="Measure what the engine costs over a plain loop on one device and over FSDP2 "
        "on two (GPUs if there are any); ratios are printed and written as JSON.",
        epilog="example: python -m benchmarks.evidence.engine_overhead --out /tmp/overhead.json",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    result = {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine(),
        "device": DEVICE.type,
        "threads": 1,
        "sizes": [asdict(size) for size in SIZES],
        "one_rank": [row for size in SIZES for row in one_rank(size)],
        "two_ranks": two_ranks(),
        "split_backward": [split_backward()],
    }
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
