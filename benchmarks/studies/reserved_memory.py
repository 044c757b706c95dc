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
from itertools import accumulate
from pathlib import Path

import pandas as pd

from benchmarks.records.environment import git_state
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.studies.memory_table import CASES
from zeropp.engine.tracing import trace_ranks
from zeropp.training import OptimizerConfig

OUT = Path("results/reference/memory/reserved.csv")
PLANS = (  # of ``memory_table``, with a pipeline rank
    ("zeropp gpt_6_2b pp=4 shard=8 chunks=2 b=1 m=8 bf16", 0),
    ("zeropp gpt_6_2b pp=4 shard=8 chunks=2 b=1 m=8 bf16", 3),
    ("zeropp gpt_6_2b pp=4 shard=8 chunks=2 recompute=full b=1 m=8 bf16", 3),
    ("zeropp llama_8b pp=4 shard=8 chunks=2 recompute=full b=1 m=8 bf16", 2),
    ("zeropp gpt_1_5b pp=2 shard=4 chunks=2 b=4 m=8 bf16", 1),
    ("torch_pp gpt_1_5b pp=4 shard=2 schedule=1f1b b=1 m=8 bf16", 0),
    ("torch_pp llama_8b pp=4 tp=4 schedule=1f1b sequence_parallel=true b=1 m=8 bf16", 3),
    ("fsdp gpt_6_2b shard=32 recompute=selective b=2 m=2 bf16", 0),
)
_MIB = 2**20
_ROUND = 512  # bytes, of every allocation
_SMALL = _MIB  # the largest allocation from a small segment
_LARGE = 10 * _MIB  # the least allocation that gets a segment of its own size


@dataclass(eq=False)
class _Region:
    """Memory of one segment, between two others of it."""

    size: int
    small: bool
    before: _Region | None = None
    after: _Region | None = None
    free: bool = True


class CachingAllocator:
    """Gives each allocation the smallest free block that holds it, or a new segment; ``reserved``
    are the bytes of all segments. If these are ``expandable``, there is one of each kind, which
    grows at its end (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``)."""

    def __init__(self, *, expandable: bool) -> None:
        self.reserved = 0
        self._expandable = expandable
        self._last: dict[bool, _Region | None] = {True: None, False: None}
        self._free: dict[bool, list[tuple[int, int, _Region]]] = {True: [], False: []}
        self._puts = 0

    def allocate(self, size: int) -> _Region:
        """The block of an allocation of so many bytes."""
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size,))
        block = free.pop(place)[2] if place < len(free) else self._new(size, small)
        block.free, left = False, block.size - size
        if left >= _ROUND if small or self._expandable else left > _SMALL:
            rest = _Region(left, small, block, block.after)
            block.size = size
            self._link(rest)
            self._put(rest)
        return block

    def release(self, block: _Region) -> None:
        """Free a block, and merge it with free neighbours."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                else:
                    block.after = other.after
        self._link(block)
        self._put(block)

    def _new(self, size: int, small: bool) -> _Region:
        """A free block of at least so many bytes, from the device."""
        last = self._last[small]
        if not self._expandable or last is None:
            block = _Region(0, small)
        elif last.free:
            self._take(last)
            block = last
        else:
            block = _Region(0, small, last)
        least = 2 * _MIB if small else 20 * _MIB if size < _LARGE or self._expandable else 2 * _MIB
        more = -(-(size - block.size) // least) * least
        self.reserved += more
        block.size += more
        self._link(block)
        return block

    def _link(self, block: _Region) -> None:
        """Let the neighbours of a block know it."""
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        else:
            self._last[block.small] = block

    def _take(self, block: _Region) -> None:
        free = self._free[block.small]
        free.pop(next(i for i, (_, _, one) in enumerate(free) if one is block))

    def _put(self, block: _Region) -> None:
        block.free = True
        self._puts += 1  # blocks themselves cannot be compared
        insort(self._free[block.small], (block.size, self._puts, block))


def replay(moves: Iterable[tuple[int, int]], *, expandable: bool) -> int:
    """Bytes that are reserved for allocations, as ``Trace`` has them."""
    allocator, blocks = CachingAllocator(expandable=expandable), dict[int, _Region]()
    for number, size in moves:
        if size > 0:
            blocks[number] = allocator.allocate(size)
        elif size < 0:
            allocator.release(blocks.pop(number))
    return allocator.reserved


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
    out.parent.mkdir(parents=True, exist_ok=True)
    cases = {f"{case.contender} {case.model} {case.text}": case for case in CASES}
    for text, rank in PLANS:
        plan, contender = cases[text].plan(), CONTENDERS[cases[text].contender]
        chosen = [plan.layout.pipeline(0)[rank]]
        (found,) = trace_ranks(plan, chosen, optimizer=OptimizerConfig(), build=contender.build)
        peak = max(accumulate(size for _, size in found.moves))
        shares = [replay(found.moves, expandable=how) / peak - 1 for how in (False, True)]
        rows.append(
            {
                "plan": text,
                "pipeline_rank": rank,
                "peak_gib": f"{peak / 2**30:.4f}",
                "reserved_over_peak": f"{shares[0]:.4f}",
                "expandable_over_peak": f"{shares[1]:.4f}",
                "commit": git_state()[0][:10],
            }
        )
        print(*rows[-1].values(), flush=True)
        pd.DataFrame(rows).to_csv(out, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
