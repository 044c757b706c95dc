"""What several unit tests share. Unit tests do without torch, whose import alone takes seconds."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.launch.attempt import ALIVE, age_s, freeze, new_header
from benchmarks.launch.slurm import endings as slurm_endings
from benchmarks.launch.slurm.client import ClusterFacts, QueuedJob
from benchmarks.launch.slurm.submissions import (
    Submission,
    SubmittedArray,
    View,
    read_view,
    write_submission,
)
from benchmarks.records.events import EventWriter
from benchmarks.specification import progress
from tests.unit.toy_spec import spec_of

HERE = ClusterFacts("here@head")
RUNNING = QueuedJob(job="7_0", state="RUNNING", nodes="node7", time_left="9:00")

# The same examples in every run, and no limit of time: a test fails because of the code alone, and
# not because of a number that was drawn or of what else the machine does.
settings.register_profile(
    "unit",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unit")
progress._FIRST_LINE_S = 1e6  # no line of progress beside a refusal, however slow the machine is


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a module that imports torch, where those of other folders do not."""
    alone = all(item.nodeid.startswith("tests/unit/") for item in session.items)
    if alone and "torch" in sys.modules:
        raise pytest.UsageError("a module of tests/unit imports torch")
    if alone:  # modules and tests stay to the end: the collector looks at what tests make alone
        gc.freeze()
        gc.set_threshold(50_000)


@pytest.fixture(scope="module", autouse=True)
def _without_torch() -> Iterator[None]:
    """Fails after the last test of a module if one of them has imported torch."""
    before = "torch" in sys.modules  # by tests of other folders, which may have run in between
    yield
    assert before or "torch" not in sys.modules, "a test of this module has imported torch"


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """An attempt of a Slurm job of two ranks; each measured one step; nothing ended it yet."""
    spec = spec_of(num_gpus=2)
    directory = tmp_path / spec.spec_id / "slurm-sweep-0"
    directory.mkdir(parents=True)
    freeze(spec, new_header("slurm"), directory)
    slurm = {"job": "7_0", "job_id": 8, "restart": 0, "nodes": "node7", "timeout_s": 600}
    slurm |= {"grace_s": 60, "log": str(tmp_path / "a.log")}
    (directory / "slurm.json").write_text(json.dumps(slurm))
    (directory / ALIVE).touch()
    for rank in range(2):
        EventWriter(directory, rank).write("step", index=0, seconds=1.0, loss=5.0)
    return directory


def silent_for(attempt: Path, seconds: float) -> None:
    """The script of the attempt has not beaten for so long, by the clock that dates its files."""
    os.utime(attempt / ALIVE, (0, 0))
    then = age_s(attempt / ALIVE) - seconds
    os.utime(attempt / ALIVE, (then, then))


@pytest.fixture
def silent_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm says nothing of a job's ending; its time limit is nine minutes."""
    monkeypatch.setattr(slurm_endings, "last_state", lambda job, timeout_s: None)
    monkeypatch.setattr(slurm_endings, "time_limit_s", lambda job, timeout_s: 540.0)


def submitted(attempt: Path, job: str, sweep: str = "sweep", **who: Any) -> Path:
    """The folder of the submission that the attempt came of."""
    runs, spec_id = attempt.parents[1], attempt.parent.name
    directory = runs / "slurm" / sweep
    frozen = directory / "specs" / spec_id
    frozen.mkdir(parents=True)
    for name in ("spec.json", "attempt.json"):
        (frozen / name).write_text((attempt / name).read_text())
    arrays = [SubmittedArray(name=f"{sweep}-0", spec_ids=[spec_id], job=job)]
    write_submission(directory, Submission(arrays=arrays, **({"user": os.getuid()} | who)))
    return directory


def view_of(attempt: Path, *queued: QueuedJob) -> View:
    """What a look at the folder and a queue with these jobs gives."""
    view = read_view(attempt.parents[1])
    view.queued, view.facts = {job.job: job for job in queued}, HERE
    return view
