"""Submitting on a real Slurm: twice at once, interrupted at any moment, answers that get lost; and
sweeps that a script can trust: they wait, end with a status, run points several times, can be
cancelled by key, and do not double what a cached queue hides.

Programs such as ``sbatch`` are shell scripts here, before the real ones on the PATH: they are slow,
or lose their answer.
"""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from tests.slurm.commands import call
from tests.slurm.conftest import TOGETHER, Suite
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(590), *TOGETHER]

HELD = ("seed=0", "+launcher.sbatch.hold=true")  # this job waits for ever


def stand_before(suite: Suite, program: str, script: str) -> None:
    """Put a script before a program; ``$real`` is that program."""
    folder = suite.directory / "bin"
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / program
    path.write_text(f"#!/usr/bin/env bash\nreal={shutil.which(program)}\n{script}\n")
    path.chmod(0o755)
    suite.environment["PATH"] = f"{folder}:{os.environ['PATH']}"


def test_twice_at_once_with_a_slow_sbatch(suite: Suite) -> None:
    go = suite.directory / "go"
    stand_before(suite, "sbatch", f'until [ -e {go} ]; do sleep 0.1; done; exec "$real" "$@"')
    both = [suite.start(*HELD), suite.start(*HELD)]
    waits = "waiting for another process"
    wait_until(lambda: any(waits in command.printed for command in both), "one of them to wait")
    go.touch()
    assert [command.wait() for command in both] == [0, 0], [c.printed for c in both]
    assert len(suite.queue()) == 1
    for words in ("left alone", "0 of 1 points to run", waits):
        assert sum(command.printed.count(words) for command in both) == 1
    assert len(list(suite.runs.glob("slurm/*/submission.json"))) == 1


# Where a submission is interrupted: while this program works, on the call that has these words.
STAGES = {
    "copying the checkout": ("git", "clone", ("launcher.snapshot=true",)),
    "submitting the points": ("sbatch", "-0.sbatch", ()),
    "submitting the second array": ("sbatch", "-1.sbatch", ("num_gpus=2,4",)),
    "submitting the report job": ("sbatch", "-report.sbatch", ()),
    "looking into the queue": ("squeue", "--array", ()),
}


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("copying the checkout", signal.SIGINT),
        ("copying the checkout", signal.SIGKILL),
        ("looking into the queue", signal.SIGINT),
        ("submitting the second array", signal.SIGINT),
        ("submitting the points", signal.SIGKILL),
        ("submitting the report job", signal.SIGKILL),
    ],
)
def test_interrupted_while_submitting(suite: Suite, stage: str, number: signal.Signals) -> None:
    program, words, more = STAGES[stage]
    asked = (*HELD, "global_batch=8", *more)
    points = 2 if "num_gpus=2,4" in more else 1
    if program == "squeue":  # asked only where something was submitted before
        suite.stand_in("seed=10", *asked[1:])
    began, go, over = (suite.directory / name for name in ("began", "go", "over"))
    slow = f"touch {began}; until [ -e {go} ]; do sleep 0.1; done; touch {over}"
    stand_before(suite, program, f'case "$*" in *"{words}"*) {slow};; esac; exec "$real" "$@"')
    command = suite.start(*asked)
    wait_until(began.exists, f"a call of {program}")
    os.kill(command.pid, number)
    assert command.wait() != 0
    assert "Traceback" not in command.printed
    go.touch()
    time.sleep(2)  # a program that outlived its launcher would go on now
    assert not over.exists()
    suite.environment.clear()
    suite.stand_in(*asked)
    points += program == "squeue"
    assert (len(suite.queue()), suite.states()) == (points, ["waiting"] * points)


def test_interrupted_while_it_waits_for_another_submission(suite: Suite) -> None:
    go = suite.directory / "go"
    stand_before(suite, "sbatch", f'until [ -e {go} ]; do sleep 0.2; done; exec "$real" "$@"')
    first = suite.start(*HELD)
    wait_until((suite.runs / ".lock").exists, "the lock of the first")
    second = suite.start(*HELD)
    wait_until(lambda: "waiting for another process" in second.printed, "the second to wait")
    os.kill(second.pid, signal.SIGINT)
    assert second.wait() == 130
    go.touch()
    assert (first.wait(), len(suite.queue())) == (0, 1)


def test_what_sbatch_says_after_it_has_submitted_is_not_believed(suite: Suite) -> None:
    stand_before(suite, "sbatch", '"$real" "$@" >/dev/null; echo "connect failure" >&2; exit 1')
    assert "submitted   job " in suite.stand_in(*HELD)
    stand_before(suite, "sbatch", '"$real" "$@"; echo 99999')
    assert "submitted   job " in suite.stand_in("seed=10", *HELD[1:])
    suite.environment.clear()
    assert suite.states() == ["waiting", "waiting"]
    assert "0 of 2 points to run" in suite.stand_in("seed=0,10", *HELD[1:])
    assert len(suite.queue()) == 2


def test_a_lost_answer_and_a_lost_report_job(suite: Suite) -> None:
    lost = '"$real" "$@" >/dev/null; echo "sbatch: error: Socket timed out" >&2; exit 1'
    stand_before(suite, "sbatch", lost)
    suite.stand_in(*HELD)
    suite.environment.clear()
    assert (len(suite.queue()), suite.stand_in(*HELD).count("left alone")) == (1, 1)
    suite.cluster.run("scancel", *suite.report_jobs())
    wait_until(lambda: not suite.report_jobs(), "the end of the report job")
    assert "report      job " in suite.stand_in(*HELD)
    wait_until(lambda: len(suite.report_jobs()) == 1, "the new report job")
    assert "report      job " not in suite.stand_in(*HELD)


def test_a_local_run_leaves_alone_what_waits_in_the_queue(suite: Suite) -> None:
    suite.stand_in(*HELD)
    here = ["launcher=local" if word == "launcher=slurm" else word for word in suite.words(*HELD)]
    here = [word for word in here if word.lstrip("+").partition(".")[0] != "launcher"]
    command = call("benchmarks.run", here, suite.variables)
    assert command.returncode == 0, command.printed
    assert "0 of 1 points to run with launcher=local, 1 under way" in command.printed
    assert suite.states() == ["waiting"]


def test_odd_paths_comments_setups_and_neighbours(suite: Suite) -> None:
    odd = Suite(suite.cluster, suite.directory / "a folder, with 100% (odd) 'characters'")
    setup = "launcher.setup=['yes | head -n 1 >/dev/null']"  # ends with the status of head
    comment = '+launcher.sbatch.comment="two words"'
    odd.stand_in("seed=3,0", comment, setup, "+launcher.sbatch.nodelist=zpnode5")
    odd.wait_for_states(["ok", "running"])
    assert len(list(odd.runs.glob("slurm/*/*-0-1.log"))) == 1
    record = odd.only_record()
    odd.cluster.run("scancel", *odd.queue())
    assert len(record.slurm["neighbours"]) >= 1  # who was beside the point
    assert str(record.slurm["job_id"]) not in record.slurm["neighbours"]


def test_every_rank_sees_the_gpus_of_its_node(suite: Suite) -> None:
    gpus = ("cluster=a100", "cluster.gpus_per_node=4", "data=synthetic", "num_gpus=4")
    suite.stand_in(*gpus, "launcher.gpu_flag=gpus-per-task", "seed=0", "global_batch=8")
    (record,) = suite.wait_for_records(1)
    assert record.status == "ok"
    seen = [rank.environment["code"]["CUDA_VISIBLE_DEVICES"] for rank in record.ranks]
    assert seen == ["0,1,2,3"] * 4, record.slurm


def test_chained_arrays_wait_for_each_other(suite: Suite) -> None:
    sizes = ("num_gpus=2,4", "cluster.gpus_per_node=4", "launcher.chain=true")
    suite.stand_in(*sizes, "seed=0", "+launcher.sbatch.hold=true", "global_batch=8")
    waits = dict(job for job in suite.jobs() if "_" in job[0])
    first, second = sorted(waits, key=lambda job: int(job.partition("_")[0]))
    assert waits[first] == "(null)"
    assert waits[second].startswith(f"afterany:{first.partition('_')[0]}_")


def test_a_sweep_that_waits_ends_with_its_status_and_its_report(suite: Suite) -> None:
    printed = suite.stand_in("seed=0,1", "launcher.wait=true", expect=1)
    assert suite.states() == ["failed", "ok"]
    assert "token 999 is not in the vocabulary" in printed
    assert suite.report_jobs() == []  # whoever waits writes it
    assert (suite.report / "report.html").exists()
    assert "0 of 2 points to run" in suite.stand_in("seed=0,1", "launcher.wait=true", expect=1)
    assert "0 of 1 points to run" in suite.stand_in("seed=0", "launcher.wait=true", expect=0)
    check = call("benchmarks.status", [str(suite.runs), "seed=0", "--check"], suite.variables)
    assert check.returncode == 0, check.printed
    check = call("benchmarks.status", [str(suite.runs), "--check"], suite.variables)
    assert (check.returncode, "seed=1" in check.printed) == (1, True)


def test_repeats_are_tasks_of_their_own(suite: Suite) -> None:
    printed = suite.stand_in("seed=0,10", "repeats=2", "launcher.wait=true")
    assert "2 of 2 points to run with launcher=slurm, 4 runs in all" in printed
    records = suite.records()
    assert [record.status for record in records] == ["ok"] * 4
    assert len({record.slurm["job"] for record in records}) == 4
    assert len({record.record_id for record in records}) == 4
    assert "0 of 2 points to run" in suite.stand_in("seed=0,10", "repeats=2")
    assert "1 of 1 points to run" in suite.stand_in("seed=0", "repeats=3", "launcher.wait=true")
    assert len(suite.records()) == 5


def test_jobs_are_cancelled_by_key_and_have_the_name_of_their_sweep(suite: Suite) -> None:
    suite.stand_in("seed=0,10", "+launcher.sbatch.hold=true", "launcher.name=mine", "repeats=2")
    names = suite.cluster.run("squeue", "--noheader", "--array", "--format=%j").split()
    assert sum(name.startswith("mine-") for name in names) == 5  # four points and a report
    done = call("benchmarks.cancel", [str(suite.runs), "seed=10"], suite.variables)
    assert (done.returncode, done.stdout) == (0, "2 jobs cancelled\n")
    assert suite.states()[-1] == "waiting"
    call("benchmarks.cancel", [str(suite.runs)], suite.variables)
    suite.wait_until_idle()
    assert all("CANCELLED" in row.detail for row in suite.status().values())


def test_what_ended_from_outside_is_tried_again_but_not_for_ever(suite: Suite) -> None:
    """``srun`` says that a node failed, as a node would."""
    setup = "launcher.setup=['echo connection timed out: node failure >&2; exit 1']"
    printed = suite.stand_in("seed=0", setup, "retries=1", "launcher.wait=true", expect=1)
    assert printed.count("1 of 1 points to run") == 2
    assert [record.interrupted for record in suite.records()] == [True, True]


def test_a_queue_that_answers_from_a_cache_doubles_nothing(suite: Suite) -> None:
    held = ("seed=0,10", "+launcher.sbatch.hold=true")
    suite.stand_in(*held)
    stand_before(suite, "squeue", "exit 0")  # the queue as it was before
    assert "0 of 2 points to run with launcher=slurm, 2 under way" in suite.stand_in(*held)
    assert suite.states() == ["waiting", "waiting"]
    suite.environment.clear()
    assert len(suite.queue()) == 2


def test_tasks_per_node_may_be_forbidden_and_odd_sizes_are_infeasible(suite: Suite) -> None:
    sizes = ("num_gpus=4,5", "cluster.gpus_per_node=2", "global_batch=20", "seed=0")
    forbidden = "+launcher.sbatch.ntasks-per-node=false"
    printed = suite.stand_in(*sizes, forbidden, "launcher.wait=true")
    assert "num_gpus=5: must be a multiple of the 3 nodes" in printed
    assert suite.states() == ["infeasible", "ok"]
    (script,) = suite.runs.glob("slurm/*/*-0.sbatch")
    flags = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --ntasks=4" in flags
    assert not [flag for flag in flags if "per-node=" in flag]
    record = next(record for record in suite.records() if record.status == "ok")
    assert "[" in record.slurm["nodes"]  # two of them


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["launcher.setup=['true', 'false']"], "in setup (false): ended with exit code 1"),
        (
            ["launcher.setup=['no_such_command_52']"],
            "no_such_command_52: command not found",
        ),
        (
            ["+launcher.srun.container-image=/images/x.sqsh"],
            "unrecognized option '--container-image=/images/x.sqsh'",
        ),
    ],
)
def test_the_cause_is_told_and_not_the_last_line(
    suite: Suite, words: list[str], reason: str
) -> None:
    suite.stand_in("seed=0", *words, "launcher.wait=true", expect=1)
    told = suite.only_record().reason
    assert reason in told, told


def test_resources_that_no_node_has_are_named(suite: Suite) -> None:
    gpus = ("cluster=a100", "cluster.gpus_per_node=8", "data=synthetic", "num_gpus=8")
    printed = suite.stand_in(*gpus, "seed=0", "global_batch=16", "launcher.wait=true", expect=1)
    assert "Slurm: BadConstraints: no node has what the job asks for" in printed
