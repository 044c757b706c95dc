"""Sweeps that a script can trust, on a real Slurm: they wait, end with a status, run points several
times, can be cancelled by key, and do not double what a cached queue hides."""

from __future__ import annotations

import os

import pytest

from tests.slurm.commands import call
from tests.slurm.conftest import TOGETHER, Suite

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(590), *TOGETHER]


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
    folder = suite.directory / "bin"
    folder.mkdir(parents=True)
    (folder / "squeue").write_text("#!/usr/bin/env bash\nexit 0\n")  # as it was before
    (folder / "squeue").chmod(0o755)
    held = ("seed=0,10", "+launcher.sbatch.hold=true")
    suite.stand_in(*held)
    suite.environment["PATH"] = f"{folder}:{os.environ['PATH']}"
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
