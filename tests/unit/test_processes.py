"""Ranks that are ended with all that they started, and nobody else."""

from __future__ import annotations

import subprocess
import time

from benchmarks.launch.local import kill_session
from benchmarks.launch.owner import state_and_start


def test_a_stranger_with_a_ranks_number_is_left_alone() -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    started = state_and_start(stranger.pid)[1]
    try:
        kill_session(stranger.pid, "1")  # the rank that had this number began earlier
        kill_session(stranger.pid, "")  # it was gone before anybody looked
        time.sleep(0.1)
        assert stranger.poll() is None
        kill_session(stranger.pid, started)  # the same process: it is the rank
        assert stranger.wait(timeout=10) == -9
    finally:
        stranger.kill()
        stranger.wait(timeout=10)


def test_what_a_dead_rank_has_started_is_ended() -> None:
    script = "sleep 60 & echo $!"
    rank = subprocess.Popen(
        ["bash", "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    started = state_and_start(rank.pid)[1]
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    rank.wait(timeout=10)
    kill_session(rank.pid, started)
    deadline = time.monotonic() + 10
    while state_and_start(child)[0] not in ("", "Z"):
        assert time.monotonic() < deadline, f"process {child} lives"
        time.sleep(0.02)
    kill_session(rank.pid, started)  # nobody is left, which is no error
