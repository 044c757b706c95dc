"""slurmctld goes away and comes back. All other tests would notice, so this one waits for them."""

from __future__ import annotations

import pytest

from tests.slurm.conftest import Suite

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(590), pytest.mark.usefixtures("alone")]


def test_no_controller_at_submit(suite: Suite) -> None:
    suite.stand_in("seed=3")
    suite.wait_for_steps(3)
    suite.cluster.stop_controller()
    try:
        printed = suite.stand_in("seed=0,3", expect=1)
        (line,) = [line for line in printed.splitlines() if "error: " in line]
        assert "Unable to contact slurm controller" in line
        assert line.endswith("; nothing was submitted")
        (point,) = suite.status(expect=1).values()
        assert (point.state, point.detail.split()[0]) == ("running", "step")
        assert suite.records() == []  # of points that are not known
    finally:
        suite.cluster.start_controller()
    (suite.directory / "calm").touch()
    printed = suite.stand_in("seed=0,3")
    assert "1 of 2 points to run with launcher=slurm, 1 under way" in printed
    suite.wait_for_records(1)
    suite.cluster.run("scancel", *suite.queue())
    suite.wait_for_records(2)
    suite.wait_until_idle()  # while a job leaves its node, its point counts as queued
    assert "1 of 2 points to run" in suite.stand_in("seed=0,3")
    suite.wait_for_records(3)
    assert suite.states() == ["ok", "ok"]
