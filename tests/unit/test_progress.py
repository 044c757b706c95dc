"""What a sweep prints: one line per point, whatever the width of the output."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.launch import local
from benchmarks.launch.attempt import Ending, new_header, write_unstarted
from benchmarks.launch.points import Point
from benchmarks.launch.running import SweepProgress, over_device
from benchmarks.launch.sweep import announce
from benchmarks.specification import progress as bars
from benchmarks.specification.run_spec import spec_from_mapping
from tests.unit.synthetic_records import make_record
from tests.unit.toy_spec import mapping

POINT = Point(spec_from_mapping(mapping()), None, "global_batch=16: " + "too odd, " * 19 + "try 8")


def printed(monkeypatch: pytest.MonkeyPatch, runs_dir: Path, *, terminal: bool) -> str:
    """Everything that a sweep of one point writes to a place of 80 columns."""
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(bars, "CONSOLE", console)
    announce([POINT] * 3, [POINT], [], "simulate", {})
    with SweepProgress(1) as bar:
        bar.update(POINT, "warmup 0: loss 5.5880, 0.41 s, and much more than fits on the line")
        ending = Ending("failed", "no [such] luck " * 9)
        record = write_unstarted(POINT.spec, runs_dir, new_header("local"), ending)
        bar.finished(record)
    return out.getvalue()


def test_a_log_has_one_line_a_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = printed(monkeypatch, tmp_path, terminal=False).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "infeasible", "failed"]
    assert lines[1].endswith(POINT.reason)


def test_what_is_settled_is_counted_and_only_failures_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = [spec_from_mapping(mapping() | {"seed": seed}) for seed in range(40)]
    points = [Point(spec, spec.plan(), note=f"auto: choice of {spec.seed}") for spec in specs]
    failed = [make_record(fields={"status": s, "reason": "2 GiB"}) for s in ("oom", "infeasible")]
    left = {spec.spec_id: "job 7 is pending" for spec in specs[:12]}
    out = io.StringIO()
    monkeypatch.setattr(bars, "CONSOLE", Console(file=out, width=80))
    announce(points, [points[-1]] * 3 + [points[-2]] * 2, failed, "local", left)
    notes, lines = out.getvalue().splitlines()[:2], out.getvalue().splitlines()[2:]
    assert notes == ["auto: choice of 39", "auto: choice of 38"]
    assert lines[0] == (
        "2 of 40 points to run with launcher=local, 5 runs in all, 12 under way, 26 already "
        "recorded (rerun=all runs them again), of them 1 oom, 1 infeasible (rerun=failed runs "
        "these)"
    )
    assert [line.split()[0] for line in lines[1:]] == ["oom"] + ["left"] * 11
    assert "2 more" in lines[-1]


def test_the_bar_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", printed(monkeypatch, tmp_path, terminal=True))
    bars = [
        line for line in re.split(r"[\r\n]+", text) if "toy-zeropp-4gpu" in line and "/1 " in line
    ]
    assert bars
    assert all(re.search(r"\d:\d\d:\d\d", line) for line in bars)
    assert all(len(line) == 80 and line.endswith("…") for line in bars)


def test_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the work says nothing itself."""
    out = io.StringIO()
    monkeypatch.setattr(bars, "CONSOLE", Console(file=out, width=80, force_terminal=False))
    monkeypatch.setattr(bars, "_FIRST_LINE_S", 0.02)
    monkeypatch.setattr(bars, "_LOG_EVERY_S", 0.1)
    with bars.progress_line() as bar:
        bar.advance(bar.add_task("cells", total=9))
        time.sleep(0.45)
    lines = out.getvalue().splitlines()
    assert 2 <= len(lines) <= 5
    assert all(text.endswith(" s: 1 of 9, cells") for text in lines)


@pytest.mark.parametrize("shows_steps", [True, False])
def test_every_step_is_shown_once_where_steps_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, shows_steps: bool
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(bars, "CONSOLE", Console(file=out, width=200, force_terminal=False))
    events: list[dict[str, Any]] = [{"event": "environment"}, {"event": "gate"}]
    events += [{"event": "warmup", "index": 0, "seconds": 1.0, "loss": 5.5}]
    events += [{"event": "step", "index": i, "seconds": 1.0, "loss": 5.0} for i in (1, 2)]
    with SweepProgress(1) as bar:
        watched = local._Watched(POINT, bar, shows_steps)
        for known in (0, 2, 4, 4, 5):
            watched.show(events[:known])
    lines = [line.split("  loss ")[0] for line in out.getvalue().splitlines()]
    expected = ["step    1 (warm-up)", "step    2", "step    3"] if shows_steps else []
    assert lines == expected


def test_a_trace_over_the_device_warns() -> None:
    fields = {"step_s": [], "ranks": [], "predicted": {"peak_bytes": 20 * 2**30}}
    traced = make_record(provenance="traced", fields=fields)  # on a device of 16 GiB
    assert over_device(traced) == "WARNING: 20.0 GiB are more than the device's 16 GiB"
    small = make_record(provenance="traced", fields=fields | {"predicted": {"peak_bytes": 2**30}})
    assert over_device(small) == ""
    assert over_device(make_record()) == ""
