"""Slurm without a Slurm: scripts, options, resources, and what its words mean."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch.options import SlurmOptions, read_launcher_options, seconds_of
from benchmarks.launch.points import Point, plan_point
from benchmarks.launch.running import SweepProgress
from benchmarks.launch.slurm import script as slurm_script
from benchmarks.launch.slurm.client import site_defaults
from benchmarks.launch.slurm.script import Array, group, render_array, render_report, resources_of
from benchmarks.launch.slurm.submit import check, launch
from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import spec_from_mapping
from tests.unit.toy_spec import SWEEP, mapping, spec_of

GOLDEN = Path(__file__).parents[1] / "golden"
SUBMISSION = Path("/data/runs/slurm/zeropp-1")


def options(**changes: Any) -> SlurmOptions:
    values = {"kind": "slurm", "report_dir": "/data/report", "python": "/env/bin/python"}
    read = read_launcher_options(values | changes)
    assert isinstance(read, SlurmOptions)
    return read


def arrays_of(points: list[Point], settings: SlurmOptions, **limits: int) -> list[Array]:
    """The arrays of these points."""
    sized = [(point, resources_of(point.spec, settings, None)) for point in points]
    return group(sized, SUBMISSION, "zeropp-1", **({"max_array_size": 1001} | limits))


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} differs (UPDATE_GOLDEN=1 writes it anew)"
    checked = subprocess.run(["bash", "-n", path], capture_output=True, timeout=300, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_scripts_are_the_golden_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_script, "CHECKOUT", Path("/home/me/zeropp"))
    points = [Point(spec_of(num_gpus=16, seed=seed), None, "") for seed in (0, 1)]
    settings = options(
        setup=["module load cuda/12.4", "export NCCL_DEBUG=WARN"],
        sbatch={"account": "science", "partition": "h100", "requeue": True, "mem": None},
        srun={"container_image": "/images/zero pp.sqsh"},
        worker_python="python3",
    )
    (array,) = arrays_of(points, settings)
    text = render_array(array, settings, Path("/data/runs"))
    for spec_id in array.spec_ids:  # its hash changes with every field that a spec gains
        text = text.replace(spec_id, spec_id.rpartition("-")[0] + "-HASH")
    check_golden("slurm_array.sbatch", text)
    report = render_report(SUBMISSION, "zeropp-1", settings, Path("/data/runs"))
    check_golden("slurm_report.sbatch", report)


def test_equal_resources_share_an_array_and_no_point_gets_those_of_another() -> None:
    points = [Point(spec_of(num_gpus=n, seed=s), None, "") for n in (16, 8, 4) for s in (0, 1)]
    arrays = arrays_of(points, options())
    shapes = [(a.resources.nodes, a.resources.ranks_per_node, len(a.points)) for a in arrays]
    assert (shapes, len({array.name for array in arrays})) == ([(1, 4, 2), (1, 8, 2), (2, 8, 2)], 3)
    texts = [render_array(array, options(), Path("/runs")) for array in arrays]
    assert ["--nodes=2" in text for text in texts] == [False, False, True]


@pytest.mark.parametrize(
    ("step_s", "minutes"),
    [
        (None, 20),  # measure.timeout_s of 600 s and a minute of grace, in steps of 10 min
        (1.0, 10),  # 300 s to start, 25 steps of 1 s three times over, and the grace
        (100.0, 20),  # never more than measure.timeout_s
    ],
)
def test_walltime(step_s: float | None, minutes: int) -> None:
    assert resources_of(spec_of(), options(), step_s).minutes == minutes


def test_what_cannot_be_submitted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="num_gpus=9: must be a multiple of the 2 nodes"):
        check([Point(spec_of(num_gpus=9), None, "")], options(dry_run=True), SWEEP)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SpecError, match="launcher=slurm: there is no sbatch here"):
        check([], options(), SWEEP)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sbatch": {"nodes": 4}}, "launcher.sbatch.nodes: the suite sets"),
        ({"srun": {"job_name": "x"}}, "launcher.srun.job_name: the suite sets"),
        ({"sbatch": {"time": [1]}}, "launcher.sbatch.time"),
        ({"account": "science"}, "launcher.account='science': "),
        ({"grace_s": "long"}, "launcher.grace_s='long': "),
        ({"grace_s": 120, "sbatch": {"time": 2}}, "launcher.sbatch.time=2: must be above"),
        ({"queues": {8: {"time": "0:30"}}}, "launcher.queues.8.time=0:30: must be above"),
        ({"queues": {8: {"nodes": 2}}}, "launcher.queues.8.nodes: the suite sets"),
        ({"sbatch": {"gpus-per-node": 4}}, "launcher.gpu_flag"),
        ({"sbatch": {"gres": "gpu:8"}}, "launcher.gpu_flag"),
        ({"gpu_flag": "gpus"}, "launcher.gpu_flag='gpus'"),
        ({"max_running": 0}, "launcher.max_running=0: must be at least 1"),
        ({"walltime_safety": float("inf")}, "launcher.walltime_safety=inf: must be finite"),
        ({"grace_s": 10**20}, "launcher.grace_s=100000000000000000000: must be less than 2^63"),
        ({"sbatch": {"ntasks-per-node": 4}}, "launcher.sbatch.ntasks-per-node: the suite sets"),
        ({"sbatch": {"ntasks_per_node": True}}, "launcher.sbatch.ntasks_per_node: the suite sets"),
        ({"srun": {"ntasks-per-node": False}}, "launcher.srun.ntasks-per-node: the suite sets"),
        ({"name": "my sweep"}, "launcher.name='my sweep'"),
        ({"name": "a/b"}, "launcher.name='a/b'"),
    ],
)
def test_bad_options_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        options(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_flags_say_what_the_map_says() -> None:
    flags = {"time": "2-00", "exclusive": True, "comment": 'my "own" sweep', "mem": None}
    lines = script_of(options(sbatch=flags)).splitlines()
    comment = '#SBATCH --comment="my \\"own\\" sweep"'
    assert {"#SBATCH --time=2-00", "#SBATCH --exclusive", comment} <= {*lines}
    assert not any("--mem" in line for line in lines)
    assert "#SBATCH --no-requeue" in script_of(options(sbatch={"requeue": False})).splitlines()


def script_of(settings: SlurmOptions, **changes: Any) -> str:
    """The script of one point."""
    point = Point(spec_of(**changes), None, "")
    (array,) = arrays_of([point], settings)
    return render_array(array, settings, Path("/runs"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "--gpus-per-node=4"),
        ({"gpu_type": "h100"}, "--gpus-per-node=h100:4"),
        ({"gpu_flag": "gres", "gpu_type": "h100"}, "--gres=gpu:h100:4"),
        ({"gpu_flag": "gpus-per-task"}, "--gpus-per-task=1"),
        ({"gpu_flag": "none"}, ""),
        (None, ""),  # on CPUs
    ],
)
def test_gpus_follow_the_point_whichever_flag_the_site_uses(
    changes: dict[str, Any] | None, expected: str
) -> None:
    on_cpus = {"cluster": mapping()["cluster"]} if changes is None else {}
    text = script_of(options(**(changes or {})), **on_cpus)
    asked = [line for line in text.splitlines() if "#SBATCH" in line and ("gpu" in line)]
    assert asked == ([f"#SBATCH {expected}"] if expected else [])
    (srun,) = [line for line in text.splitlines() if line.startswith("    srun ")]
    assert ("--gpus-per-node=4" in srun) == (expected == "--gpus-per-task=1")


def test_a_queue_is_chosen_by_the_size_of_the_point() -> None:
    queues = {1: {"partition": "small"}, 16: {"partition": "large", "time": 240}}
    settings = options(sbatch={"partition": "any", "account": "science"}, queues=queues)
    small, large = script_of(settings), script_of(settings, num_gpus=16)
    assert "#SBATCH --partition=small" in small
    assert {"#SBATCH --partition=large", "#SBATCH --time=240"} <= {*large.splitlines()}
    assert all("#SBATCH --account=science" in text for text in (small, large))


def test_arrays_are_split_and_throttled() -> None:
    settings = options(max_running=3)
    points = [Point(spec_of(seed=seed), None, "") for seed in range(7)]
    arrays = arrays_of(points, settings, max_array_size=4)
    assert [len(array.points) for array in arrays] == [3, 3, 1]
    assert sorted(i for a in arrays for i in a.spec_ids) == sorted(p.spec.spec_id for p in points)
    assert "#SBATCH --array=0-2%3" in render_array(arrays[0], settings, Path("/runs"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 120),
        ("2:30", 150),
        ("1:02:03", 3723),
        ("2-00", 172800),
        ("1-02:03", 93780),
        ("0:59", 59),
        ("2-01:00:00", 176400),
        ("UNLIMITED", math.inf),
        ("INVALID", None),
        (True, None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: Any, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_variables_of_a_shell_change_no_flag_of_the_script() -> None:
    environment = {
        "SBATCH_PARTITION": "debug",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_ARRAY_INX": "0-99",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_CLUSTERS": "other",
        "SBATCH_ACCOUNT": "science",
        "SLURM_JOB_ID": "7",
    }
    kept = site_defaults(environment, {"partition", "time", "requeue"})
    assert kept == {"SBATCH_ACCOUNT": "science"}  # the script does not say it


def test_a_plan_that_cannot_fit_is_refused_before_the_queue(tmp_path: Path) -> None:
    values = mapping()
    values["cluster"]["device"]["reserved_gib"] = 15.999  # of 16
    points, settings = [plan_point(spec_from_mapping(values))], options(report_dir="report")
    with SweepProgress(1) as progress:
        assert launch(points, replace(settings, dry_run=True), tmp_path, progress) == []
        assert list(tmp_path.iterdir()) == []
        (record,) = launch(points, settings, tmp_path, progress)
    assert record.status == "infeasible"
    assert "predicted peak of " in record.reason
    assert "is over the 0.0 for tensors: cluster.device.memory_gib=16 less" in record.reason
    assert not (tmp_path / "slurm").exists()


def test_a_site_that_forbids_tasks_per_node_gets_their_number_and_the_step_says_the_rest() -> None:
    text = script_of(options(sbatch={"ntasks-per-node": False}), num_gpus=16)
    assert "#SBATCH --ntasks=16\n" in text
    assert "#SBATCH --ntasks-per-node" not in text
    assert " --ntasks-per-node=8 " in text.partition("srun --kill-on-bad-exit")[2]


def test_each_run_of_a_point_is_a_task_with_attempts_of_its_own() -> None:
    settings = options()
    points = [Point(spec_of(seed=seed), None, "") for seed in (0, 1, 0, 0)]
    first, second = arrays_of(points, settings, max_array_size=4)
    assert first.attempts == ("slurm-1", "slurm-1", "slurm-1.1")
    assert second.attempts == ("slurm-1.2",)
    text = render_array(first, settings, Path("/data/runs"))
    assert "attempts=(slurm-1 slurm-1 slurm-1.1)" in text
    assert "/$spec_id/slurm-1.2-$restart\n" in render_array(second, settings, Path("/data/runs"))
