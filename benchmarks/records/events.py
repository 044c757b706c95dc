"""The append-only file that each rank writes while it works: one JSON object per line.

Every line is flushed when it is written, so that what was measured survives any kill. Events are
``environment``, ``gate``, ``warmup``, ``step``, ``memory``, ``counters``, ``spans``, ``done``,
and, at an early end, ``error``, ``oom`` or ``signal``. A rank that is traced without its peers
writes ``lone_warmup``, ``lone_step``, ``compute`` and ``kernels``.

A reader leaves out lines that a kill, a full disk or a broken file system has damaged, and uses
every complete line before and after them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.records.metrics import mfu, model_tflops_per_gpu, tokens_per_s_per_gpu
from benchmarks.records.record import RecordedSpec

# What one training step did, in one line, as torchtitan's metrics logger prints it.
#
# Fed by a rank's ``warmup`` or ``step`` event and by the run's specification. Every rank prints the
# line into its log; ``launcher.steps=true`` shows those of rank 0 on the screen.


def step_line(spec: RecordedSpec, event: Mapping[str, Any]) -> str:
    """Step (counted from 1, warm-up included), loss (nats per token), gradient norm before
    clipping, tokens/s, model TFLOP/s and MFU per rank, and the rank's peak memory so far in GiB
    and as a share of its device's. What the event or the specification does not say is left out."""
    warmup = " (warm-up)" if event["event"] == "warmup" else ""
    parts = [f"step {event['index'] + 1:4}{warmup}"]
    if "loss" in event:
        parts.append(f"loss {event['loss']:8.4f}")
    if "grad_norm" in event:
        parts.append(f"grad norm {event['grad_norm']:8.4f}")
    parts += [*_speed(spec, float(event["seconds"])), *_memory(spec, event.get("peak_bytes"))]
    return "  ".join(parts)


def _speed(spec: RecordedSpec, step_s: float) -> list[str]:
    """Time and what follows from it, per rank."""
    parts = [f"{step_s:.3f} s", f"{tokens_per_s_per_gpu(spec, step_s):,.0f} tokens/s"]
    tflops, share = model_tflops_per_gpu(spec, step_s), mfu(spec, step_s)
    if tflops is not None:
        parts.append(f"{tflops:.4g} TFLOP/s")
    if share is not None:
        parts.append(f"MFU {share:.1%}")
    return parts


def _memory(spec: RecordedSpec, peak_bytes: int | None) -> list[str]:
    if peak_bytes is None:
        return []
    gib, device = peak_bytes / 2**30, spec.cluster.device.memory_gib
    share = "" if device is None else f" ({gib / device:.1%})"
    return [f"memory {gib:.2f} GiB{share}"]


# The field that a complete line of each kind has, and the types that its value may have.
_NUMBER = (int, float)
_REQUIRED: dict[str, dict[str, tuple[type, ...]]] = {
    "step": {"index": (int,), "seconds": _NUMBER},
    "warmup": {"index": (int,), "seconds": _NUMBER},
    "lone_step": {"seconds": _NUMBER},
    "compute": {"seconds": (dict,)},
    "error": {"type": (str,), "message": (str,)},
    "oom": {"type": (str,), "message": (str,)},
    "signal": {"name": (str,)},
    "spans": {"rows": (list,)},
}
_RANK_FILE = re.compile(r"rank_(\d+)\.jsonl")


class EventWriter:
    """Writes the events of one rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = rank_file(directory, rank).open("ab", buffering=0)
        self._torn = False

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append one event with the time of day and return it; raises OSError where the disk is
        full."""
        event = {"event": kind, "time": time.time(), **fields}
        line = json.dumps(event).encode() + b"\n"
        whole = b"\n" + line if self._torn else line  # after an incomplete line, start a new one
        self._torn = True
        written = self._file.write(whole)
        if written != len(whole):
            raise OSError(f"{self._file.name}: only {written} of {len(whole)} bytes were written")
        self._torn = False
        return event


def rank_file(directory: Path, rank: int) -> Path:
    """The file into which a rank writes its events."""
    return directory / f"rank_{rank:03d}.jsonl"


def rank_of(path: Path) -> int | None:
    """The rank whose events a file holds; None if it is not named like an event file."""
    named = _RANK_FILE.fullmatch(path.name)
    return int(named[1]) if named else None


def read_events(path: Path) -> list[dict[str, Any]]:
    """All complete events of a file, in order; none if the file is missing or unreadable."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    events = (_event(line) for line in lines)
    return [event for event in events if event is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    """One event, or None where the line is damaged."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    required = {"time": _NUMBER} | _REQUIRED.get(event["event"], {})
    whole = all(isinstance(event.get(name), types) for name, types in required.items())
    return event if whole else None
