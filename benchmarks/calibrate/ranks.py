"""What a rank of a calibration does, and what rank 0 writes."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import CHECKOUT
from benchmarks.calibrate.constants import (
    MeasuredConstant,
    calibrated,
    constants_of,
    preset_text,
    wrong,
)
from benchmarks.calibrate.measure import Times, collectives, kernels, overlap, product_shapes
from benchmarks.records.record import write_atomically
from benchmarks.specification.progress import progress_line
from benchmarks.specification.reading import preset
from zeropp.price.cluster import Cluster
from zeropp.types.shape import ModelShape


@dataclass(frozen=True)
class Asked:
    """The name of the preset to write, and that of the machine's kind."""

    name: str
    like: str


def be_rank(local: int, asked: Asked, rendezvous: str, ranks: int) -> None:
    """Measure on one rank; rank 0 writes the preset. ``ranks``: 0 if torchrun says it."""
    of_node = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // of_node))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        rendezvous,
        rank=local if ranks else -1,
        world_size=ranks or -1,
    )
    shape = preset("model", "llama_8b" if on_gpu else "llama_mini", ModelShape)
    times = Times(host=platform.node())
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with progress_line() as bar:
        line = bar.add_task("kernels", total=None, visible=dist.get_rank() == 0)
        tell: Callable[[str], None] = lambda words: bar.update(line, description=words)  # noqa: E731
        kernels(times, shape, device, dtype)
        groups = _groups(of_node)
        collectives(times, groups, device, tell)
        if groups:
            tell("products beside collectives")
            overlap(times, shape, next(iter(groups.values())), device, dtype)
    every: list[Times] = [times] * dist.get_world_size()
    dist.all_gather_object(every, times)
    if dist.get_rank() == 0:
        _write(every, asked, shape, half=on_gpu)
    dist.destroy_process_group()


def _groups(per_node: int) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank: its node, and the ranks of the same place on all nodes."""
    world = dist.get_world_size()
    members = {}
    if per_node > 1:
        first = range(0, world, per_node)
        members["within a node"] = [list(range(rank, rank + per_node)) for rank in first]
    if world > per_node:
        members["across nodes"] = [list(range(i, world, per_node)) for i in range(per_node)]
    found = {}
    for name, ranks in members.items():
        found[name], _ = dist.new_subgroups_by_enumeration(ranks)  # type: ignore[no-untyped-call]
    return found


def _write(ranks: list[Times], asked: Asked, shape: ModelShape, *, half: bool) -> None:
    like = preset("cluster", asked.like, Cluster)
    constants = constants_of(ranks, like, half=half)
    device = torch.cuda.get_device_name(0) if half else f"{os.cpu_count()} cores"
    machine = f"{len(ranks)} ranks, {device}"
    cluster = calibrated(like, asked.name, constants)
    file = CHECKOUT / "conf" / "cluster" / f"{asked.name}.yaml"
    page = CHECKOUT / "results" / "reports" / f"calibrate_{asked.name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    wrote = "Replaced" if file.exists() else "Wrote"
    write_atomically(file, preset_text(cluster, constants, machine))
    write_atomically(page, _page(ranks, constants, like, machine, shape))
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(title=f"Measured: {machine}", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("constant", "measured", "spread", f"preset {like.name}"):
        table.add_column(heading, justify="left" if heading == "constant" else "right")
    for row in _rows(constants):
        table.add_row(*row)
    console.print(table)
    for line in wrong(ranks, constants, like):
        console.print(f"Looks wrong: {line}", style="yellow")
    console.print(
        f"{wrote} {file.relative_to(CHECKOUT)}, which every command takes as cluster={asked.name}, "
        f"and {page.relative_to(CHECKOUT)} with all times."
    )


def _rows(constants: list[MeasuredConstant]) -> list[tuple[str, str, str, str]]:
    return [(c.place, f"{c.value:.4g}", f"{c.spread:.0%}", f"{c.preset:.4g}") for c in constants]


def _page(
    ranks: list[Times],
    constants: list[MeasuredConstant],
    like: Cluster,
    machine: str,
    shape: ModelShape,
) -> str:
    """The constants beside the preset's, what looks wrong, and every time that was measured."""
    from benchmarks.report.table import markdown_table  # pandas, which the other ranks do not need

    first, heads = ranks[0], ["constant", "measured", "spread", like.name]
    kinds = ["kind", "group", "MiB", "us", "GB/s"]
    products = []
    for m, k, n in product_shapes(shape):
        seconds = first.products[m, k, n].seconds
        rate = 2e-12 * m * k * n / seconds
        products.append((f"{m} x {k} x {n}", f"{seconds * 1e6:.1f}", f"{rate:.4g}"))
    sent = [
        (*key[:2], f"{key[2] / 2**20:.4g}", f"{of.seconds * 1e6:.0f}",
         f"{key[2] / of.seconds / 1e9:.4g}")
        for key, of in first.collectives.items()
    ]  # fmt: skip
    doubts = "\n".join(f"- {line}" for line in wrong(ranks, constants, like)) or "Nothing."
    parts = (
        f"# Measured: {machine}",
        markdown_table(heads, _rows(constants), [False, True, True, True]),
        "## What looks wrong",
        doubts,
        f"## Products of {shape.name} (rank 0)",
        markdown_table(["m x k x n", "us", "TFLOP/s"], products, [False, True, True]),
        "## Collectives (rank 0)",
        markdown_table(kinds, sent, [False, False, True, True, True]),
    )
    return "\n\n".join(parts) + "\n"
