"""What becomes of submitted points, by the submissions on disk and the queue, without a Slurm."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch.slurm import submissions as slurm_jobs
from benchmarks.launch.slurm.client import UNSEEN, EndedJob, QueuedJob, SlurmError, queued_jobs
from benchmarks.launch.slurm.endings import ScriptEnd, close
from benchmarks.launch.slurm.submissions import close_ended, underway, unreported
from tests.unit.slurm_attempts import (
    HERE,
    RUNNING,
    silent_for,
    submitted,
    view_of,
)


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
