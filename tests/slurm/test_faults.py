"""The table of faults in docs/slurm.md, each provoked in a running job of two nodes; disks that are
full or cannot be written to; hosts' clocks and a checkout's files that change under a job.

All points of a test run at the same time, each meets a fault of its own, and the record of each is
compared with the table. Afterwards the same command completes what was interrupted, and no more.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from benchmarks.launch.slurm.submit import copy_checkout
from benchmarks.records.record import RunRecord
from tests.slurm.conftest import FIRST, TOGETHER, Suite
from tests.waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(590), *TOGETHER]

TWO_NODES = ("cluster.gpus_per_node=1", "num_gpus=2")


@dataclass(frozen=True)
class Victim:
    """A running attempt and its processes."""

    suite: Suite
    attempt: Path

    @property
    def job(self) -> str:
        """The job's own number."""
        return str(json.loads((self.attempt / "slurm.json").read_text())["job_id"])

    @property
    def worker(self) -> psutil.Process:
        """Rank 1, on the second node."""
        return psutil.Process(int((self.attempt / "rank_001.pid").read_text()))

    @property
    def script(self) -> psutil.Process:
        """The batch script: the shell that slurmstepd started for the job."""
        place = f"{self.suite.cluster.directory}/spool/"
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            mine = place in command and f"job{int(self.job):05d}/slurm_script" in command
            parent = process.parent() if mine else None
            if parent is not None and parent.name() == "slurmstepd":
                return process
        raise AssertionError(f"no script of job {self.job}")

    def scancel(self, *flags: str) -> None:
        """scancel with these flags."""
        task = json.loads((self.attempt / "slurm.json").read_text())["job"]
        self.suite.cluster.run("scancel", *flags, task)


# What happens: fault, status, interrupted, words of the reason
FAULTS: list[tuple[Callable[[Victim], None], str, bool, str]] = [
    (lambda v: v.scancel(), "failed", True, "Slurm: CANCELLED"),
    (lambda v: v.scancel("--signal=TERM"), "failed", True, "left on SIGTERM, sent by hand"),
    (lambda v: v.scancel("--signal=USR1"), "failed", True, "left on SIGUSR1, sent by hand"),
    (lambda v: v.scancel("--signal=TERM", "--batch"), "failed", True, "SIGTERM, sent by hand"),
    (lambda v: v.worker.kill(), "failed", True, "rank 1: Killed (srun)"),
    (lambda v: v.script.kill(), "failed", True, "the batch script was killed by signal 9"),
]


def test_each_fault_has_its_own_word(suite: Suite) -> None:
    seeds = [10 * index + 3 for index in range(len(FAULTS))]  # they go on until they are stopped
    command = (f"seed={','.join(map(str, seeds))}", *TWO_NODES)
    suite.stand_in(*command)
    attempts = suite.wait_for_all_steps(len(FAULTS))
    for seed, (fault, *_) in zip(seeds, FAULTS, strict=True):
        fault(Victim(suite, attempts[seed]))
    suite.wait_for_states(["failed"] * len(FAULTS))
    records = {record.spec["seed"]: record for record in suite.records()}
    assert len(suite.records()) == len(FAULTS)
    for seed, (_, status, interrupted, words) in zip(seeds, FAULTS, strict=True):
        record: RunRecord = records[seed]
        assert (record.status, record.interrupted) == (status, interrupted), record.reason
        assert words in record.reason
        assert len(record.step_s) >= 2  # what was measured is kept
    assert suite.workers() == []
    (suite.directory / "calm").touch()
    assert f"{len(FAULTS)} of {len(FAULTS)} points to run" in suite.stand_in(*command)
    suite.wait_for_records(2 * len(FAULTS))
    assert suite.states() == ["ok"] * len(FAULTS)


def test_failures_before_the_ranks_start_are_told_and_not_repeated(suite: Suite) -> None:
    broken = ("seed=0,10", "launcher.setup=['module load nonesuch']")
    suite.stand_in(*broken)
    records = suite.wait_for_records(2)
    assert {(r.status, r.interrupted) for r in records} == {("failed", False)}
    for record in records:
        assert re.match(r"in setup \(.*\): .*module", record.reason), record.reason
    assert "0 of 2 points to run" in suite.stand_in(*broken, expect=1)


def test_a_worker_that_cannot_start_says_it_by_the_rank_that_failed(suite: Suite) -> None:
    suite.stand_in("seed=0", "launcher.worker_python=/nonexistent/python", *TWO_NODES)
    (record,) = suite.wait_for_records(1)
    assert (record.status, record.interrupted) == ("failed", False)
    assert re.match("rank [01]: .*/nonexistent/python: No such file", record.reason), record.reason


def test_programs_that_end_silently_are_told_by_their_exit_codes(suite: Suite) -> None:
    """Ranks, and a script that has become another program."""
    silent = suite.directory / "silent"
    silent.write_text("#!/bin/sh\nexit 7\n")
    silent.chmod(0o755)
    ranks = ("seed=0", f"launcher.worker_python={silent}", *TWO_NODES)
    script = ("seed=10", "launcher.setup=['exec true']")
    suite.stand_in(*ranks)
    suite.stand_in(*script)
    suite.wait_for_records(1)
    suite.wait_for_states(["failed", "failed"])
    records = sorted(suite.records(), key=lambda record: int(record.spec["seed"]))
    assert re.fullmatch("rank [01]: exit code 7", records[0].reason), records[0].reason
    assert records[1].reason == "before the ranks started: ended with exit code 0"
    assert not any(record.interrupted for record in records)
    assert "0 of 1 points to run" in suite.stand_in(*ranks, expect=1)
    assert "0 of 1 points to run" in suite.stand_in(*script, expect=1)


@FIRST
def test_a_time_limit_in_setup_is_a_time_limit(suite: Suite) -> None:
    slow = ("seed=0", "launcher.setup=['sleep 1000']")
    suite.stand_in(*slow, "launcher.sbatch.time=1", "launcher.grace_s=20")
    (job,) = suite.queue()
    wait_until(lambda: list(suite.runs.glob("*/slurm-*/slurm.json")), "the setup")
    suite.cluster.end_in(job, 2)
    (record,) = suite.wait_for_records(1)
    assert (record.status, record.interrupted) == ("timeout", False)
    assert "setup" in record.reason
    assert record.ranks == []
    assert "0 of 1 points to run" in suite.stand_in(*slow, expect=1)


def test_variables_of_a_surrounding_job_and_of_a_login_shell(suite: Suite) -> None:
    suite.environment = {
        "SLURM_JOB_ID": "4242",
        "SLURM_NTASKS_PER_NODE": "7",
        "SLURM_EXPORT_ENV": "NONE",
        "SBATCH_EXPORT": "NONE",
        "SBATCH_TIMELIMIT": "0:01",
        "SBATCH_JOB_NAME": "mine",
        "SBATCH_WAIT": "1",
        "SQUEUE_STATES": "SUSPENDED",
        "SQUEUE_FORMAT": "%u",
        "OMP_NUM_THREADS": "77",
    }
    assert "environment SBATCH_EXPORT=NONE applies" in suite.stand_in("seed=0,3")
    suite.wait_for_states(["ok", "running"])
    assert "left alone" in suite.stand_in("seed=3")
    assert suite.only_record().ranks[0].environment["code"]["OMP_NUM_THREADS"] == "1"
    suite.cluster.run("scancel", *suite.queue())


def test_the_user_signal_at_preemption_is_not_the_time_limit(suite: Suite) -> None:
    gentle = ("launcher.sbatch.partition=gentle", "+launcher.sbatch.nodelist=zpnode7")
    suite.stand_in("seed=3", *gentle)
    suite.wait_for_steps(3)
    (suite.directory / "calm").touch()  # the second attempt shall end
    suite.cluster.take_node("zpnode7")
    first, after = suite.wait_for_records(2)
    assert (first.status, first.interrupted, after.status) == ("preempted", True, "ok")
    assert first.slurm["job"] == after.slurm["job"]  # the same job came back


def test_a_frozen_node_is_lost_and_its_job_does_not_run_beside_the_next(suite: Suite) -> None:
    suite.stand_in("seed=3", *suite.apart_on("zpnode9"), "launcher.sbatch.requeue=false")
    attempt = suite.wait_for_steps(2)
    suite.cluster.freeze_node("zpnode9")
    try:
        suite.wait_for_states(["lost"])
        lost = (attempt / "record.json").read_bytes()
        assert b"NODE_FAIL" in lost
    finally:
        suite.cluster.thaw_node("zpnode9")
    wait_until(lambda: suite.workers() == [], "the end of its ranks")
    assert (attempt / "record.json").read_bytes() == lost
    (suite.directory / "calm").touch()
    assert "1 of 1 points to run" in suite.stand_in("seed=3")
    suite.wait_for_states(["ok"])


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    """Something mounted on a folder; skips where that is not allowed."""
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", *options, str(place)], check=False, timeout=LIMIT_S).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, timeout=LIMIT_S)


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """A folder that nothing can be written into by its name; open files go on, as on a server that
    changed what it exports."""
    with mounted(place, "--bind", str(place)):
        remount = ["mount", "-o", "remount,ro,bind", str(place)]
        subprocess.run(remount, check=True, timeout=LIMIT_S)
        yield


@contextmanager
def full(place: Path) -> Iterator[None]:
    """A disk without a byte left."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            pass
    try:
        yield
    finally:
        filler.unlink()


TROUBLES = {"full": (full, "no space left"), "read-only": (read_only, "read-only file system")}


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_disk_that_fails_before_and_during_a_run(suite: Suite, kind: str) -> None:
    trouble, words = TROUBLES[kind]
    with mounted(suite.runs, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        with trouble(suite.runs):
            printed = suite.stand_in("seed=3", expect=None)
        assert words in printed.lower()
        assert "Traceback" not in printed
        suite.stand_in("seed=3")
        attempt = suite.wait_for_steps(3)
        with trouble(suite.runs):
            if kind == "read-only":  # ranks that cannot write end by themselves
                suite.cluster.run("scancel", "--signal=KILL", *suite.queue())
            suite.wait_until_idle()
            assert list(suite.status()) == [attempt.parent.name]  # says what can be said
            assert not (attempt / "record.json").exists()
        suite.wait_for_states(["failed"])
        (record,) = [r for r in suite.records() if r.slurm.get("job")]
        assert record.interrupted
        assert len(record.step_s) >= 3
        (suite.directory / "calm").touch()
        suite.stand_in("seed=3")
        suite.wait_for_states(["ok"])


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
    late_s = record.ranks[0].environment["code"]["clock"] - attempt.stat().st_mtime
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
    real = (
        *("num_gpus=1", "global_batch=2", "measure.gate=false", "measure.timeline=false"),
        *("measure.warmup_steps=0", "measure.steps=1", "+launcher.sbatch.hold=true"),
        "+launcher.report_sbatch.hold=true",
    )
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
