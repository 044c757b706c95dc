"""What becomes of submitted points, without a Slurm: words, signals, absences, other clusters."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.launch.finish import Ending
from benchmarks.launch.slurm import endings as slurm_attempt
from benchmarks.launch.slurm.client import EndedJob
from benchmarks.launch.slurm.endings import ScriptEnd, close, ending_by_state
from benchmarks.launch.slurm.submissions import close_ended, read_view
from benchmarks.records.events import EventWriter
from benchmarks.records.record import read_record
from tests.unit.slurm_attempts import (
    silent_for,
    submitted,
)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("OUT_OF_MEMORY", ("oom", False)),
        ("TIMEOUT", ("timeout", False)),
        ("NODE_FAIL", ("lost", True)),
        ("PREEMPTED", ("preempted", True)),
        ("CANCELLED by 1000", ("failed", True)),
        ("FAILED", None),
        ("COMPLETED", None),
    ],
)
def test_what_slurms_states_mean(state: str, expected: tuple[str, bool] | None) -> None:
    ending = ending_by_state(EndedJob(state, "0:9", "node7"))
    assert (ending and (ending.status, ending.interrupted)) == expected
    if ending:
        assert state in ending.reason
        assert "node7" in ending.reason


TIME_LIMIT = Ending("timeout", "stopped before the job's time limit (SIGUSR1)")


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize(
    ("end", "log", "exits", "expected"),
    [
        (ScriptEnd(1, "USR1", elapsed_s=485), "", {}, TIME_LIMIT),
        (
            ScriptEnd(1, "USR1", elapsed_s=40),
            "",
            {},
            Ending("preempted", "SIGUSR1 with 500 s left: preemption, or sent by hand", True),
        ),
        *(
            (
                ScriptEnd(1, "TERM"),
                log,
                exits,
                Ending(
                    "failed",
                    "the script was sent SIGTERM, sent by hand or by a tool of the site "
                    "(Slurm does not answer)",
                    True,
                ),
            )
            # srun kills the ranks, at times before they have noticed the signal themselves
            for log, exits in (("", {}), ("srun: error: n: task 0: Killed\n", {1: 137}))
        ),
        (
            ScriptEnd(1),
            "slurmstepd-n1: error: StepId=4.0 exceeded memory limit (9 > 3), being killed\n",
            {},
            Ending("oom", "Slurm: StepId=4.0 exceeded memory limit (9 > 3), being killed"),
        ),
        (
            ScriptEnd(1),
            "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\n",
            {0: 5, 1: 137},
            Ending("oom", "Slurm: Detected 1 oom_kill event in StepId=4.0."),
        ),
        (
            ScriptEnd(1),
            "",
            {1: 139, 0: 5},
            Ending("failed", "rank 1 was killed by signal 11 (SIGSEGV)", interrupted=True),
        ),
        (
            ScriptEnd(1),
            "srun: error: node7: task 1: Killed\n",
            {0: 5},
            Ending("failed", "rank 1 was killed by signal 9 (SIGKILL)", interrupted=True),
        ),
    ],
)
def test_why_an_attempt_ended(
    attempt: Path, end: ScriptEnd, log: str, exits: dict[int, int], expected: Ending
) -> None:
    (attempt / "srun.log").write_text(log)
    for order, (rank, code) in enumerate(exits.items()):
        path = attempt / f"rank_{rank:03d}.exit"
        path.write_text(str(code))
        os.utime(path, (order, order))
    record = close(attempt, end)
    assert Ending(record.status, record.reason, record.interrupted) == expected
    assert record.step_s == [1.0]
    assert record.slurm["job"] == "7_0"


def test_a_job_that_leaves_its_nodes_is_explained_by_accounting(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, cancelled = EndedJob("COMPLETING", "0:0", "n"), EndedJob("CANCELLED by 0", "0:0", "n")
    told: list[list[EndedJob]] = [[], [EndedJob("RUNNING", "0:0", "n")], [cancelled]]
    monkeypatch.setattr(slurm_attempt, "last_ending", lambda job, timeout_s: leaving)
    monkeypatch.setattr(slurm_attempt, "accounted", lambda job, timeout_s: told.pop(0))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    record = close(attempt, ScriptEnd(5, "TERM"))
    assert record.reason == "Slurm: CANCELLED by 0 (exit code 0:0, nodes n)"


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (EndedJob("RUNNING", "0:0", "n", preempted=True), ("preempted", True)),
        (EndedJob("CANCELLED", "0:15", "n"), ("failed", True)),
        (EndedJob("NODE_FAIL", "0:0", "n"), ("lost", True)),
        (EndedJob("RUNNING", "0:0", "n"), ("failed", True)),
    ],
)
def test_term_has_the_meaning_that_slurm_gives_it(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, ended: EndedJob, expected: tuple[str, bool]
) -> None:
    monkeypatch.setattr(slurm_attempt, "last_ending", lambda job, timeout_s: ended)
    EventWriter(attempt, 0).write("signal", name="SIGTERM")
    record = close(attempt, ScriptEnd(5, "TERM"))
    assert (record.status, record.interrupted) == expected
    assert ended.state in record.reason or "preempted" in record.reason


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize(
    ("file", "line", "interrupted"),
    [
        ("a.log", "module: command not found", False),
        ("a.log", "cp: error writing 'spec.json': No space left on device", True),
        ("a.log", "slurmstepd: error: write to /tmp: No space left on device", True),
        ("srun.log", "srun: error: Unable to create step: More processors requested", False),
        ("rank_000.log", "ModuleNotFoundError: No module named 'torch'", False),
    ],
)
def test_a_failure_before_the_ranks_start_says_its_line(
    attempt: Path, file: str, line: str, interrupted: bool
) -> None:
    for path in attempt.glob("rank_*"):
        path.unlink()
    place = attempt.parents[1] if file == "a.log" else attempt
    (place / file).write_text(f"loading\n{line}\nslurmstepd: error: *** STEP 7.0 ON n CANCELLED\n")
    record = close(attempt, ScriptEnd(1, stage="setup" if file == "a.log" else "ranks"))
    assert line in record.reason
    assert (record.status, record.interrupted) == ("failed", interrupted)


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize("before", ["module: command not found\n", ""])
def test_slurms_daemon_does_not_speak_over_the_line_that_failed(attempt: Path, before: str) -> None:
    for path in attempt.glob("rank_*"):
        path.unlink()
    noise = "slurmstepd: error: _get_pss: ferror() indicates error on file /proc/71/smaps"
    (attempt.parents[1] / "a.log").write_text(f"{before}{noise}\n")
    reason = close(attempt, ScriptEnd(127, stage="setup")).reason
    assert reason == f"in setup: {before.strip() or noise}"


@pytest.mark.usefixtures("silent_slurm")
def test_a_signal_after_the_last_event_changes_nothing(attempt: Path) -> None:
    for rank in range(2):
        EventWriter(attempt, rank).write("done")
    assert close(attempt, ScriptEnd(0, "TERM")).status == "ok"


@pytest.mark.usefixtures("silent_slurm")
def test_a_closed_attempt_that_speaks_again_is_noted_and_overwrites_nothing(attempt: Path) -> None:
    submitted(attempt, "7")
    view = read_view(attempt.parents[1])
    silent_for(attempt, 1000)
    (lost,) = close_ended(view)
    for rank in range(2):
        EventWriter(attempt, rank).write("done")
    late = close(attempt, ScriptEnd(0))
    assert read_record(attempt / "record.json") == lost
    assert read_record(attempt / "record-late.json") == late
    assert (lost.status, late.status) == ("lost", "ok")
    assert late.notes == [f"closed before its end as lost: {lost.reason}"]
