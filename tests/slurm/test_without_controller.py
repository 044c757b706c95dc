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
        assert printed.count("not submitted: ") == 2
        assert "Unable to contact slurm controller" in printed
        (row,) = [r for r in suite.status(expect=1).values() if r.state == "running"]
        assert "step" in row.detail
    finally:
        suite.cluster.start_controller()
    assert suite.states() == ["failed", "running"]
    (suite.directory / "calm").touch()
    printed = suite.stand_in("seed=0,3")
    assert "2 of 2 points to run" in printed
    assert printed.count("left alone") == 1
    suite.wait_for_records(3)  # two refusals, and what was missing
    suite.cluster.run("scancel", *suite.queue())
    suite.wait_for_records(4)
    suite.wait_until_idle()  # while a job leaves its node, its point counts as queued
    assert "1 of 2 points to run" in suite.stand_in("seed=0,3")
    suite.wait_for_records(5)
    assert suite.states() == ["ok", "ok"]
