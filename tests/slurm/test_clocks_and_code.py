"""What changes under a job that waits or runs: the hosts' clocks, and the checkout's files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.launch.slurm.submit import copy_checkout
from tests.slurm.conftest import FIRST, TOGETHER, Suite
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(590), *TOGETHER]


def faked(offset: str) -> dict[str, str]:
    """Variables under which programs see a clock that is wrong by so much."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not found:
        pytest.skip("not installed: libfaketime (apt-get install faketime)")
    return {"LD_PRELOAD": str(found[0]), "FAKETIME": offset}


def typed(suite: Suite, *words: str, folder: Path | None = None) -> tuple[str, str]:
    """What a command prints (stdout, stderr) that is run by an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=suite.variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@FIRST
def test_a_time_limit_on_a_node_whose_clock_is_late(suite: Suite) -> None:
    """By four minutes: more than any grace, and nearly as much as munge allows."""
    suite.environment = faked("-240s")
    suite.stand_in("seed=3", "launcher.sbatch.time=2", "launcher.grace_s=20")
    attempt = suite.wait_for_steps(3)
    suite.environment = {}
    suite.wait_for_records(1)
    record = suite.only_record()
    assert (record.status, record.interrupted) == ("timeout", False)  # and not preempted
    assert "time limit" in record.reason
    assert len(record.step_s) > 3
    assert suite.states() == ["timeout"]
    assert record.record_id.endswith(attempt.name)
    late_s = record.ranks[0].environment["clock"] - attempt.stat().st_mtime
    assert late_s < -200  # the clock was wrong indeed


def test_the_clock_is_a_day_ahead_where_somebody_asks(suite: Suite) -> None:
    suite.stand_in("seed=3")
    suite.wait_for_steps(3)
    suite.environment = faked("+1d")
    told, _ = typed(suite, "benchmarks.status", str(suite.runs), "--json")
    assert [point["state"] for point in json.loads(told)] == ["running"]
    _, said = typed(suite, "benchmarks.run", *suite.words("seed=3"))
    assert "left alone" in said
    assert suite.records() == []
    suite.cluster.run("scancel", *suite.queue())


def test_the_checkout_is_edited_before_the_job_starts(suite: Suite) -> None:
    mine = suite.directory / "mine"
    copy_checkout(mine)
    real: tuple[str, ...] = (
        "num_gpus=1",
        "global_batch=2",
        "measure.gate=false",
        "measure.timeline=false",
    )
    real += ("measure.warmup_steps=0", "measure.steps=1", "+launcher.sbatch.hold=true")
    real += ("+launcher.report_sbatch.hold=true",)
    for seed, snapshot in enumerate(("true", "false")):
        choice = (f"seed={seed}", f"launcher.snapshot={snapshot}")
        typed(suite, "benchmarks.run", *suite.given(*real, *choice), folder=mine)
    headers = suite.runs.glob("slurm/*/specs/*/attempt.json")
    (before,) = {json.loads(path.read_text())["code_digest"] for path in headers}
    with (mine / "zeropp" / "plan.py").open("a") as file:
        file.write("# edited\n")
    suite.cluster.run("scontrol", "release", *suite.queue())
    suite.wait_for_records(2)
    kept, changed = sorted(suite.records(), key=lambda record: record.spec["seed"])
    assert [kept.status, changed.status] == ["ok", "ok"], (kept.reason, changed.reason)
    note = "the suite's files changed between submission and start; the ranks' count"
    assert [note in record.notes for record in (kept, changed)] == [False, True]
    assert [record.code_digest == before for record in (kept, changed)] == [True, False]
