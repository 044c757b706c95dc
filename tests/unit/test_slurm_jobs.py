"""What becomes of submitted points, by the submissions on disk and the queue, without a Slurm."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch import local
from benchmarks.launch.attempt import ALIVE, Ending, finish_attempt, keep_alive, last_words
from benchmarks.launch.slurm import client, submissions, submit
from benchmarks.launch.slurm import endings as slurm_endings
from benchmarks.launch.slurm.client import EndedJob, NoAnswerError, QueuedJob, SlurmError
from benchmarks.launch.slurm.endings import ScriptEnd, close, ending_by_state
from benchmarks.launch.slurm.submissions import (
    Submission,
    SubmittedArray,
    attempt_name,
    close_ended,
    query_slurm,
    write_submission,
)
from benchmarks.records.events import EventWriter
from tests.unit.conftest import HERE, RUNNING, silent_for, submitted, view_of


@pytest.fixture
def waiting(attempt: Path) -> Path:
    """The attempt that a submitted job will make."""
    submitted(attempt, "7", cluster=HERE.identity)
    shutil.rmtree(attempt)
    return attempt


def let_end(monkeypatch: pytest.MonkeyPatch, *ended: EndedJob) -> None:
    """Let accounting know these endings of the task, or nothing."""
    known = {"7_0": [*ended]} if ended else {}
    monkeypatch.setattr(submissions, "endings", lambda jobs: known)


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
    let_end(monkeypatch, *endings)
    closed = close_ended(view_of(attempt, *queued))
    assert [record.status for record in closed] == ([expected] if expected else [])
    assert all(record.interrupted and record.step_s == [1.0] for record in closed)
    assert close_ended(view_of(attempt, *queued)) == []
    assert bool(view_of(attempt, *queued).under_way()) == (bool(queued) or expected is None)


@pytest.mark.parametrize("who", [{"cluster": "there@head"}, {"user": 12345}])
def test_what_cannot_be_seen_from_here_is_alive(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, who: dict[str, Any]
) -> None:
    """Another cluster on the same file system, or another user whose jobs may be hidden."""
    submitter = {"cluster": HERE.identity, "user": 1000, "host": "login2"} | who
    submitted(attempt, "7", sweep="sweep", **submitter)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    let_end(monkeypatch)
    silent_for(attempt, 9999)
    assert close_ended(view_of(attempt)) == []
    (line,) = view_of(attempt).under_way().values()
    assert "from login2, unseen from here: ask there, or remove " in line


def test_an_older_attempt_that_is_alive_counts_beside_a_newer_record(attempt: Path) -> None:
    submitted(attempt, "7", cluster=HERE.identity)
    submitted(attempt, "8", sweep="later", cluster=HERE.identity)
    assert [*view_of(attempt).under_way().values()] == [
        "slurm-sweep-0 is alive, and has no record yet"
    ]
    newer = attempt.with_name("slurm-later-0")
    shutil.copytree(attempt, newer)
    finish_attempt(newer, Ending("failed", "the script was killed", interrupted=True))
    assert list(view_of(attempt).under_way()) == [attempt.parent.name]
    silent_for(attempt, 300)
    assert view_of(attempt).under_way() == {}


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_local_sweep_leaves_alone_what_slurm_has(
    waiting: Path, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:

    def call(*command: str, timeout_s: float = 0, more: object = None) -> str:
        if not is_answered:
            raise SlurmError("scontrol: Unable to contact slurm controller")
        return "7_0|PENDING|Priority||9:00\n" if "--array" in command else ""

    monkeypatch.setattr(client, "call", call)
    (line,) = local.settle(waiting.parents[1]).values()
    assert ("job 7_0 is pending" if is_answered else "unseen from here") in line


def test_a_submission_leaves_alone_what_a_local_sweep_measures(attempt: Path) -> None:
    running = attempt.with_name("local-20260101T000000-000000")
    with keep_alive(attempt.rename(running) / ALIVE):
        settled = submit.settle(attempt.parents[1])
        assert settled == {attempt.parent.name: f"{running.name} is alive, and has no record yet"}
    assert submit.settle(attempt.parents[1]) == {}


def test_job_numbers_of_another_cluster_are_not_asked_here(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(attempt, "7", cluster="there@head", user=os.getuid())
    silent_for(attempt, 300)
    other = {"7_0": [EndedJob("COMPLETED", "0:0", "n")]}
    monkeypatch.setattr(submissions, "endings", lambda jobs: other if jobs else {})
    assert close_ended(view_of(attempt)) == []


def test_a_job_that_starts_and_ends_between_two_reads(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(attempt, "7")
    hidden = attempt.with_name(".elsewhere")
    attempt.rename(hidden)
    view = view_of(attempt)  # the folder was read before the job began,
    hidden.rename(attempt)  # the queue after it had ended
    let_end(monkeypatch, EndedJob("NODE_FAIL", "", ""))
    assert [record.status for record in close_ended(view)] == ["lost"]
    assert [path.name for path in attempt.parent.iterdir()] == [attempt.name]


def test_a_job_without_an_id_is_found_by_its_name_and_a_renamed_one_by_its_id(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(attempt, "")

    def call(*command: str, timeout_s: float = 0, more: object = None) -> str:
        if "--name=sweep-0" in command:
            return "7\n"
        return "7_0|RUNNING|None|node7|9:00\n" if "--array" in command else "ClusterName = c\n"

    monkeypatch.setattr(client, "call", call)
    view = query_slurm(attempt.parents[1])
    assert view.under_way() == {attempt.parent.name: "job 7_0 is running"}
    assert view_of(attempt, RUNNING).under_way()  # the id was kept


def test_a_job_that_never_began_says_why(waiting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for exit_code, words in (("0:53", "folder cannot be opened"), ("1:0", "before its script")):
        let_end(monkeypatch, EndedJob("FAILED", exit_code, "n"))
        (record,) = close_ended(view_of(waiting))
        assert words in record.reason
        assert record.interrupted
        shutil.rmtree(waiting.parent)


def test_a_job_number_that_comes_again_does_not_reach_the_older_attempt(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that lost its state counts from the beginning."""
    spec_id, before = attempt.parent.name, (attempt / "rank_000.jsonl").read_bytes()
    again = submitted(attempt, "7", sweep="zeropp-later")
    (point,) = view_of(attempt).points
    assert (point.job, point.attempts()) == ("7_0", [])
    let_end(monkeypatch, EndedJob("FAILED", "1:0", "n"))
    (record,) = close_ended(view_of(attempt))
    assert record.record_id == f"{spec_id}/{attempt_name(again)}-0" == f"{spec_id}/slurm-later-0"
    assert [path.name for path in attempt.parent.glob("*/record.json")] == ["record.json"]
    assert not (attempt / "record.json").exists()
    assert (attempt / "rank_000.jsonl").read_bytes() == before


def test_an_emptied_attempt_is_an_interruption(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(attempt, "7")
    for path in attempt.iterdir():
        path.unlink()
    let_end(monkeypatch, EndedJob("FAILED", "1:0", "n"))
    (record,) = close_ended(view_of(attempt))
    assert (record.status, record.interrupted, record.step_s) == ("failed", True, [])
    assert view_of(attempt).under_way() == {}  # so the same command runs it again


@pytest.mark.parametrize("name", ["spec.json", "attempt.json"])
def test_an_attempt_without_a_frozen_file_is_named_and_runs_again(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    submitted(attempt, "7", cluster=HERE.identity)
    (attempt / name).unlink()
    silent_for(attempt, 1000)
    let_end(monkeypatch, EndedJob("FAILED", "1:0", "n"))
    view = view_of(attempt)
    assert close_ended(view) == []
    assert view.problems == [f"{attempt / name}: no such file or directory"]
    assert view.under_way() == {}


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize("is_removed", [True, False])
def test_a_point_whose_submission_is_damaged_is_left_alone_until_that_is_removed(
    attempt: Path, is_removed: bool
) -> None:
    directory = submitted(attempt, "7")
    (directory / "submission.json").write_text('{"arrays": [')
    silent_for(attempt, 300)
    if is_removed:
        shutil.rmtree(directory)
    assert close_ended(view_of(attempt)) == []
    lines = list(view_of(attempt).under_way().values())
    words = f"{directory / 'submission.json'} is damaged: remove {directory} if its jobs are gone"
    assert lines == [words] * (not is_removed)
    close(attempt, ScriptEnd(1, "TERM"))  # whose job may come again
    lines = list(view_of(attempt).under_way().values())
    assert lines == [words] * (not is_removed)


UNABLE = SlurmError("sbatch: Unable to contact slurm controller (connect failure)")
NO_ID = "sbatch: no job id in its answer 'Submitted, perhaps'"


@pytest.mark.parametrize(
    ("answer", "known", "expected"),
    [
        ("Welcome to the cluster!\nnews: 12\n17\n", UNABLE, "17"),  # a banner is no job id
        ("17;here\n", UNABLE, "17"),
        ("17\nSee you\n", UNABLE, "17"),
        (UNABLE, "17\n", "17"),  # what sbatch does not name is found by its own name
        ("17\n99999\n", "17\n", "17"),
        ("Submitted, perhaps\n", "17\n", "17"),
        ("Submitted, perhaps\n", "", NoAnswerError(NO_ID)),
        (UNABLE, "", UNABLE),  # a refusal, only where Slurm knows no job of the name
        (UNABLE, UNABLE, NoAnswerError(str(UNABLE))),
    ],
)
def test_a_job_is_what_sbatch_says_or_what_has_its_name(
    monkeypatch: pytest.MonkeyPatch, answer: Any, known: Any, expected: Any
) -> None:
    def call(*command: str, **_: object) -> str:
        said = {"sbatch": answer, "squeue": known}.get(command[0], "")
        if isinstance(said, SlurmError):
            raise said
        return said if command[0] == "sbatch" or "--name=a" in command else ""

    monkeypatch.setattr(client, "call", call)
    if isinstance(expected, str):
        assert client.submit(Path("a.sbatch"), []) == expected
        return
    with pytest.raises(SlurmError) as refusal:
        client.submit(Path("a.sbatch"), [])
    assert (type(refusal.value), str(refusal.value)) == (type(expected), str(expected))


def test_a_submission_whose_report_job_is_missing(attempt: Path) -> None:
    directory = submitted(attempt, "7", report_job="8")
    assert [*view_of(attempt, RUNNING).unreported()] == [directory]
    assert view_of(attempt, RUNNING, QueuedJob(job="8", state="PENDING")).unreported() == {}
    assert view_of(attempt).unreported() == {}


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize(("elapsed_s", "is_underway"), [(485.0, False), (40.0, True)])
def test_a_job_that_only_has_to_leave_the_queue(
    attempt: Path, elapsed_s: float, is_underway: bool
) -> None:
    submitted(attempt, "7")
    close(attempt, ScriptEnd(5, "USR1", elapsed_s=elapsed_s))  # at its limit, or preempted
    found = view_of(attempt, RUNNING).under_way()
    assert set(found) == ({attempt.parent.name} if is_underway else set())


@pytest.mark.usefixtures("silent_slurm")
def test_a_signal_while_slurm_does_not_answer_is_run_again_by_the_next_submission(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_endings, "time_limit_s", lambda job, timeout_s: None)
    record = close(attempt, ScriptEnd(5, "USR1", elapsed_s=40))
    assert (record.status, record.interrupted) == ("timeout", True)
    assert "time limit or preemption, Slurm did not say which" in record.reason


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("scontrol: fatal: Could not establish a configuration source", "is in no cluster"),
        ("scontrol: error: Unable to contact slurm controller (connect failure)", ""),
    ],
)
def test_slurm_without_a_configuration_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, words: str
) -> None:
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bool(words) == bool(client.absence())
    assert words in client.absence()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "sbatch: error: You must give an account: -A\n"
            "sbatch: error: Batch job submission failed: Unspecified error",
            "sbatch: You must give an account: -A; Batch job submission failed: Unspecified error",
        ),
        (
            "sbatch: unrecognized option '--foo-bar=1'\nTry \"sbatch --help\" for more information",
            "sbatch: unrecognized option '--foo-bar=1'",
        ),
        ("sbatch: error: a\n\nsbatch: error: a\nsbatch: error: b", "sbatch: a; b"),
        ("", "sbatch: exit 3"),
    ],
)
def test_a_refusal_says_what_the_site_said(
    said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "said").write_text(said)
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/said >&2\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError) as refused:
        client.call("sbatch")
    assert str(refused.value) == told


def test_a_missing_slurm_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SlurmError, match="squeue: not found; is this a login node"):
        client.queued_jobs([0])


@pytest.mark.parametrize("sweep", ["sweep", "zeropp+gpt_1.5b-20261127T084240-3b8a"])
def test_a_second_run_of_a_point_is_its_submissions_and_no_orphan(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, sweep: str
) -> None:
    directory = submitted(attempt, "7", sweep=sweep)
    name, spec_id = attempt_name(directory), attempt.parent.name
    first, second = (attempt.parent / f"{name}{end}-0" for end in ("", ".1"))
    shutil.copytree(attempt, second)
    attempt.rename(first)
    names, ids = [name, f"{name}.1"], [spec_id, spec_id]
    array = SubmittedArray(name=f"{sweep}-0", spec_ids=ids, job="7", attempts=names)
    write_submission(directory, Submission(arrays=[array], user=os.getuid()))
    for folder in (first, second):
        silent_for(folder, 1000)
    let_end(monkeypatch)
    view = view_of(first, replace(RUNNING, job="7_1"))
    assert [point.attempts() for point in view.points] == [[first], [second]]
    assert view.latest[spec_id].job == "7_1"  # the one that runs
    assert [r.record_id for r in close_ended(view)] == [f"{spec_id}/{first.name}"]
    assert spec_id in view.under_way()


ARRAY = "JobId=7 ArrayTaskId=0,2 JobState=PENDING Reason=JobHeldUser ExitCode=0:0"


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ({"7_1": "JobId=9 ArrayTaskId=1 JobState=PENDING Reason=Priority"}, "PENDING"),
        ({"7_1": "JobId=9 ArrayTaskId=1 JobState=COMPLETED"}, ""),
        ({"7": ARRAY}, ""),  # of the tasks that wait; this one was cancelled
        ({"7": ARRAY.replace("PENDING", "CANCELLED")}, ""),
        ({}, ""),
    ],
)
def test_what_the_controller_knows_of_a_task_that_the_queue_does_not_list(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, str], state: str
) -> None:
    def call(*words: str, **_: Any) -> str:
        if words[-1] not in answers:
            raise SlurmError("scontrol: Invalid job id specified")
        return answers[words[-1]]

    monkeypatch.setattr(client, "call", call)
    job = client.known_to_controller("7_1")
    assert (job.state if job else "") == state
    assert (client.last_state("7_1") is None) == (not answers or (answers.get("7") == ARRAY))


def test_waiting_points_are_not_submitted_again_where_squeue_is_late(
    waiting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = QueuedJob(job="7_0", state="PENDING", reason="Priority")
    monkeypatch.setattr(submissions, "cluster_facts", lambda: HERE)
    monkeypatch.setattr(submissions, "queued_jobs", lambda users: {})
    monkeypatch.setattr(submissions, "known_to_controller", {"7_0": waits}.get)
    assert list(query_slurm(waiting.parents[1]).under_way()) == [waiting.parent.name]
    monkeypatch.setattr(submissions, "known_to_controller", {}.get)
    assert query_slurm(waiting.parents[1]).under_way() == {}


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (
            EndedJob("FAILED", "1:0", "", reason="BadConstraints"),
            "Slurm: BadConstraints: no node has what the job asks for",
        ),
        (None, "ended before its script began (Slurm: FAILED, exit code 1:0)"),
    ],
)
def test_what_no_node_has_is_named_by_the_controller(
    waiting: Path, monkeypatch: pytest.MonkeyPatch, now: EndedJob | None, reason: str
) -> None:
    let_end(monkeypatch, EndedJob("FAILED", "1:0", "None assigned"))
    monkeypatch.setattr(submissions, "last_state", lambda job: now)
    (record,) = close_ended(view_of(waiting))
    assert record.reason.startswith(reason)
    assert record.interrupted


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
    assert (record.step_s, record.slurm["job"]) == ([1.0], "7_0")


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
        (ScriptEnd(1), "srun.log", "srun: error: n: Job credential revoked", BEFORE, True),
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
    after += "slurmstepd: error: Unable to unlink domain socket\n" if line else ""
    (place / file).write_text(f"loading\n{line}\n{after}" if line else after)
    record = close(unstarted, end)
    assert (record.status, record.reason) == ("failed", reason + line)
    assert record.interrupted == interrupted


def test_all_that_srun_says_is_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "srun.log"
    first, last = "srun: error: spank: no quota left", "srun: error: Plug-in initialization failed"
    log.write_text(f"loading modules\n{first}\n{last}\n")
    assert last_words(log) == f"{first}; {last}"
    log.write_text(f"{first}\nTraceback\nValueError: x\n")
    assert last_words(log) == "ValueError: x"


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
