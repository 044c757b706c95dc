"""Measures the overhead of the engine on one device and writes medians of ratios as JSON.

``split_backward``: the time of B + W divided by that of a full backward of the same block, with the
weight-gradient store and with a split of the autograd graph. ``engine``: a step of ZeroPP on one
rank divided by a plain loop on the same layers. Both sides run in turn, on the GPU if there is one.

    python -m benchmarks.studies.engine_overhead --out results/reference/engine_overhead.json
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from baselines.torch_pp.private_names import stage_backward_input, stage_backward_weight
from benchmarks.specification.command import CommandParser, command
from zeropp.engine.deferred import WeightGradStore, defer_weight_grads
from zeropp.engine.optimizer import build_optimizer
from zeropp.model import build_piece, cross_entropy
from zeropp.shape import ModelShape
from zeropp.training import OptimizerConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REPEATS = 15  # of every pair
SGD = OptimizerConfig(kind="sgd", lr=1e-3)
Backward = Callable[[Tensor, Tensor], None]


def seconds(run: Callable[[], object]) -> float:
    """The duration of one call in seconds; the device is waited for before and after."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def summary(ratios: list[float]) -> dict[str, Any]:
    """The median and the quartiles of ratios."""
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": median, "q1": low, "q3": high, "samples": len(ratios)}


def timed_backward(block: nn.Module, x: Tensor, backward: Backward) -> float:
    """The seconds of ``backward(input, output)`` after a forward of the block."""
    source = x.clone().requires_grad_()
    output = block(source)
    return seconds(lambda: backward(source, output))


def gpt(*, layers: int, hidden: int, vocab: int, seq: int) -> ModelShape:
    """The sizes of a GPT with heads of 64."""
    heads = hidden // 64
    return ModelShape(
        name="gpt",
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        vocab=vocab,
        seq=seq,
    )


def split_backward(hidden: int, seq: int) -> dict[str, Any]:
    """The ratios of a split backward to a full one, for one transformer block."""
    shape = gpt(layers=1, hidden=hidden, vocab=64, seq=seq)
    plain, split = (build_piece(shape, 1, 0, DEVICE) for _ in range(2))
    store = WeightGradStore()
    defer_weight_grads([split], store)
    x = torch.randn(1, seq, hidden, device=DEVICE)
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

    ways: list[tuple[nn.Module, Backward]] = [(plain, full), (plain, by_graph), (split, by_store)]
    rows = [[timed_backward(block, x, way) for block, way in ways] for _ in range(REPEATS + 1)]
    timed = rows[1:]  # the first is warm-up
    return {
        "hidden": hidden,
        "seq": seq,
        "full_s": statistics.median(row[0] for row in timed),
        "graph_over_full": summary([row[1] / row[0] for row in timed]),
        "store_over_full": summary([row[2] / row[0] for row in timed]),
    }


def engine(*, hidden: int, seq: int, layers: int, microbatches: int) -> dict[str, Any]:
    """The ratio of a step of the engine to one of a plain loop."""
    shape = gpt(layers=layers, hidden=hidden, vocab=512, seq=seq)
    plain = nn.Sequential(*(build_piece(shape, i, 0, DEVICE) for i in range(layers + 2)))
    optimizer = build_optimizer(plain.parameters(), SGD)
    tokens = torch.randint(512, (microbatches, seq + 1), device=DEVICE)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    parallel = zeropp.parallelize(
        [build_piece(shape, i, 0, DEVICE) for i in range(layers + 2)],
        cross_entropy,
        sample=inputs[:1],
        global_batch=microbatches,
        optimizer=SGD,
        unit=microbatches,
        device=DEVICE,
    )
    steps: tuple[Callable[[], object], ...] = (
        lambda: plain_step(plain, optimizer, inputs, targets),
        lambda: parallel.train_step(inputs, targets),
    )
    rows = [[seconds(step) for step in steps] for _ in range(REPEATS + 1)]
    timed = rows[1:]  # the first is warm-up
    sizes = {"hidden": hidden, "seq": seq, "layers": layers, "microbatches": microbatches}
    return sizes | {
        "plain_s": statistics.median(row[0] for row in timed),
        "engine_over_plain": summary([row[1] / row[0] for row in timed]),
    }


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    """A step without the engine: microbatches of one sequence, the gradient norm, the optimizer."""
    optimizer.zero_grad()
    total = torch.zeros((), device=DEVICE)
    for x, y in zip(inputs[:, None], targets[:, None], strict=True):
        loss = cross_entropy(model(x), y) / len(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), torch.inf).item()
    optimizer.step()


@command
def main() -> int:
    """Measure and write; see ``--help``."""
    parser = CommandParser(
        description="Measure the engine's overhead over a plain loop on one device (a GPU if there "
        "is one); medians of ratios are printed and written as JSON.",
        epilog="example: python -m benchmarks.studies.engine_overhead --out /tmp/overhead.json",
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
        "split_backward": [split_backward(1024, 256)],
        "engine": engine(hidden=512, seq=128, layers=4, microbatches=4),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
