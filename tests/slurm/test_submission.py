"""Submitting on a real Slurm: twice at once, interrupted at any moment, answers that get lost.

``sbatch`` is a shell script here, before the real one on the PATH: it is slow, or loses its answer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import wait_until
from tests.slurm.conftest import Suite

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]

HELD = ("seed=0,10,20,30", "+launcher.sbatch.hold=true")


def stand_before(suite: Suite, program: str, script: str) -> None:
    """Put a script before one of Slurm's programs; ``$real`` is that program."""
    folder = suite.directory / "bin"
    folder.mkdir(exist_ok=True)
    path = folder / program
    path.write_text(f"#!/usr/bin/env bash\nreal={shutil.which(program)}\n{script}\n")
    path.chmod(0o755)
    suite.environment["PATH"] = f"{folder}:{os.environ['PATH']}"


def points_in_the_queue(suite: Suite) -> list[str]:
    """The held points of the suite, each task of an array by its own number."""
    return [job for job in suite.queue() if "_" in job]


@pytest.fixture
def held(suite: Suite) -> Iterator[Suite]:
    """A suite whose jobs wait for ever; they are cancelled afterwards."""
    yield suite
    if jobs := suite.queue():
        suite.cluster.run("scancel", *jobs)


def test_twice_at_once_with_a_slow_sbatch(held: Suite) -> None:
    stand_before(held, "sbatch", 'sleep 2; exec "$real" "$@"')
    both = [held.start(*HELD), held.start(*HELD)]
    printed = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    assert len(points_in_the_queue(held)) == 4
    assert sum(text.count("left alone") for text in printed) == 4
    assert len(list(held.runs.glob("slurm/*/submission.json"))) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_while_submitting(held: Suite, number: signal.Signals) -> None:
    stand_before(held, "sbatch", f'touch {held.directory}/began; sleep 3; exec "$real" "$@"')
    process = held.start(*HELD)
    wait_until((held.directory / "began").exists, 100, "the call of sbatch")
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    time.sleep(4)  # an sbatch that outlived its launcher would have submitted by now
    held.environment.clear()
    held.stand_in(*HELD)
    assert len(points_in_the_queue(held)) == 4


def test_a_lost_answer_and_a_lost_report_job(held: Suite) -> None:
    lost = '"$real" "$@" >/dev/null; echo "sbatch: error: Socket timed out" >&2; exit 1'
    stand_before(held, "sbatch", lost)
    held.stand_in(*HELD)
    held.environment.clear()
    assert len(points_in_the_queue(held)) == 4
    assert held.stand_in(*HELD).count("left alone") == 4
    report = [job for job in held.queue() if "_" not in job]
    held.cluster.run("scancel", *report)
    wait_until(lambda: len(held.queue()) == 4, 20, "the end of the report job")
    assert "report      job " in held.stand_in(*HELD)
    wait_until(lambda: len(held.queue()) == 5, 20, "the new report job")
    assert "report      job " not in held.stand_in(*HELD)


def test_a_full_disk_before_and_during_a_run(suite: Suite) -> None:
    suite.runs.mkdir()
    options = ("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(suite.runs))
    if subprocess.run(options, check=False, capture_output=True, timeout=10).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        filler = suite.runs / "filler"
        fill(filler)
        printed = suite.stand_in("seed=3", expect=None)
        assert "No space left on device" in printed or "no space left" in printed
        assert "Traceback" not in printed
        filler.unlink()
        suite.stand_in("seed=3")
        attempt = suite.wait_for_steps(3)
        fill(filler)
        suite.cluster.run("scancel", "--signal=KILL", *points_in_the_queue(suite))
        suite.wait_until_idle(60)
        assert list(suite.status()) == [attempt.parent.name]  # says what can be said
        filler.unlink()
        wait_until(lambda: suite.states() == ["failed"], 30, "the record")
        (record,) = [r for r in suite.records() if r.slurm.get("job")]
        assert record.interrupted
        assert len(record.step_s) >= 3
        (suite.directory / "calm").touch()
        suite.stand_in("seed=3")
        wait_until(lambda: suite.states() == ["ok"], 60, "the point to complete")
        suite.wait_until_idle(60)
    finally:
        subprocess.run(["umount", "-l", str(suite.runs)], check=False, timeout=10)


def fill(path: Path) -> None:
    """Leave no byte free on the disk of a file."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            return


GPU_FLAGS = {
    "gpus-per-node": ("launcher.gpu_flag=gpus-per-node",),
    "gres": ("launcher.gpu_flag=gres", "launcher.gpu_type=fake"),
    "gpus-per-task": ("launcher.gpu_flag=gpus-per-task",),
}


def test_every_rank_sees_the_gpus_of_its_node_whichever_flag_asks_for_them(suite: Suite) -> None:
    gpus = ("cluster=a100", "cluster.gpus_per_node=4", "data=synthetic", "num_gpus=4")
    for seed, flags in enumerate(GPU_FLAGS.values()):
        suite.stand_in(*gpus, *flags, f"seed={10 * seed}", "global_batch=8")
    records = suite.wait_for_records(len(GPU_FLAGS), 100)
    assert [record.status for record in records] == ["ok"] * len(GPU_FLAGS)
    for record in records:
        seen = [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in record.ranks]
        assert seen == ["0,1,2,3"] * 4, record.slurm


def test_odd_paths_and_comments(suite: Suite) -> None:
    odd = suite.beside("a folder, with 100% (odd) 'characters'")
    odd.stand_in("seed=0", '+launcher.sbatch.comment="two words"')
    odd.wait_for_records(1, 60)
    assert odd.states() == ["ok"]
    assert len(list(odd.runs.glob("slurm/*/*-0-0.log"))) == 1


def test_who_was_beside_a_point_stands_in_its_record(suite: Suite) -> None:
    suite.stand_in("seed=3,0", "+launcher.sbatch.nodelist=zpnode4")
    suite.wait_for_records(1, 60)
    record = suite.only_record()
    suite.cluster.run("scancel", *suite.queue())
    assert len(record.slurm["neighbours"]) >= 1
    assert str(record.slurm["job_id"]) not in record.slurm["neighbours"]


def test_chained_arrays_wait_for_each_other(held: Suite) -> None:
    points = ("num_gpus=2,4", "cluster.gpus_per_node=4", "launcher.chain=true")
    held.stand_in(*points, "seed=0", "+launcher.sbatch.hold=true", "global_batch=8")
    form = ("squeue", "--noheader", "--format=%j %E")
    lines = [line.split() for line in held.cluster.run(*form).splitlines()]
    waits = {line[0].rpartition("-")[2]: line[1] for line in lines if line[0] in _names(held)}
    assert waits["0"] == "(null)"
    assert waits["1"].startswith("afterany:")


def _names(suite: Suite) -> set[str]:
    sweeps = [path.name for path in (suite.runs / "slurm").glob("zeropp-*")]
    return {f"{name}-{number}" for name in sweeps for number in range(2)}
