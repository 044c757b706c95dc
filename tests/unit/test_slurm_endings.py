"""What becomes of submitted points, without a Slurm: words, signals, absences, other clusters."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch.finish import Ending
from benchmarks.launch.points import Point, freeze
from benchmarks.launch.slurm import attempt as slurm_attempt
from benchmarks.launch.slurm import jobs as slurm_jobs
from benchmarks.launch.slurm.attempt import ScriptEnd, close
from benchmarks.launch.slurm.client import (
    UNSEEN,
    ClusterFacts,
    EndedJob,
    QueuedJob,
    queued_jobs,
)
from benchmarks.launch.slurm.command import SlurmError
from benchmarks.launch.slurm.jobs import close_ended, underway, unreported
from benchmarks.launch.slurm.reasons import ending_by_state
from benchmarks.launch.slurm.submissions import Submission, SubmittedArray
from benchmarks.launch.slurm.view import View, read_view
from benchmarks.records.rank_events import EventWriter
from benchmarks.records.record import read_record
from tests.unit.toy_spec import spec_of

HERE = ClusterFacts("here@head")
RUNNING = QueuedJob(
    job="7_0", key="sweep-0_0", state="RUNNING", reason="None", nodes="node7", time_left="9:00"
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


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """Two ranks, of which each measured one step; nothing ended it yet."""
    spec = spec_of(num_gpus=2)
    directory = tmp_path / spec.spec_id / "slurm-7_0-0"
    directory.mkdir(parents=True)
    freeze(Point(spec, None, ""), directory, "slurm")
    slurm = {"job": "7_0", "job_id": 8, "restart": 0, "nodes": "node7", "key": "sweep-0_0"}
    slurm |= {"time_limit": "9:00", "grace_s": 60, "log": str(tmp_path / "a.log")}
    (directory / "slurm.json").write_text(json.dumps(slurm))
    for rank in range(2):
        EventWriter(directory, rank).write("step", index=0, seconds=1.0, loss=5.0)
    return directory


def silent_for(attempt: Path, seconds: float) -> None:
    """Nothing in the attempt was written for so long."""
    then = time.time() - seconds
    for path in (*attempt.glob("*"), attempt):
        os.utime(path, (then, then))


@pytest.fixture
def silent_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_attempt, "last_ending", lambda job, timeout_s: None)
    monkeypatch.setattr(slurm_attempt, "time_limit_s", lambda job, timeout_s: None)


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
        (
            ScriptEnd(1, "TERM"),
            "",
            {},
            Ending(
                "failed",
                "the script was sent SIGTERM, sent by hand or by a tool of the site "
                "(Slurm does not answer)",
                True,
            ),
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


def submitted(attempt: Path, job: str, **who: Any) -> Submission:
    """The submission that the attempt came of."""
    runs, spec_id = attempt.parents[1], attempt.parent.name
    directory = runs / "slurm" / "sweep"
    frozen = directory / "specs" / spec_id
    frozen.mkdir(parents=True)
    for name in ("spec.json", "attempt.json"):
        (frozen / name).write_text((attempt / name).read_text())
    submission = Submission(
        directory=directory,
        arrays=[SubmittedArray(name="sweep-0", spec_ids=[spec_id], job=job)],
        **who,
    )
    submission.write()
    return submission


def view_of(attempt: Path, *queued: QueuedJob) -> View:
    """What a look at the folder and a queue with these jobs gives."""
    view = read_view(attempt.parents[1])
    view.queued, view.facts = {job.key: job for job in queued}, HERE
    return view


@pytest.mark.parametrize(
    ("queued", "endings", "silent_s", "expected"),
    [
        ([RUNNING], [], 9999, None),
        ([replace(RUNNING, state="SUSPENDED")], [], 9999, None),
        ([replace(RUNNING, state="PENDING")], [EndedJob("PREEMPTED", "0:0", "n")], 0, "preempted"),
        ([], [EndedJob("NODE_FAIL", "0:0", "node7")], 0, "lost"),
        ([], [], 10, None),  # no accounting, and its script spoke a moment ago
        ([], [], 1000, "lost"),
        ([], [EndedJob("RUNNING", "0:0", "node7")], 10, None),  # accounting lags behind
        ([], [EndedJob("FAILED", "0:9", "node7")], 0, "failed"),  # the script was killed
    ],
)
def test_attempts_without_a_record_are_closed_once_their_job_is_gone(
    attempt: Path,
    monkeypatch: pytest.MonkeyPatch,
    queued: list[QueuedJob],
    endings: list[EndedJob],
    silent_s: float,
    expected: str | None,
) -> None:
    submitted(attempt, "7")
    silent_for(attempt, silent_s)
    monkeypatch.setattr(slurm_jobs, "endings", lambda jobs: {"7_0": endings} if endings else {})
    closed = close_ended(view_of(attempt, *queued))
    assert [record.status for record in closed] == ([expected] if expected else [])
    assert all(record.interrupted and record.step_s == [1.0] for record in closed)
    assert close_ended(view_of(attempt, *queued)) == []
    alive = view_of(attempt, *queued)
    assert bool(underway(alive)) == (bool(queued) or expected is None)


@pytest.mark.parametrize("who", [{"cluster": "there@head"}, {"user": 12345}])
def test_what_cannot_be_seen_from_here_is_alive(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, who: dict[str, Any]
) -> None:
    """Another cluster on the same file system, or another user whose jobs may be hidden."""
    submitted(attempt, "7", **{"cluster": HERE.identity, "user": 0, "host": "login2"} | who)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    told = {"7_0": [EndedJob("RUNNING", "0:0", "n")]}
    monkeypatch.setattr(slurm_jobs, "endings", lambda jobs: told if jobs else {})
    silent_for(attempt, 300)
    assert close_ended(view_of(attempt)) == []
    (job,) = underway(view_of(attempt)).values()
    assert job.state == UNSEEN
    assert "login2" in job.reason
    silent_for(attempt, 2000)
    assert [record.status for record in close_ended(view_of(attempt))] == ["lost"]


def test_job_numbers_of_another_cluster_are_not_asked_here(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(attempt, "7", cluster="there@head", user=os.getuid())
    silent_for(attempt, 300)
    other = {"7_0": [EndedJob("COMPLETED", "0:0", "n")]}
    monkeypatch.setattr(slurm_jobs, "endings", lambda jobs: other if jobs else {})
    assert close_ended(view_of(attempt)) == []


def test_a_job_that_starts_and_ends_between_two_reads(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(attempt, "7")
    hidden = attempt.with_name(".elsewhere")
    attempt.rename(hidden)
    view = view_of(attempt)  # the folder was read before the job began,
    hidden.rename(attempt)  # the queue after it had ended
    monkeypatch.setattr(
        slurm_jobs, "endings", lambda jobs: {"7_0": [EndedJob("NODE_FAIL", "", "")]}
    )
    assert [record.status for record in close_ended(view)] == ["lost"]
    assert [path.name for path in attempt.parent.iterdir()] == [attempt.name]


def test_a_job_without_an_id_is_found_by_its_name(attempt: Path) -> None:
    submitted(attempt, "")
    assert underway(view_of(attempt, RUNNING)) == {attempt.parent.name: RUNNING}


def test_a_submission_whose_report_job_is_missing(attempt: Path) -> None:
    submission = submitted(attempt, "7")
    assert [found.name for found in unreported(view_of(attempt, RUNNING))] == [submission.name]
    report = replace(RUNNING, key="sweep-report_N/A", state="PENDING")
    assert list(unreported(view_of(attempt, RUNNING, report))) == []
    assert list(unreported(view_of(attempt))) == []


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize(("elapsed_s", "is_underway"), [(485.0, False), (40.0, True)])
def test_a_job_that_only_has_to_leave_the_queue(
    attempt: Path, elapsed_s: float, is_underway: bool
) -> None:
    submitted(attempt, "7")
    close(attempt, ScriptEnd(5, "USR1", elapsed_s=elapsed_s))  # at its limit, or preempted
    found = underway(view_of(attempt, RUNNING))
    assert set(found) == ({attempt.parent.name} if is_underway else set())


def test_a_missing_slurm_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SlurmError, match="squeue: not found; is this a login node"):
        queued_jobs(["sweep-0"])
