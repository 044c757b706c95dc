"""Measures the time that the host takes per block with each way to split a model, as CSV.

Python between kernel launches takes the same kind of time on every machine, so this needs no GPU:
eight Llama blocks are so narrow that arithmetic is nothing, the process group is torch's fake one,
and what is left is CPU time of one thread. A server's CPU is another one than this machine's, so
the rows are to be compared with each other (``over_plain``). No price rests on them yet.

    python -m benchmarks.studies.host_time --out results/reference/host_time.csv
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from baselines.torch_pp.trainer import cut_piece
from benchmarks.specification.command import CommandParser, command
from zeropp.emulate.world import fake_world
from zeropp.model import build_piece
from zeropp.shape import ModelShape

RANKS, BLOCKS, SEQ, HIDDEN = 8, 8, 32, 64
PASSES, WARMUP = 40, 5  # of every way in a round
ROUNDS = 5  # all ways in turn, so that other work on the machine slows all alike
SHAPE = ModelShape(
    name="host_time", family="llama", layers=BLOCKS, hidden=HIDDEN, heads=8, kv_heads=8, ffn=128,
    vocab=64, seq=SEQ, tied_embeddings=False, dropout=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How the blocks are split: among ``tp`` tensor-parallel ranks, by FSDP2, or not at all."""

    name: str
    tp: int = 1
    sequence_parallel: bool = False
    fsdp: bool = False


WAYS = (
    Way("plain modules"),
    Way("FSDP2", fsdp=True),
    Way("DTensor", tp=4),
    Way("DTensor, sequence parallel", tp=4, sequence_parallel=True),
    Way("DTensor, sequence parallel, FSDP2", tp=4, sequence_parallel=True, fsdp=True),
)


@dataclass(frozen=True)
class Row:
    """Milliseconds of CPU time per block: the median of all rounds' medians, and their range."""

    way: str
    forward_ms: float
    forward_low_ms: float
    forward_high_ms: float
    backward_ms: float
    backward_low_ms: float
    backward_high_ms: float
    over_plain: float  # forward and backward over those of plain modules
    cpu: str
    torch: str


class _Blocks(nn.Module):
    """Blocks, one after another."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        """The last block's output."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def _model(way: Way) -> nn.Module:
    """The blocks, split; FSDP2 gathers each of them again for its backward."""
    mesh = init_device_mesh("cpu", (RANKS // way.tp, way.tp), mesh_dim_names=("shard", "tp"))
    blocks = [build_piece(SHAPE, piece, 0, torch.device("cpu")) for piece in range(1, BLOCKS + 1)]
    for block in blocks:
        if way.tp > 1:
            cut_piece(block, mesh["tp"], sequence_parallel=way.sequence_parallel)
        if way.fsdp:
            fully_shard(block, mesh=mesh["shard"], reshard_after_forward=True)
    model = _Blocks(blocks)
    if way.fsdp:
        fully_shard(model, mesh=mesh["shard"])
    return model


def _medians(way: Way) -> tuple[float, float]:
    """Milliseconds of CPU time of a block's forward and backward."""
    model, seq = _model(way), SEQ // (way.tp if way.sequence_parallel else 1)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARMUP + PASSES):
        hidden = torch.randn(1, seq, HIDDEN, requires_grad=True)
        begin = time.process_time()
        output = model(hidden)
        middle = time.process_time()
        output.sum().backward()
        times[0].append(middle - begin)
        times[1].append(time.process_time() - middle)
    forward, backward = (1e3 * statistics.median(each[WARMUP:]) / BLOCKS for each in times)
    return forward, backward


def measure() -> list[Row]:
    """All ways, in turns."""
    torch.set_num_threads(1)
    with fake_world(rank=0, size=RANKS):
        rounds = [[_medians(way) for way in WAYS] for _ in range(ROUNDS)]
    plain = statistics.median(sum(measured[0]) for measured in rounds)
    rows = []
    for index, way in enumerate(WAYS):
        forward, backward = zip(*(measured[index] for measured in rounds), strict=True)
        whole = statistics.median(sum(measured[index]) for measured in rounds)
        rows.append(
            Row(
                way=way.name,
                forward_ms=round(statistics.median(forward), 3),
                forward_low_ms=round(min(forward), 3),
                forward_high_ms=round(max(forward), 3),
                backward_ms=round(statistics.median(backward), 3),
                backward_low_ms=round(min(backward), 3),
                backward_high_ms=round(max(backward), 3),
                over_plain=round(whole / plain, 2),
                cpu=_cpu(),
                torch=torch.__version__,
            )
        )
    return rows


def _cpu() -> str:
    """The name of this machine's CPU."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


@command
def main() -> int:
    """Measure and write the table; see ``--help``."""
    parser = CommandParser(
        prog="python -m benchmarks.studies.host_time",
        description="Measure the host's time per block with each way to split a model.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table (CSV)")
    out: Path = parser.parse_args().out
    rows = [asdict(row) for row in measure()]
    with out.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
