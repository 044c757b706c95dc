"""What becomes of submitted points, without a Slurm: words, signals, absences, other clusters."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.launch.attempt import Ending
from benchmarks.launch.slurm import endings as slurm_endings
from benchmarks.launch.slurm.client import EndedJob
from benchmarks.launch.slurm.endings import ScriptEnd, close, ending_by_state
from benchmarks.records.events import EventWriter


@pytest.fixture
def unstarted(attempt: Path) -> Path:
    """The attempt; no rank has written anything."""
    for path in attempt.glob("rank_*"):
        path.unlink()
    return attempt


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("OUT_OF_MEMORY", ("oom", False)),
        ("TIMEOUT", ("timeout", False)),
        ("NODE_FAIL", ("lost", True)),
        ("PREEMPTED", ("preempted", True)),
        ("CANCELLED by 1000", ("failed", True)),
        ("REQUEUED", ("preempted", True)),
        ("PENDING", ("lost", True)),  # back in the queue, and accounting does not say why
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


TIME_LIMIT = Ending("timeout", "stopped before the job's time limit (SIGUSR1); steps done: 1")
BY_HAND = Ending(
    "failed",
    "the script was sent SIGTERM, sent by hand or by a tool of the site "
    "(Slurm does not know the job)",
    True,
)


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize(
    ("end", "log", "expected"),
    [
        (ScriptEnd(1, "USR1", elapsed_s=485), "", TIME_LIMIT),
        (
            ScriptEnd(1, "USR1", elapsed_s=40),
            "",
            Ending("preempted", "SIGUSR1 with 500 s left: preemption, or sent by hand", True),
        ),
        (ScriptEnd(1, "TERM"), "", BY_HAND),
        # srun kills the ranks, at times before they have noticed the signal themselves
        (ScriptEnd(1, "TERM"), "srun: error: n: task 0: Killed\n", BY_HAND),
        (
            ScriptEnd(124, elapsed_s=603),
            "srun: error: n: tasks 0-1: Exited with exit code 5\n",
            Ending("timeout", "not finished after measure.timeout_s=600; steps done: 1"),
        ),
        (
            ScriptEnd(1),
            "slurmstepd-n1: error: StepId=4.0 exceeded memory limit (9 > 3), being killed\n",
            Ending("oom", "Slurm: StepId=4.0 exceeded memory limit (9 > 3), being killed"),
        ),
        (
            ScriptEnd(1),
            "srun: error: n: task 1: Killed\nslurmstepd: error: Detected 1 oom_kill event.\n",
            Ending("oom", "Slurm: Detected 1 oom_kill event."),
        ),
        (
            ScriptEnd(3),
            "srun: error: n: task 1: Exited with exit code 3\nsrun: error: n: task 0: Killed\n",
            Ending("failed", "rank 1: exit code 3"),
        ),
        (  # a full disk keeps an error from the rank's file
            ScriptEnd(1),
            "srun: error: n: task 1: Exited with exit code 1\n",
            Ending("failed", "rank 1: exit code 1", interrupted=True),
        ),
        (  # by a shell around it
            ScriptEnd(1),
            "srun: error: n: task 1: Exited with exit code 137\n",
            Ending(
                "failed",
                "rank 1 was killed by signal 9 (SIGKILL; often the system's, for lack of memory)",
                interrupted=True,
            ),
        ),
        (
            ScriptEnd(1),
            "srun: error: n7: task 1: Segmentation fault\nsrun: error: n: task 0: Killed\n",
            Ending("failed", "rank 1: Segmentation fault (srun)", interrupted=True),
        ),
    ],
)
def test_why_an_attempt_ended(attempt: Path, end: ScriptEnd, log: str, expected: Ending) -> None:
    (attempt / "srun.log").write_text(log)
    record = close(attempt, end)
    assert Ending(record.status, record.reason, record.interrupted) == expected
    assert record.step_s == [1.0]
    assert record.slurm["job"] == "7_0"


@pytest.mark.parametrize(
    ("now", "state", "status"),
    [("COMPLETING", "CANCELLED by 0", "failed"), ("PENDING", "NODE_FAIL", "lost")],
)
def test_a_job_that_leaves_its_nodes_is_explained_by_accounting(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, now: str, state: str, status: str
) -> None:
    leaving, ended = EndedJob(now, "0:0", "n"), EndedJob(state, "0:0", "n")
    told: list[list[EndedJob]] = [[], [EndedJob("RUNNING", "0:0", "n")], [ended]]
    monkeypatch.setattr(slurm_endings, "last_state", lambda job, timeout_s: leaving)
    monkeypatch.setattr(slurm_endings, "accounted", lambda *_: {"7_0": told.pop(0)})
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    record = close(attempt, ScriptEnd(5, "TERM"))
    assert record.reason == f"Slurm: {state} (exit code 0:0, nodes n)"
    assert record.status == status


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
    monkeypatch.setattr(slurm_endings, "last_state", lambda job, timeout_s: ended)
    EventWriter(attempt, 0).write("signal", name="SIGTERM")
    record = close(attempt, ScriptEnd(5, "TERM"))
    assert (record.status, record.interrupted) == expected
    assert ended.state in record.reason or "preempted" in record.reason


FULL = "No space left on device"
EXITED = "srun: error: n: task 1: Exited with exit code {}\nsrun: error: n: task 0: Killed\n"
NOISE = "slurmstepd: error: _get_pss: ferror() indicates error on file /proc/71/smaps"
BEFORE = "before the ranks started: "


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize(
    ("end", "file", "line", "reason", "interrupted"),
    [
        (ScriptEnd(1, stage="setup"), "a.log", "module: no such command", "in setup: ", False),
        (ScriptEnd(1, stage="setup"), "a.log", f"write to /tmp: {FULL}", "in setup: ", True),
        (ScriptEnd(1, stage="start"), "a.log", f"cp: error writing: {FULL}", BEFORE, True),
        (ScriptEnd(143, stage="setup"), "a.log", "line 9: Terminated: sleep", "in setup: ", True),
        (ScriptEnd(1), "srun.log", "srun: error: Unable to create step: no CPU", BEFORE, False),
        (ScriptEnd(1), "srun.log", "srun: Expired or invalid job 34", BEFORE, True),
        (ScriptEnd(1), "rank_001.log", "ModuleNotFoundError: No module named", "rank 1: ", False),
        (ScriptEnd(1), "rank_001.log", "EADDRINUSE: address already in use", "rank 1: ", True),
        (ScriptEnd(7), "rank_001.log", "", "rank 1: exit code 1", False),
        (ScriptEnd(0), "a.log", "", f"{BEFORE}ended with exit code 0", False),
        (ScriptEnd(3, stage="setup"), "a.log", "", "in setup: ended with exit code 3", False),
    ],
)
def test_a_failure_before_the_ranks_start_says_its_line(
    unstarted: Path, end: ScriptEnd, file: str, line: str, reason: str, interrupted: bool
) -> None:
    """By the first rank that failed, which need not be rank 0."""
    if file.startswith("rank"):
        (unstarted / "srun.log").write_text(EXITED.format(1))
        (unstarted / "rank_000.log").write_text("loading\n")
    place = unstarted.parents[1] if file == "a.log" else unstarted
    after = f"{NOISE}\nslurmstepd: error: *** STEP 7.0 ON n CANCELLED\n"
    (place / file).write_text(f"loading\n{line}\n{after}" if line else after)
    record = close(unstarted, end)
    assert (record.status, record.reason) == ("failed", reason + line)
    assert record.interrupted == interrupted


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (EndedJob("COMPLETED", "0:0", "n"), f"{BEFORE}ended with exit code 0"),
        (EndedJob("FAILED", "7:0", "n"), f"{BEFORE}ended with exit code 7"),
        (EndedJob("FAILED", "1:0", "n"), ""),  # also if it could not write the record
    ],
)
def test_a_script_that_becomes_another_program(
    unstarted: Path, ended: EndedJob, reason: str
) -> None:
    ending = slurm_endings.reason(unstarted, ended, Path("/nonexistent"))
    assert ending == (Ending("failed", reason) if reason else None)


@pytest.mark.usefixtures("silent_slurm")
def test_an_error_of_a_passing_kind_is_an_interruption(attempt: Path) -> None:
    EventWriter(attempt, 0).write("error", type="OSError", message=f"[Errno 28] {FULL}")
    record = close(attempt, ScriptEnd(1))
    assert (record.status, record.interrupted) == ("failed", True)


@pytest.mark.usefixtures("silent_slurm")
def test_a_signal_after_the_last_event_changes_nothing(attempt: Path) -> None:
    for rank in range(2):
        EventWriter(attempt, rank).write("done")
    assert close(attempt, ScriptEnd(0, "TERM")).status == "ok"
