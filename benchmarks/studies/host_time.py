"""Measures the time that the host takes per block with each program and way to split, as CSV.

Python between kernel launches takes the same kind of time on every machine, so this needs no GPU:
eight Llama blocks are so narrow that arithmetic is nothing, the process group is torch's fake one,
and what is left is CPU time of one process. A server's CPU is another one than this machine's, so
the rows are to be compared with each other (``over_plain``). ``launch_factor`` of programs in
conf/program that run without ``torch.compile`` is from here. The last two rows are steps of two
real ranks over gloo, which differ in how many passes of chunks a step has (``PASS_LAUNCHES`` in
zeropp/price/pieces.py).

    python -m benchmarks.studies.host_time --out results/reference/host_time.csv
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from baselines.torch_pp.trainer import cut_piece
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.reading import preset, validated
from zeropp.choose.task import Candidate, Task
from zeropp.cluster import Cluster
from zeropp.emulate.world import fake_world
from zeropp.model import build_piece
from zeropp.shape import ModelShape
from zeropp.training import OptimizerConfig

RANKS, BLOCKS, SEQ, HIDDEN = 8, 8, 32, 64
PASSES, WARMUP = 30, 5  # of every way in a round
STEPS, FEW, MANY = 10, 2, 6  # of a contender in a round, with few and with many microbatches
ROUNDS = 3  # all ways in turn, so that other work on the machine slows all alike
SHAPE = ModelShape(
    name="host_time", family="llama", layers=BLOCKS, hidden=HIDDEN, heads=8, kv_heads=8, ffn=128,
    vocab=64, seq=SEQ, tied_embeddings=False, dropout=0.0,
)  # fmt: skip
ADAMW = OptimizerConfig(kind="adamw", clip_norm=0.0)
REAL_MICROBATCHES = 8


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
    Way("DTensor, FSDP2", tp=4, fsdp=True),
    Way("DTensor, sequence parallel, FSDP2", tp=4, sequence_parallel=True, fsdp=True),
)
# Whole steps of the contenders' own code, by name, with the knobs of rank 0 of eight.
CASES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("zeropp", {"pp": 1, "shard": 8}),
    ("zeropp", {"pp": 2, "shard": 4, "chunks": 1}),
    ("zeropp", {"pp": 2, "shard": 4, "chunks": 4}),
    ("fsdp", {"shard": 8}),
    ("torch_pp", {"pp": 1, "shard": 2, "tp": 4}),
    ("deepspeed_3d", {"pp": 1, "replicate": 8, "replicate_zero": 1}),
    ("deepspeed_3d", {"pp": 1, "replicate": 8, "replicate_zero": 2}),
    ("deepspeed_3d", {"pp": 2, "replicate": 4, "replicate_zero": 1}),
    ("megatron_core_local", {"pp": 1, "replicate": 8, "replicate_zero": 1}),
    ("megatron_core_local", {"pp": 1, "tp": 4, "replicate": 2, "replicate_zero": 1}),
)
REAL = ({"pp": 2, "chunks": 1, "unit": 4}, {"pp": 2, "chunks": 4, "unit": 4})


@dataclass(frozen=True)
class Row:
    """Milliseconds of CPU time: of a block's forward and backward for one microbatch (the median of
    all rounds, and their range), and of what else is in a step with ``FEW`` microbatches; of real
    ranks (``block_ms`` blank), a whole step."""

    way: str
    block_ms: float | None
    block_low_ms: float | None
    block_high_ms: float | None
    over_plain: float | None
    rest_of_step_ms: float | None
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


def _block_ms(way: Way) -> float:
    """Milliseconds of CPU time of a block's forward and backward."""
    model, seq = _model(way), SEQ // (way.tp if way.sequence_parallel else 1)

    def run() -> None:
        model(torch.randn(1, seq, HIDDEN, requires_grad=True)).sum().backward()

    return _median_ms(run, PASSES) / BLOCKS


def _median_ms(
    run: Callable[[], object], count: int, clock: Callable[[], float] = time.process_time
) -> float:
    seconds = []
    for _ in range(WARMUP + count):
        begin = clock()
        run()
        seconds.append(clock() - begin)
    return 1e3 * statistics.median(seconds[WARMUP:])


def _step_ms(
    name: str, knobs: Mapping[str, Any], microbatches: int, *, ranks: int = RANKS
) -> float:
    """Milliseconds of CPU time of a contender's step: of all threads on a rank without peers, of
    the main one on a real rank, whose lanes are threads that a GPU does not have."""
    contender, cluster = CONTENDERS[name], preset("cluster", "cpu_gloo", Cluster)
    chosen = validated(contender.knobs, {"name": name, **knobs}, "case")
    replicas = knobs.get("shard", 1) * knobs.get("replicate", 1)
    task = Task(
        shape=SHAPE, cluster=cluster, num_gpus=ranks, global_batch=microbatches * replicas,
        precision="fp32",
    )  # fmt: skip
    plan = contender.plan(task, Candidate(chosen, 1))
    with fake_world(rank=0, size=ranks) if ranks == RANKS else nullcontext():
        trainer = contender.build(plan, ADAMW, torch.device("cpu"), 0)
        generator = torch.Generator().manual_seed(0)  # ranks of one pipeline get the same rows
        batch = torch.randint(SHAPE.vocab, (microbatches, SEQ), generator=generator)
        clock = time.process_time if ranks == RANKS else time.thread_time
        return _median_ms(lambda: trainer.step(batch, batch), STEPS, clock)


def _real_rank(rank: int, folder: str) -> None:
    """One of two gloo ranks; rank 0 writes what it has measured."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    steps = [_step_ms("zeropp", knobs, REAL_MICROBATCHES, ranks=2) for knobs in REAL]
    if rank == 0:
        Path(folder, "steps").write_text("\n".join(map(str, steps)), encoding="utf-8")
    dist.destroy_process_group()


def _label(name: str, knobs: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in knobs.items())])


def measure() -> list[Row]:
    """All ways in turns, and two real ranks."""
    torch.set_num_threads(1)
    blocks: dict[str, list[float]] = {}
    rests: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with fake_world(rank=0, size=RANKS):
            for way in WAYS:
                blocks.setdefault(way.name, []).append(_block_ms(way))
        for name, knobs in CASES:
            few, many = (_step_ms(name, knobs, count) for count in (FEW, MANY))
            microbatch = (many - few) / (MANY - FEW)
            held = BLOCKS // knobs.get("pp", 1)
            blocks.setdefault(_label(name, knobs), []).append(microbatch / held)
            rests.setdefault(_label(name, knobs), []).append(few - FEW * microbatch)
    plain = statistics.median(blocks[WAYS[0].name])
    machine = {"cpu": _cpu(), "torch": torch.__version__}
    rows = []
    for label, found in blocks.items():
        middle, rest = statistics.median(found), rests.get(label)
        rows.append(
            Row(
                way=label,
                block_ms=round(middle, 3),
                block_low_ms=round(min(found), 3),
                block_high_ms=round(max(found), 3),
                over_plain=round(middle / plain, 2),
                rest_of_step_ms=round(statistics.median(rest), 2) if rest else None,
                **machine,
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        spawn(_real_rank, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
        steps = map(float, Path(folder, "steps").read_text(encoding="utf-8").split())
        for knobs, step_ms in zip(REAL, steps, strict=True):
            name = f"{_label('zeropp', knobs)}, two ranks over gloo"
            rows.append(Row(name, None, None, None, None, round(step_ms, 2), **machine))
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
