"""Times kernels and collectives on every rank of a process group.

All ranks measure at the same time, as they compute at the same time in training. A time is the
median of repetitions, and its spread is the distance of the quartiles over the median.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from baselines.model import build_piece
from zeropp.engine.ranks.collectives import all_gather_single, reduce_scatter_single
from zeropp.price.kernels import ATTENTION_TILE
from zeropp.price.pieces import BACKWARD_LAUNCHES, KERNELS
from zeropp.types.shape import ModelShape

_LEAST_S = 0.15  # of repetitions of one kernel
_MOST = 200  # repetitions
_TINY = 300  # kernels in a row; one takes the gap between launches
_LAUNCHED = 100  # blocks; the first fifth warms up
SIZES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)  # bytes of a collective's result
_ON_CPU = 2**22  # the largest of them on CPUs


@dataclass(frozen=True)
class Timed:
    """The median of repeated times in seconds, and its spread."""

    seconds: float
    spread: float


_NOT_YET = Timed(float("nan"), 0.0)


@dataclass
class Times:
    """What one rank has measured. Products by (m, k, n); collectives by kind, group and bytes."""

    host: str
    products: dict[tuple[int, int, int], Timed] = field(default_factory=dict)
    attention: Timed = _NOT_YET
    attention_flops: float = 0.0  # with those of whole tiles, and as if heads were wide
    stream: Timed = _NOT_YET
    stream_bytes: int = 0
    tiny: Timed | None = None  # a small kernel in a row of many; None on a CPU, whose host runs it
    launch: Timed = _NOT_YET  # the host's part of a kernel, with Python, in a block
    collectives: dict[tuple[str, str, int], Timed] = field(default_factory=dict)
    group_sizes: dict[str, int] = field(default_factory=dict)
    gather: Timed = _NOT_YET  # an all-gather alone
    alone: Timed = _NOT_YET  # products alone that take about twice as long
    beside: Timed | None = None  # both at the same time; None: there is no group


class Stopwatch:
    """Times functions on one device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def time(self, run: Callable[[], Any], *, most: int = _MOST, fixed: bool = False) -> Timed:
        """The time of a call. ``fixed``: exactly ``most`` repetitions, as ranks that communicate
        need."""
        for _ in range(2):
            run()
        self._wait()
        seconds: list[float] = []
        while len(seconds) < 5 or (len(seconds) < most and (fixed or sum(seconds) < _LEAST_S)):
            start = time.perf_counter()
            run()
            self._wait()
            seconds.append(time.perf_counter() - start)
        return timed(seconds)


def timed(seconds: Sequence[float]) -> Timed:
    """The median of times, and its spread."""
    low, middle, high = quantiles(seconds, n=4)
    return Timed(middle, (high - low) / middle)


def product_shapes(shape: ModelShape) -> list[tuple[int, int, int]]:
    """The products of a block and of the head for one sequence, and two with sides that are no
    multiple of 64 and of 8."""
    kv = shape.hidden * shape.kv_heads // shape.heads
    widths = [shape.hidden + 2 * kv, shape.hidden, shape.ffn * shape.gates, shape.vocab]
    shapes = [(shape.seq, shape.hidden, width) for width in widths]
    shapes += [(shape.seq, shape.ffn, shape.hidden), (4 * shape.seq, shape.hidden, shape.ffn)]
    return [*dict.fromkeys(shapes), (shape.seq, shape.hidden, shape.ffn + 8),
            (shape.seq, shape.hidden, shape.ffn + 1)]  # fmt: skip


def kernels(times: Times, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
    """Time products, attention, element-wise kernels and launches."""
    watch = Stopwatch(device)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device, dtype=dtype)

    for m, k, n in product_shapes(shape):
        left, right, out = random(m, k), random(k, n), random(m, n)
        times.products[m, k, n] = watch.time(partial(torch.mm, left, right, out=out))
    query = random(1, shape.heads, shape.seq, shape.head_dim)
    causal = 2.0 * shape.heads * shape.seq**2 * shape.head_dim
    narrow = min(1.0, 0.5 + shape.head_dim / 256)  # as ``zeropp.price.kernels`` prices attention
    times.attention_flops = causal * (1 + ATTENTION_TILE / shape.seq) / narrow
    times.attention = watch.time(
        lambda: scaled_dot_product_attention(query, query, query, is_causal=True)
    )
    many = 2**22 if device.type == "cpu" else 2**28
    read, written = random(many), random(many)
    times.stream_bytes = 2 * many * read.element_size()
    times.stream = watch.time(lambda: torch.mul(read, 2.0, out=written))
    if device.type == "cuda":
        times.tiny = _tiny(watch, device)
    times.launch = _launch(shape, device)


def _tiny(watch: Stopwatch, device: torch.device) -> Timed:
    """A small kernel in a row of many: a graph, because the host is slower than such kernels."""
    few = torch.randn(64, device=device)

    def row() -> None:
        for _ in range(_TINY):
            few.mul_(1.0)

    row()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row()
    whole = watch.time(graph.replay, most=20)
    return Timed(whole.seconds / _TINY, whole.spread)


def _launch(shape: ModelShape, device: torch.device) -> Timed:
    """The host's time per launch, as ``zeropp.price`` counts launches: what it takes to start the
    forward and the backward of a block so narrow that arithmetic is nothing."""
    narrow = replace(shape, layers=1, hidden=64, heads=4, kv_heads=4, ffn=128, seq=32)
    block = build_piece(narrow, 1, seed=0, device=device)
    hidden = torch.randn(1, narrow.seq, narrow.hidden, device=device, requires_grad=True)
    seconds = []
    for _ in range(_LAUNCHED):
        start = time.perf_counter()
        block(hidden).sum().backward()
        seconds.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.synchronize()
    whole = timed(seconds[_LAUNCHED // 5 :])
    launches = (1 + BACKWARD_LAUNCHES) * KERNELS[shape.family]
    return Timed(whole.seconds / launches, whole.spread)


def collectives(
    times: Times,
    groups: dict[str, dist.ProcessGroup],
    device: torch.device,
    tell: Callable[[str], None],
) -> None:
    """Time collectives and messages by size on each of the groups that this rank belongs
    to."""
    watch = Stopwatch(device)
    for name, group in groups.items():
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        times.group_sizes[name] = size
        for count in SIZES:
            if device.type == "cpu" and count > _ON_CPU:
                continue
            tell(f"collectives {name}, {count / 2**20:g} MiB")
            elements = count // 4 // size * size
            whole = torch.zeros(elements, device=device)
            part = torch.zeros(elements // size, device=device)
            runs: dict[str, Callable[[], Any]] = {
                "all_gather": partial(all_gather_single, whole, part, group=group),
                "reduce_scatter": partial(reduce_scatter_single, part, whole, group=group),
                "all_reduce": partial(dist.all_reduce, whole, group=group),
                "send": partial(_pass_on, whole, rank, size, group),
            }
            for kind, run in runs.items():
                dist.barrier(group)
                repetitions = 30 if count <= 2**20 else 10
                times.collectives[kind, name, count] = watch.time(run, most=repetitions, fixed=True)


def _pass_on(tensor: torch.Tensor, rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Every even rank sends to the next one, the last of an odd number waits."""
    if rank % 2 == 0 and rank + 1 < size:
        dist.send(tensor, dist.get_global_rank(group, rank + 1), group=group)
    elif rank % 2:
        dist.recv(tensor, dist.get_global_rank(group, rank - 1), group=group)


def overlap(
    times: Times,
    shape: ModelShape,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Time a row of products alone, and beside an all-gather that takes about half as long, so that
    it ends before they do, even if they slow it."""
    watch = Stopwatch(device)
    left = torch.randn(4 * shape.seq, shape.hidden, device=device, dtype=dtype)
    right = torch.randn(shape.hidden, shape.ffn, device=device, dtype=dtype)
    out = torch.empty(4 * shape.seq, shape.ffn, device=device, dtype=dtype)
    size = dist.get_world_size(group)
    part = torch.zeros(2**18 if device.type == "cpu" else 2**24, device=device)
    whole = torch.zeros(part.numel() * size, device=device)
    times.gather = watch.time(
        lambda: all_gather_single(whole, part, group=group), most=15, fixed=True
    )
    one_s = watch.time(lambda: torch.mm(left, right, out=out)).seconds
    row = torch.tensor([max(1, round(2 * times.gather.seconds / one_s))], device=device)
    dist.all_reduce(row, op=dist.ReduceOp.MAX, group=group)

    def products() -> None:
        for _ in range(int(row.item())):
            torch.mm(left, right, out=out)

    def beside() -> None:
        work = all_gather_single(whole, part, group=group, async_op=True)
        products()
        work.wait()

    times.alone = watch.time(products, most=15, fixed=True)
    times.beside = watch.time(beside, most=15, fixed=True)
