"""A user's own loop under Slurm's ``--signal``: it saves before its time is up, and goes on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from tests.slurm.conftest import TOGETHER, Suite
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(590), *TOGETHER]
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
