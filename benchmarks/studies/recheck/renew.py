"""Writes all committed tables anew, one study after the other.

A renewal takes more than an hour. ``.renewed.json`` beside the tables says which are finished, and
with which version of the suite's files, so that the same command goes on where it was stopped;
tables that were begun keep the rows that they have.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.records.environment import read_code
from benchmarks.records.record import write_atomically
from benchmarks.studies.recheck.committed_tables import Table
from benchmarks.studies.recheck.rounding import moved

_STATE = ".renewed.json"


def renew(tables: Sequence[Table], reference: Path, home: Path) -> int:
    """Run the studies of the tables that this version of the suite has not renewed yet, and print
    what changed in each. Returns 1 as soon as one fails, else 0. ``home`` is the folder of the
    committed tables, whose pictures the documentation shows."""
    code = read_code(ask_git=False).digest
    written = [table for table in tables if table.command]
    for number, table in enumerate(written, 1):
        state = _read_state(reference, code)
        print(f"{number} of {len(written)}: {table.path}", flush=True)
        if state.get(table.path) == "done":
            print("  renewed before by this version of the suite", flush=True)
            continue
        begun = state.get(table.path) == "begun"
        _write_state(reference, code, state | {table.path: "begun"})
        if not _run(table, reference, begun=begun):
            return 1
        _write_state(reference, code, state | {table.path: "done"})
        if reference == home:
            _move_pictures(reference)
    return 0


def _run(table: Table, reference: Path, *, begun: bool) -> bool:
    """Run one study and print what changed; returns whether it succeeded."""
    old, started = table.read(reference), time.monotonic()
    words = [word.format(reference=reference) for word in table.command]
    words += [] if begun else table.anew
    print(f"  python -m {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", *words], cwd=CHECKOUT, stdout=sys.stderr)
    took = f"after {time.monotonic() - started:.0f} s"
    if done.returncode:
        print(f"  ended with status {done.returncode} {took}; the same command goes on from here")
        return False
    lines = list(moved(old, table.read(reference), table.keys))
    print("\n".join(f"  {line}" for line in [*(lines or ["nothing moved"]), took]), flush=True)
    return True


def _move_pictures(reference: Path) -> None:
    """Move the verdict's pictures to where the pages show them; remove what no page shows."""
    folder = reference / "claim_33"
    for picture in folder.glob("*.png"):
        picture.replace(CHECKOUT / "docs" / "images" / f"claim_33_{picture.name}")
    for drawing in folder.glob("*.svg"):
        drawing.unlink()
    shutil.rmtree(folder / "paper", ignore_errors=True)


def _read_state(reference: Path, code: str) -> dict[str, str]:
    """``begun`` or ``done`` by table; empty where another version of the suite wrote it."""
    try:
        state = json.loads((reference / _STATE).read_text())
    except (OSError, ValueError):
        return {}
    return dict(state["tables"]) if state.get("code") == code else {}


def _write_state(reference: Path, code: str, tables: dict[str, str]) -> None:
    write_atomically(reference / _STATE, json.dumps({"code": code, "tables": tables}, indent=1))
