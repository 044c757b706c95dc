"""Reads what nccl-tests print: tables of a collective's times by size, each on one node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.specification import SpecError

# What mpirun and srun put before a line.
_TAG = re.compile(r"(?m)^(?:\[\d+,\d+\](?:<\w+>)?:|\d+: )")
# size, count, type, operator (not of old gathers), root (not in old versions; -1 of all ranks),
# then out of place time in microseconds, two rates in GB/s and errors, and the same in place.
_ROW = re.compile(
    r"(?m)^\s*(\d+) +\d+ +\w+ +(?:([a-z]+) +)?(?:-1 +)?"
    r"([\d.]+) +([\d.]+) +([\d.]+) +\S+(?: +[\d.]+){3} +\S+\s*$"
)
_RANK = re.compile(r"(?m)^# +Rank +\d+ .* on +(\S+) device")
_TABLE = re.compile(r"(?m)^(?=# +Rank +0 )")
_NAME = re.compile(r"\b(\w+)_perf\b")  # in the header of newer versions, or in the command
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class NodeTests:
    """Seconds of collectives within a node by kind and bytes, and the number of ranks."""

    ranks: int = 0
    seconds: Mapping[tuple[str, int], float] = field(default_factory=dict)


def read_tests(paths: Sequence[Path]) -> NodeTests:
    """What the outputs say together; raises SpecError, in one line, for one that is of something
    else. A kind that the output does not name follows from its operator and rates, by which an
    all-to-all cannot be told from an all-gather."""
    ranks, seconds = set[int](), dict[tuple[str, int], float]()
    for path in paths:
        try:
            text = _TAG.sub("", path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"--nccl-tests {path}: cannot be read: {error}") from None
        before, *tables = _TABLE.split(text)
        kinds = set()
        for table in tables or [""]:
            kind, size, of = _read_table(path, before, table)
            kinds.add(kind)
            if kind in _KINDS:
                ranks.add(size)
                seconds |= {(kind, count): s for count, s in of.items()}
            before = table
        if not kinds & set(_KINDS):
            named = ", ".join(f"{kind}_perf" for kind in sorted(kinds))
            raise SpecError(f"--nccl-tests {path}: {named}: must be among {', '.join(_KINDS)}")
    if len(ranks) > 1:
        raise SpecError(f"--nccl-tests: of {min(ranks)} and of {max(ranks)} ranks (give one's)")
    return NodeTests(max(ranks, default=0), seconds)


def _read_table(path: Path, before: str, table: str) -> tuple[str, int, dict[int, float]]:
    """The kind of one run, whose name is the last of the text ``before`` it, its ranks, and its
    seconds by bytes."""
    rows, hosts = _ROW.findall(table), _RANK.findall(table)
    rows = [row for row in rows if int(row[0]) and float(row[3])]
    named = _NAME.findall(before)
    if named and named[-1] not in _KINDS:
        return named[-1], 0, {}
    if not rows or len(hosts) < 2:
        raise SpecError(
            f"--nccl-tests {path}: no table of nccl-tests (rows of size, count, type, redop, "
            "root, time, algbw, busbw, below lines that name two ranks or more)"
        )
    if len(set(hosts)) > 1:
        raise SpecError(f"--nccl-tests {path}: ran on {len(set(hosts))} nodes (give one's)")
    kind = named[-1] if named else _kind(rows[-1], len(hosts))
    return kind, len(hosts), {int(size): 1e-6 * float(us) for size, _, us, _, _ in rows}


def _kind(row: Sequence[str], ranks: int) -> str:
    _, operator, _, by_size, on_bus = row
    if operator in ("", "none"):
        return "all_gather"
    passes = float(on_bus) / float(by_size) * ranks / (ranks - 1)
    return "all_reduce" if passes > 1.5 else "reduce_scatter"
