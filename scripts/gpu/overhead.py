"""Measures what the engine costs on one device beside a plain loop, and writes it as JSON.

A step of ZeroPP over one of a plain loop on the same layers. Both run in turn, so that other work
on the machine slows both alike.

``scripts/gpu/run.sh`` runs it on a GPU. The committed record of CPUs, which also has FSDP2 on
two ranks, was made by the program of 09d4f5b9.

    PYTHONPATH=. python scripts/gpu/overhead.py --out overhead.json
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from baselines.model import build_piece, cross_entropy
from benchmarks.specification.command import CommandParser, command
from zeropp.engine.update.update_rules import build_optimizer
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SGD = OptimizerConfig(kind="sgd", lr=1e-3)
LAYERS, VOCAB, MICROBATCHES = 4, 512, 4
REPEATS, WARMUP = 9, 2  # of every pair; smaller models have more repeats


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

    def batch(self) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a step, with one sequence per microbatch."""
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(VOCAB, (MICROBATCHES, self.seq + 1), generator=generator)
        return rows[:, :-1].to(DEVICE), rows[:, 1:].to(DEVICE)


SIZES: tuple[Size, ...] = (
    Size("tiny", 64, 32, 12),
    Size("small", 256, 64, 4),
    Size("mid", 512, 128, 1),
)
if DEVICE.type == "cuda":  # where the host needs longer than kernels of such sizes
    SIZES = (Size("wide", 4096, 2048, 1),)


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a step; the device is waited for before and after."""
    _wait()
    cpu, begin = time.process_time(), time.perf_counter()
    step()
    _wait()
    return time.perf_counter() - begin, time.process_time() - cpu


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of at least two values."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high}


def engine_step(size: Size) -> Callable[[], object]:
    """A step of the engine, with all microbatches in one unit."""
    inputs, targets = size.batch()
    model = zeropp.parallelize(
        size.layers(), cross_entropy, sample=inputs[:1], global_batch=len(inputs), optimizer=SGD,
        unit=MICROBATCHES, device=DEVICE,
    )  # fmt: skip
    return lambda: model.train_step(inputs, targets)


def plain_step(size: Size) -> Callable[[], object]:
    """A step without the engine: microbatches, the gradient norm, the optimizer."""
    model = nn.Sequential(*size.layers())
    optimizer, (inputs, targets) = build_optimizer(model.parameters(), SGD), size.batch()

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


def one_rank(size: Size) -> dict[str, Any]:
    """The engine over a plain loop: ratios of wall and of CPU seconds. ``best`` is the ratio of the
    shortest steps, which other work on the machine has disturbed least."""
    plain, engine = plain_step(size), engine_step(size)
    pairs = [(timed(plain), timed(engine)) for _ in range(WARMUP + REPEATS * size.more)][WARMUP:]
    row: dict[str, Any] = {"size": size.name, "way": "engine", "base": "plain loop"}
    row["samples"] = len(pairs)
    for place, kind in enumerate(("wall", "cpu")):
        base, own = ([times[place] for times in series] for series in zip(*pairs, strict=True))
        row[f"base_{kind}_s"] = statistics.median(base)
        row[f"{kind}_ratio"] = quartiles([a / b for a, b in zip(own, base, strict=True)])
        row[f"best_{kind}_ratio"] = min(own) / min(base)
    return row


@command
def main() -> int:
    """Measure and write; see ``--help``."""
    parser = CommandParser(
        description="Measure what the engine costs over a plain loop on one device, a GPU if there "
        "is one; ratios are printed and written as JSON.",
        epilog="example: python scripts/gpu/overhead.py --out /tmp/overhead.json",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # on a GPU
    store = dist.HashStore()  # type: ignore[attr-defined]
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    result = {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine(),
        "device": DEVICE.type,
        "threads": 1,
        "sizes": [asdict(size) for size in SIZES],
        "one_rank": [one_rank(size) for size in SIZES],
    }
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
