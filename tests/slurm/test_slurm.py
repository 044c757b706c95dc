"""Sweeps on a real Slurm: every way in which a point can end, and what a second call does. A user's
own loop under Slurm's ``--signal`` saves before its time is up, and goes on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from tests.slurm.conftest import FIRST, TOGETHER, Suite
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(590), *TOGETHER]

REAL = (  # ranks with all of the engine, on one node and on two
    *("model=gpt_tiny", "num_gpus=1,2", "cluster.gpus_per_node=1", "global_batch=8"),
    *("contender=zeropp", "measure.warmup_steps=1", "measure.steps=2"),
    *("measure.gate=false", "measure.timeline=false"),
)


@FIRST
def test_sweep_of_real_ranks_over_nodes(suite: Suite) -> None:
    suite.sweep(*REAL)
    wait_until(lambda: "report.html (and" in _report_log(suite), "the report of the sweep")
    records = suite.records()
    assert [r.status for r in records] == ["ok"] * 2, [r.reason for r in records]
    assert all(len(r.step_s) == 2 for r in records)
    sizes = {(r.spec["num_gpus"], _node_count(r.slurm["nodes"])) for r in records}
    assert sizes == {(1, 1), (2, 2)}
    assert len({r.slurm["job_id"] for r in records}) == 2  # nothing ran twice
    losses = [r.losses[-1] for r in records]  # the same batches, however they were divided
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-4)
    assert "2 ok" in _report_log(suite)  # none of them was still under way
    assert list(suite.report.glob("throughput.*"))
    assert "0 of 2 points to run" in suite.sweep(*REAL)


def _node_count(nodes: str) -> int:
    """``zpnode0`` or ``zpnode[0-3]``."""
    first, _, last = nodes.partition("[")[2].rstrip("]").partition("-")
    return int(last) - int(first) + 1 if last else 1


def _report_log(suite: Suite) -> str:
    return "".join(path.read_text() for path in suite.runs.glob("slurm/*/*-report.log"))


def test_a_point_that_hangs_has_the_time_that_was_asked_for(suite: Suite) -> None:
    suite.stand_in("seed=3", "measure.timeout_s=60")
    (record,) = suite.wait_for_records(1)
    assert (record.status, record.interrupted) == ("timeout", False)
    assert record.reason.startswith("not finished after measure.timeout_s=60; steps done: ")
    assert len(record.step_s) > 0


def test_dry_run_prints_scripts_and_submits_nothing(suite: Suite) -> None:
    printed = suite.stand_in("seed=0,10", "launcher.dry_run=true")
    assert "#SBATCH --array=0-1" in printed
    assert "benchmarks.report" in printed
    assert suite.jobs() == []
    assert not suite.runs.exists()


def test_a_point_that_raises(suite: Suite) -> None:
    suite.stand_in("seed=1,0")
    suite.wait_for_records(2)
    failed = next(r for r in suite.records() if r.status != "ok")
    assert (failed.status, failed.interrupted) == ("failed", False)
    assert failed.reason == "rank 1: ValueError: token 999 is not in the vocabulary"
    assert len(failed.step_s) == 3  # what was measured is kept
    assert suite.states() == ["failed", "ok"]
    assert "0 of 2 points to run" in suite.stand_in("seed=1,0", expect=1)
    (suite.directory / "calm").touch()
    suite.wait_until_idle()  # while a job leaves its node, its point counts as queued
    assert "1 of 2 points to run" in suite.stand_in("seed=1,0", "rerun=failed")
    suite.wait_for_records(3)
    assert suite.states() == ["ok", "ok"]


def test_a_point_over_its_memory(suite: Suite) -> None:
    suite.stand_in("seed=2", "launcher.sbatch.mem=300")
    suite.wait_for_records(1)
    record = suite.only_record()
    assert (record.status, len(record.step_s), suite.states()) == ("oom", 3, ["oom"])
    assert "memory limit" in record.reason


def test_a_bad_account_is_refused_at_submit(suite: Suite) -> None:
    printed = suite.stand_in("seed=0", "launcher.sbatch.account=nobody", expect=1)
    assert "Invalid account" in printed
    (row,) = suite.status().values()
    assert row.state == "failed"
    assert row.detail.startswith("not submitted: sbatch: ")
    suite.stand_in("seed=0")  # counts as missing
    suite.wait_for_records(2)
    assert suite.states() == ["ok"]


def test_queued_points_are_never_doubled(suite: Suite) -> None:
    held = ("seed=0,10", "+launcher.sbatch.hold=true")
    suite.stand_in(*held)
    queue = suite.queue()
    assert suite.states() == ["waiting", "waiting"]
    array = queue[0].partition("_")[0]
    (sweep,) = suite.runs.glob("slurm/zeropp+*")
    suite.cluster.run("scontrol", "update", f"JobId={array}", "JobName=renamed")
    printed = suite.stand_in(*held, "rerun=all")
    assert "0 of 2 points to run with launcher=slurm, 2 under way" in printed
    assert printed.count("left alone") == 2
    suite.cluster.run("scontrol", "update", f"JobId={array}", f"JobName={sweep.name}-0")
    assert suite.queue() == queue
    suite.cluster.run("scancel", *queue)
    suite.wait_for_states(["failed", "failed"])
    assert all("CANCELLED" in row.detail for row in suite.status().values())
    suite.stand_in("seed=0,10")
    suite.wait_for_records(4)
    assert suite.states() == ["ok", "ok"]


def test_preempted_and_requeued(suite: Suite) -> None:
    suite.stand_in("seed=3", *suite.apart_on("zpnode6"))
    suite.wait_for_all_steps(1)
    (suite.directory / "calm").touch()  # the second attempt shall end
    suite.cluster.take_node("zpnode6")
    preempted, after = suite.wait_for_records(2)
    assert (preempted.status, preempted.interrupted, after.status) == ("preempted", True, "ok")
    assert len(preempted.step_s) >= 2  # of every rank
    assert preempted.slurm["job"] == after.slurm["job"]  # the same job, kept apart
    assert [preempted.slurm["restart"], after.slurm["restart"]] == [0, 1]
    assert suite.states() == ["ok"]
    assert "0 of 1 points to run" in suite.stand_in("seed=3")


def test_a_node_taken_down_then_the_rest_completed(suite: Suite) -> None:
    suite.stand_in("seed=3,0", *suite.apart_on("zpnode8"))  # and put back into the queue
    attempt = suite.wait_for_steps(5)
    assert "step" in next(r.detail for r in suite.status().values() if r.state == "running")
    suite.wait_for_records(1)
    suite.cluster.kill_node("zpnode8")
    wait_until(
        lambda: suite.status() and any(r.status == "lost" for r in suite.records()),
        "a lost attempt, which status records",
        every_s=1.0,
    )
    lost = next(r for r in suite.records() if r.status != "ok")
    assert (lost.status, lost.interrupted) == ("lost", True)
    assert "NODE_FAIL" in lost.reason
    assert "zpnode8" in lost.reason
    assert len(lost.step_s) >= 5
    assert lost.record_id.endswith(attempt.name)
    (suite.directory / "calm").touch()
    suite.cluster.start_node("zpnode8")
    suite.wait_for_records(3)
    suite.wait_until_idle()
    assert sorted(r.slurm["restart"] for r in suite.records()) == [0, 0, 1]
    # Slurm may still end what began at once on a node that came back.
    suite.stand_in("seed=3,0", *suite.apart_on("zpnode8"), "rerun=failed")
    suite.wait_for_states(["ok", "ok"])
    assert "0 of 2 points to run" in suite.stand_in("seed=3,0")


LOOP = Path(__file__).with_name("preempted.py")


def test_a_job_that_is_signalled_saves_and_goes_on(suite: Suite) -> None:
    place = suite.directory

    def submit(name: str, steps: int, *more: str) -> str:
        given = ("sbatch", "--parsable", "--account=science", "--ntasks=2", "--time=30", *more)
        command = f"PYTHONPATH={CHECKOUT} srun {sys.executable} {LOOP} {place} {steps}"
        wrapped = f"{command} || echo left with $?"
        return suite.cluster.run(*given, f"--output={place / name}", f"--wrap={wrapped}").strip()

    def ended(job: str) -> bool:
        return not suite.cluster.run("squeue", "--noheader", f"--jobs={job}").strip()

    first = submit("first", 10**9, "--signal=TERM@60")
    wait_until((place / "stepping").exists, "a step of the first job")
    suite.cluster.end_in(first, 80)
    wait_until(lambda: ended(first), "the end of the first job")
    said = (place / "first").read_text()
    assert said.count("begins at step 0") == 2
    assert "left with 143" in said
    second = submit("second", int((place / "stepping").read_text()) + 3)
    wait_until(lambda: ended(second), "the end of the second job")
    said = (place / "second").read_text()
    assert "left with" not in said
    begun = {int(step) for step in re.findall(r"begins at step (\d+)", said)}
    saved = int((place / "stepping").read_text()) - 3
    assert begun <= {saved, saved + 1}  # the step that saved was not told
    assert len(begun) == 1
