"""Writes results/reference/memory/reserved.csv: what torch's caching allocator reserves for the
allocations of traced ranks (``zeropp.engine.tracing``), over their exact peak.

The allocator is a model of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings, for one
stream, as the engine allocates on the stream of compute alone. A step is replayed from a start in
which what was allocated before lies close together. What lies outside of torch's allocator (CUDA's
context, communicators, libraries) is not in it.

    python -m benchmarks.studies.reserved_memory [results/reference/memory/reserved.csv]
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks.records.environment import git_state
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.studies.memory_table import CASES
from zeropp.engine.tracing import trace_ranks
from zeropp.training import OptimizerConfig

OUT = Path("results/reference/memory/reserved.csv")
PLANS = (  # of ``memory_table``, with the pipeline ranks
    ("zeropp gpt_1_5b pp=2 shard=4 chunks=2 b=4 m=8 bf16", (0, 1)),
    ("zeropp gpt_6_2b pp=4 shard=8 chunks=2 b=1 m=8 bf16", (0, 3)),
    ("zeropp gpt_6_2b pp=4 shard=8 chunks=2 recompute=full b=1 m=8 bf16", (0, 3)),
    ("zeropp gpt_6_2b pp=4 shard=4 replicate=2 replicate_zero=1 chunks=2 b=1 m=8 bf16", (3,)),
    ("zeropp llama_8b pp=4 shard=8 chunks=2 recompute=full b=1 m=8 bf16", (2, 3)),
    ("torch_pp gpt_1_5b pp=4 shard=2 schedule=1f1b b=1 m=8 bf16", (0, 3)),
    ("torch_pp llama_8b pp=4 tp=4 schedule=1f1b sequence_parallel=true b=1 m=8 bf16", (3,)),
    ("fsdp gpt_6_2b shard=32 recompute=selective b=2 m=2 bf16", (0,)),
)
_MIB = 2**20
_ROUND = 512  # bytes, of every allocation
_SMALL = _MIB  # the largest allocation from a small segment
_LARGE = 10 * _MIB  # the least allocation that gets a segment of its own size


@dataclass(eq=False)
class _Block:
    """Memory of one segment, between two others of it."""

    size: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = True


class CachingAllocator:
    """Gives each allocation the smallest free block that holds it, or a new segment; ``reserved``
    are the bytes of all segments."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._puts = 0

    def allocate(self, size: int) -> _Block:
        """The block of an allocation of so many bytes."""
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size,))
        block = free.pop(place)[2] if place < len(free) else self._segment(size, small)
        block.free, left = False, block.size - size
        if left >= _ROUND if small else left > _SMALL:
            rest = _Block(left, small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        return block

    def release(self, block: _Block) -> None:
        """Free a block, and merge it with free neighbours."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._free[block.small] = [x for x in self._free[block.small] if x[2] is not other]
                block.size += other.size
                if other is block.before:
                    block.before, outer = other.before, other.before
                    if outer is not None:
                        outer.after = block
                else:
                    block.after, outer = other.after, other.after
                    if outer is not None:
                        outer.before = block
        block.free = True
        self._put(block)

    def _segment(self, size: int, small: bool) -> _Block:
        """A new segment, from the device."""
        if small:
            size = 2 * _MIB
        else:
            size = 20 * _MIB if size < _LARGE else -(-size // (2 * _MIB)) * 2 * _MIB
        self.reserved += size
        return _Block(size, small)

    def _put(self, block: _Block) -> None:
        self._puts += 1  # blocks themselves cannot be compared
        insort(self._free[block.small], (block.size, self._puts, block))


def replay(moves: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(bytes reserved, exact peak) of allocations, as ``Trace`` has them."""
    allocator, blocks = CachingAllocator(), dict[int, _Block]()
    total = peak = 0
    for number, size in moves:
        total += size
        peak = max(peak, total)
        if size > 0:
            blocks[number] = allocator.allocate(size)
        elif size < 0:
            allocator.release(blocks.pop(number))
    return allocator.reserved, peak


@command
def main() -> int:
    """Command line; see ``--help``."""
    parser = CommandParser(
        description="Replay traced ranks in a model of torch's caching allocator, and write a CSV; "
        "this takes some minutes.",
        epilog="example: python -m benchmarks.studies.reserved_memory /tmp/reserved.csv",
    )
    parser.add_argument(
        "out", nargs="?", type=Path, default=OUT, help="the CSV (the committed one)"
    )
    out, rows = parser.parse_args().out, []
    cases = {f"{case.contender} {case.model} {case.text}": case for case in CASES}
    for text, ranks in PLANS:
        plan, contender = cases[text].plan(), CONTENDERS[cases[text].contender]
        chosen = [plan.layout.pipeline(0)[rank] for rank in ranks]
        traces = trace_ranks(plan, chosen, optimizer=OptimizerConfig(), build=contender.build)
        for rank, found in zip(ranks, traces, strict=True):
            reserved, peak = replay(found.moves)
            rows.append(
                {
                    "plan": text,
                    "pipeline_rank": rank,
                    "peak_gib": f"{peak / 2**30:.4f}",
                    "reserved_gib": f"{reserved / 2**30:.4f}",
                    "over_peak": f"{reserved / peak - 1:.4f}",
                    "commit": git_state()[0][:10],
                }
            )
            print(*rows[-1].values(), flush=True)
            pd.DataFrame(rows).to_csv(out, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
