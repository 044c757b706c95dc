"""What the engine costs on one device, side by side: medians of ratios, written as JSON.

``split_backward``: B + W over a full backward of the same block, by the weight-gradient store
and by splitting the autograd graph. ``engine``: a step of ZeroPP with P = D = 1 over a plain loop
on the same layers. Uses a GPU where there is one.

    python scripts/engine_overhead.py --out results/reference/engine_overhead.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import zeropp
from zeropp.engine.deferred import WeightGradStore, defer_weight_grads
from zeropp.model import build_piece, cross_entropy
from zeropp.optimizer import build_optimizer
from zeropp.shape import ModelShape
from zeropp.training import OptimizerConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SGD = OptimizerConfig("sgd", lr=1e-3)


def seconds(run: Callable[[], object]) -> float:
    """Duration of one call, the device caught up before and after."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def summary(ratios: list[float]) -> dict[str, Any]:
    """Median and quartiles of ratios."""
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": median, "q1": low, "q3": high, "samples": len(ratios)}


def split_backward(hidden: int, seq: int, repeats: int) -> dict[str, Any]:
    """Ratios of a split backward to a full one, for one transformer block."""
    shape = ModelShape("block", "gpt", 1, hidden, hidden // 64, hidden // 64, 4 * hidden, 64, seq)
    plain, split = (build_piece(shape, 1, 0, DEVICE) for _ in range(2))
    store = WeightGradStore()
    defer_weight_grads([split], store)
    x = torch.randn(1, seq, hidden, device=DEVICE)
    gradient = torch.randn_like(x)

    def full() -> float:
        source = x.clone().requires_grad_()
        output = plain(source)
        return seconds(lambda: output.backward(gradient))

    def by_graph() -> float:
        source = x.clone().requires_grad_()
        output = plain(source)

        def both() -> None:
            _, groups = stage_backward_input([output], [gradient], [source], plain.parameters())
            stage_backward_weight(plain.parameters(), groups)

        return seconds(both)

    def by_store() -> float:
        source = x.clone().requires_grad_()
        output = split(source)

        def both() -> None:
            store.begin(0)
            output.backward(gradient)
            store.end()
            store.run(0)

        return seconds(both)

    for way in (full, by_graph, by_store):
        way()
    rows = [(full(), by_graph(), by_store()) for _ in range(repeats)]
    return {
        "hidden": hidden,
        "seq": seq,
        "full_s": statistics.median(row[0] for row in rows),
        "graph_over_full": summary([row[1] / row[0] for row in rows]),
        "store_over_full": summary([row[2] / row[0] for row in rows]),
    }


def engine(hidden: int, seq: int, layers: int, microbatches: int, repeats: int) -> dict[str, Any]:
    """Ratio of an engine's step to that of a plain loop."""
    shape = ModelShape(
        "gpt", "gpt", layers, hidden, hidden // 64, hidden // 64, 4 * hidden, 512, seq
    )
    plain = torch.nn.Sequential(*(build_piece(shape, i, 0, DEVICE) for i in range(layers + 2)))
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

    def loop() -> None:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.split(1), targets.split(1), strict=True):
            loss = cross_entropy(plain(x), y) / microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), torch.inf).item()
        optimizer.step()

    rows = []
    for repeat in range(repeats + 1):
        row = seconds(loop), seconds(lambda: parallel.step((inputs, targets)))
        if repeat:
            rows.append(row)
    return {
        "hidden": hidden,
        "seq": seq,
        "layers": layers,
        "microbatches": microbatches,
        "plain_s": statistics.median(row[0] for row in rows),
        "engine_over_plain": summary([row[1] / row[0] for row in rows]),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    store = dist.HashStore()
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    result = {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine(),
        "device": DEVICE.type,
        "threads": arguments.threads,
        "split_backward": [split_backward(1024, 256, arguments.repeats)],
        "engine": engine(512, 128, 4, 4, arguments.repeats),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
