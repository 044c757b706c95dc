"""Slurm without a Slurm: scripts, options, resources, and what its words mean."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch.finish import Ending
from benchmarks.launch.points import Point, freeze, plan_point
from benchmarks.launch.progress import SweepProgress
from benchmarks.launch.slurm import attempt as slurm_attempt
from benchmarks.launch.slurm import jobs as slurm_jobs
from benchmarks.launch.slurm import script as slurm_script
from benchmarks.launch.slurm.attempt import close, ending_by_state
from benchmarks.launch.slurm.client import EndedJob, QueuedJob, SlurmError, queued_jobs
from benchmarks.launch.slurm.jobs import (
    Submission,
    SubmittedArray,
    close_ended,
    read_tasks,
    underway,
)
from benchmarks.launch.slurm.launcher import check, launch
from benchmarks.launch.slurm.script import (
    Resources,
    SlurmOptions,
    group,
    read_options,
    render_array,
    render_report,
    resources_of,
)
from benchmarks.records.rank_events import EventWriter
from benchmarks.specification.run_spec import RunSpec, SpecError, spec_from_mapping
from tests.unit.test_spec import mapping

GOLDEN = Path(__file__).parents[1] / "golden"
SUBMISSION = Path("/data/runs/slurm/zeropp-1")


def spec_of(**changes: Any) -> RunSpec:
    return spec_from_mapping(mapping() | changes)


def options(**changes: Any) -> SlurmOptions:
    values = {"kind": "slurm", "report_dir": "/data/report", "python": "/env/bin/python"}
    return read_options(values | changes)


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} differs (UPDATE_GOLDEN=1 writes it anew)"


def test_scripts_are_the_golden_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_script, "CHECKOUT", Path("/home/me/zeropp"))
    points = [Point(spec_of(num_gpus=16, seed=seed), None, "") for seed in (0, 1)]
    settings = options(
        setup=["module load cuda/12.4", "export NCCL_DEBUG=WARN"],
        sbatch={"account": "science", "partition": "h100", "requeue": True, "mem": None},
        srun={"container_image": "/images/zero pp.sqsh"},
        worker_python="python3",
    )
    sized = [(point, resources_of(point.spec, settings, None)) for point in points]
    (array,) = group(sized, SUBMISSION, "zeropp-1")
    text = render_array(array, settings, Path("/data/runs"))
    for spec_id in array.spec_ids:  # its hash changes with every field that a spec gains
        text = text.replace(spec_id, spec_id.rpartition("-")[0] + "-HASH")
    check_golden("slurm_array.sbatch", text)
    report = render_report(SUBMISSION, "zeropp-1", settings, Path("/data/runs"))
    check_golden("slurm_report.sbatch", report)


@pytest.mark.parametrize("name", ["slurm_array.sbatch", "slurm_report.sbatch"])
def test_scripts_are_bash(name: str) -> None:
    checked = subprocess.run(
        ["bash", "-n", str(GOLDEN / name)], capture_output=True, text=True, timeout=10, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_equal_resources_share_an_array_and_no_point_gets_those_of_another() -> None:
    points = [Point(spec_of(num_gpus=n, seed=s), None, "") for n in (16, 8, 4) for s in (0, 1)]
    sized = [(point, resources_of(point.spec, options(), None)) for point in points]
    arrays = group(sized, SUBMISSION, "sweep")
    shapes = [(a.resources.nodes, a.resources.gpus_per_node, len(a.points)) for a in arrays]
    assert shapes == [(1, 4, 2), (1, 8, 2), (2, 8, 2)]
    assert len({array.name for array in arrays}) == 3
    texts = [render_array(array, options(), Path("/runs")) for array in arrays]
    assert ["--nodes=2" in text for text in texts] == [False, False, True]


@pytest.mark.parametrize(
    ("step_s", "minutes"),
    [
        (None, 20),  # measure.timeout_s of 600 s and a minute of grace, in steps of 10 min
        (1.0, 10),  # 300 s to start, 15 steps of 1 s three times over, and the grace
        (100.0, 20),  # never more than measure.timeout_s
    ],
)
def test_walltime(step_s: float | None, minutes: int) -> None:
    assert resources_of(spec_of(), options(), step_s) == Resources(1, 4, minutes)


def test_ranks_must_fill_their_nodes() -> None:
    with pytest.raises(SpecError, match="num_gpus=9: must be a multiple of the 2 nodes"):
        check([Point(spec_of(num_gpus=9), None, "")], {"kind": "slurm", "report_dir": "report"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sbatch": {"nodes": 4}}, "launcher.sbatch.nodes: the suite sets"),
        ({"srun": {"job_name": "x"}}, "launcher.srun.job_name: the suite sets"),
        ({"sbatch": {"time": [1]}}, "launcher.sbatch.time"),
        ({"account": "science"}, "launcher.account='science': "),
        ({"grace_s": "long"}, "launcher.grace_s='long': "),
    ],
)
def test_bad_options_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        options(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_flags_say_what_the_map_says() -> None:
    resources, point = Resources(1, 4, 11), Point(spec_of(), None, "")
    (array,) = group([(point, resources)], SUBMISSION, "sweep")
    flags = {"time": "2-00", "gpus_per_node": False, "gres": "gpu:h100:4", "exclusive": True}
    lines = render_array(array, options(sbatch=flags), Path("/runs")).splitlines()
    assert "#SBATCH --time=2-00" in lines
    assert "#SBATCH --gres=gpu:h100:4" in lines
    assert "#SBATCH --exclusive" in lines
    assert not any("gpus-per-node" in line for line in lines)


def test_a_plan_that_cannot_fit_is_refused_before_the_queue(tmp_path: Path) -> None:
    values = mapping()
    values["cluster"]["device"]["reserved_gib"] = 15.999  # of 16
    points, settings = [plan_point(spec_from_mapping(values))], options(report_dir="report")
    with SweepProgress(1) as progress:
        assert launch(points, asdict(replace(settings, dry_run=True)), tmp_path, progress) == []
        assert list(tmp_path.iterdir()) == []
        (record,) = launch(points, asdict(settings), tmp_path, progress)
    assert record.status == "infeasible"
    assert "predicted peak of " in record.reason
    assert "is over the 0.0 for tensors: cluster.device.memory_gib=16 less" in record.reason
    assert not (tmp_path / "slurm").exists()


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("OUT_OF_MEMORY", ("oom", False)),
        ("TIMEOUT", ("timeout", False)),
        ("NODE_FAIL", ("lost", True)),
        ("PREEMPTED", ("preempted", True)),
        ("CANCELLED by 1000", ("failed", True)),
        ("FAILED", None),
        ("COMPLETED", None),
    ],
)
def test_what_slurms_states_mean(state: str, expected: tuple[str, bool] | None) -> None:
    ending = ending_by_state(EndedJob(state, "0:9", "node7"))
    assert (ending and (ending.status, ending.interrupted)) == expected
    if ending:
        assert state in ending.reason
        assert "node7" in ending.reason


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """Two ranks, of which rank 0 measured one step; nothing ended it yet."""
    spec = spec_of(num_gpus=2)
    directory = tmp_path / spec.spec_id / "slurm-7_0-0"
    directory.mkdir(parents=True)
    freeze(Point(spec, None, ""), directory, "slurm")
    slurm = {"job": "7_0", "job_id": 8, "restart": 0, "nodes": "node7", "log": "a.log"}
    (directory / "slurm.json").write_text(json.dumps(slurm))
    for rank in range(2):
        EventWriter(directory, rank).write("step", index=0, seconds=1.0, loss=5.0)
    return directory


@pytest.fixture
def silent_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_attempt, "last_ending", lambda job, timeout_s: None)


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize(
    ("caught", "log", "exits", "expected"),
    [
        ("USR1", "", {}, Ending("timeout", "stopped before the job's time limit (SIGUSR1)")),
        ("TERM", "", {}, Ending("preempted", "Slurm sent SIGTERM", interrupted=True)),
        (
            "",
            "slurmstepd-n1: error: StepId=4.0 exceeded memory limit (9 > 3), being killed\n",
            {},
            Ending("oom", "Slurm: StepId=4.0 exceeded memory limit (9 > 3), being killed"),
        ),
        (
            "",
            "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\n",
            {0: 5, 1: 137},
            Ending("oom", "Slurm: Detected 1 oom_kill event in StepId=4.0."),
        ),
        (
            "",
            "",
            {1: 139, 0: 5},
            Ending("failed", "rank 1 was killed by signal 11 (SIGSEGV)", interrupted=True),
        ),
    ],
)
def test_why_an_attempt_ended(
    attempt: Path, caught: str, log: str, exits: dict[int, int], expected: Ending
) -> None:
    (attempt / "srun.log").write_text(log)
    for order, (rank, code) in enumerate(exits.items()):
        path = attempt / f"rank_{rank:03d}.exit"
        path.write_text(str(code))
        os.utime(path, (order, order))
    record = close(attempt, 1, caught)
    assert Ending(record.status, record.reason, record.interrupted) == expected
    assert record.step_s == [1.0]
    assert record.slurm["job"] == "7_0"


@pytest.mark.usefixtures("silent_slurm")
def test_a_signal_after_the_last_event_changes_nothing(attempt: Path) -> None:
    for rank in range(2):
        EventWriter(attempt, rank).write("done")
    assert close(attempt, 0, "TERM").status == "ok"


def submitted(runs: Path, spec_id: str, job: str) -> None:
    directory = runs / "slurm" / "sweep"
    frozen = directory / "specs" / spec_id
    frozen.mkdir(parents=True)
    for name in ("spec.json", "attempt.json"):
        source = next((runs / spec_id).glob(f"*/{name}"))
        (frozen / name).write_text(source.read_text())
    Submission(directory, [SubmittedArray("sweep-0", [spec_id], job)]).write()


RUNNING = QueuedJob("7_0", "sweep-0_0", "RUNNING", "None", "node7", "9:00")


@pytest.mark.parametrize(
    ("queued", "endings", "expected"),
    [
        ([RUNNING], [], None),
        ([replace(RUNNING, state="PENDING")], [EndedJob("PREEMPTED", "0:0", "n")], "preempted"),
        ([], [EndedJob("NODE_FAIL", "0:0", "node7")], "lost"),
        ([], [], "lost"),
    ],
)
def test_attempts_without_a_record_are_closed_once_their_job_is_gone(
    attempt: Path,
    monkeypatch: pytest.MonkeyPatch,
    queued: list[QueuedJob],
    endings: list[EndedJob],
    expected: str | None,
) -> None:
    runs = attempt.parents[1]
    submitted(runs, attempt.parent.name, "7")
    monkeypatch.setattr(slurm_jobs, "endings", lambda job: endings)
    closed = close_ended(read_tasks(runs), {job.key: job for job in queued}, runs)
    assert [record.status for record in closed] == ([expected] if expected else [])
    assert all(record.interrupted and record.step_s == [1.0] for record in closed)
    assert close_ended(read_tasks(runs), {job.key: job for job in queued}, runs) == []


def test_a_job_without_an_id_is_found_by_its_name(attempt: Path) -> None:
    runs, spec_id = attempt.parents[1], attempt.parent.name
    submitted(runs, spec_id, "")
    assert underway(read_tasks(runs), {RUNNING.key: RUNNING}) == {spec_id: RUNNING}


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize(("caught", "is_underway"), [("USR1", False), ("TERM", True)])
def test_a_job_that_only_has_to_leave_the_queue(
    attempt: Path, caught: str, is_underway: bool
) -> None:
    runs, spec_id = attempt.parents[1], attempt.parent.name
    submitted(runs, spec_id, "7")
    close(attempt, 5, caught)  # over its time: it is done; preempted: it will be requeued
    found = underway(read_tasks(runs), {RUNNING.key: RUNNING})
    assert set(found) == ({spec_id} if is_underway else set())


def test_a_missing_slurm_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SlurmError, match="squeue: not found; is this a login node"):
        queued_jobs()
