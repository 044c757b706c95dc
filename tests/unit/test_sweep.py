"""A sweep's points by launcher, the lock that keeps submissions into one folder apart, strict
specifications, and ``status``: every point with its state and the reason of a bad end."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.launch import local, sweep_status
from benchmarks.launch.attempt import Ending, killed, new_header, started, write_unstarted
from benchmarks.launch.points import Point, plan_point
from benchmarks.launch.running import SweepProgress, over_device
from benchmarks.launch.slurm.submit import copy_checkout
from benchmarks.launch.sweep import announce, launch_points, only_one, run_points
from benchmarks.records.events import Events, EventWriter
from benchmarks.records.metrics import step_line
from benchmarks.records.record import RunRecord, find_records
from benchmarks.records.recorded_spec import read_spec
from benchmarks.specification import SpecError
from benchmarks.specification import progress as bars
from benchmarks.specification.compose import compose
from benchmarks.specification.run_spec import load_spec, spec_from_mapping
from benchmarks.status import main
from tests.unit.conftest import RUNNING, submitted, view_of
from tests.unit.synthetic_records import make_record, spec_values
from tests.unit.toy_spec import changed, mapping
from tests.waiting import wait_until

TOY = spec_from_mapping(mapping())
PLANNED = plan_point(TOY)
POINT = Point(TOY, None, "global_batch=16: " + "too odd, " * 19 + "try 8")


def config_of(root: Path, kind: str = "local", /, **launcher: Any) -> dict[str, Any]:
    """A configuration with its folders below ``root``."""
    places = {"runs_dir": str(root / "runs"), "report_dir": str(root / "report")}
    return places | {"rerun": "missing", "repeats": 1, "launcher": {"kind": kind, **launcher}}


def test_equal_points_are_one_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [spec_from_mapping(mapping() | {"seed": seed}) for seed in (0, 1, 0)]
    launch_points([Point(spec, None, "no plan") for spec in specs], [config_of(tmp_path)] * 3)
    assert "1 of 3 points repeat others of the sweep" in capsys.readouterr().err
    assert len(list(find_records([tmp_path / "runs"]))) == 2


def test_runs_stay_where_their_report_would_replace_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").write_text("of the user")
    assert run_points([POINT], [config_of(tmp_path)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"no report: {tmp_path}/report/report.html: is of no report")
    assert len(list(find_records([tmp_path / "runs"]))) == 1


def test_what_a_launcher_cannot_do_is_one_line(tmp_path: Path) -> None:
    slurm = config_of(tmp_path, "slurm", report_dir="report", dry_run=True) | {"retries": 2}
    for wrong, why in (
        (config_of(tmp_path, "local", threads=4), r"launcher\.threads=4: unknown key"),
        (config_of(tmp_path, "simulate") | {"repeats": 2}, "repeats=2: launcher=simulate gives"),
        (slurm, r"retries=2: needs launcher\.wait=true"),
    ):
        with pytest.raises(SpecError, match=why):
            launch_points([POINT], [wrong])


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    said: list[str] = []
    order, lock = [], tmp_path / ".lock"

    def second() -> None:
        with only_one(lock, "runs tests", said.append):
            order.append("second")

    with only_one(lock, "runs tests", said.append):
        thread = threading.Thread(target=second)
        thread.start()
        wait_until(lambda: said, "the second to wait")
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert said == [f"waiting for another process, which runs tests ({lock})"]


def test_a_snapshot_is_the_checkout_at_its_commit(tmp_path: Path) -> None:
    def git(directory: Path, *arguments: str) -> str:
        command = ("git", "-C", str(directory), *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return done.stdout

    if not git(CHECKOUT, "rev-parse", "HEAD"):
        pytest.skip("not a git checkout")
    copy_checkout(tmp_path / "copy")
    for question in (("rev-parse", "HEAD"), ("status", "--porcelain")):
        assert git(tmp_path / "copy", *question) == git(CHECKOUT, *question)
    assert (tmp_path / "copy" / "benchmarks" / "worker" / "__main__.py").exists()


@pytest.mark.parametrize(
    ("codes", "failed_first", "ending"),
    [
        ({0: 1, 1: 7}, [1], Ending("failed", "rank 1: exit code 7")),  # 0 by its peer's silence
        ({0: 0, 1: 7}, [], Ending("failed", "rank 1: exit code 7")),
        ({0: 1, 1: -9}, [1], killed(1, 9)),
        ({0: 1, 1: 0}, [0], None),  # its event says it
        ({0: 0, 1: 1}, [1], Ending("failed", "rank 1: exit code 1")),
        ({0: 0, 2: 1}, [2], Ending("failed", "rank 2: exit code 1", interrupted=True)),
        ({0: 1, 2: 0}, [2], Ending("failed", "rank 2: exit code 0", interrupted=True)),
    ],
)
def test_ranks_that_end_without_a_word_are_told_by_their_exit_codes(
    codes: dict[int, int], failed_first: list[int], ending: Ending | None
) -> None:
    """Rank 0 names its end in its file, rank 1 has no file, rank 2 an empty one."""
    said: Events = [{"event": "done" if codes[0] == 0 else "error", "time": 0.0}]
    if codes[0]:
        said[0] |= {"type": "RuntimeError", "message": "connection closed by peer"}
    assert local._ending_by_codes(codes, failed_first, {0: said, 2: []}) == ending


def test_a_rank_that_leaves_with_0_before_its_end_has_failed_first(tmp_path: Path) -> None:
    """The other, whose connection it closed, was blamed."""
    events, process = EventWriter(tmp_path, 1), create_autospec(BaseProcess, exitcode=0)
    assert local._left(process, tmp_path, 1)
    events.write("done")
    assert not local._left(process, tmp_path, 1)


def test_a_sweep_that_has_failed_fails_again_when_it_is_typed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path)
    ending = Ending("failed", "rank 1: ValueError: no such token")
    write_unstarted(PLANNED.spec, tmp_path / "runs", new_header("local"), ending)
    assert run_points([PLANNED], [config]) == 1
    said = capsys.readouterr().err
    assert "0 of 1 points to run with launcher=local, 1 already recorded" in said
    write_unstarted(PLANNED.spec, tmp_path / "runs", new_header("local"), Ending("ok"))
    assert run_points([PLANNED], [config]) == 0


def test_a_dry_run_says_why_and_how_long_with_any_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = changed("cluster.device.peak_fp32_tflops", 19.5)
    values["cluster"]["device"]["name"] = "A100"
    point = plan_point(spec_from_mapping(values))
    config = config_of(tmp_path, "simulate", dry_run=True) | {"rerun": "failed"}

    def told() -> str:
        assert run_points([point], [config]) == 0
        (line,) = (x for x in capsys.readouterr().err.splitlines() if "would run" in x)
        return line

    assert re.search(
        r"step \d\.\d{3} s, \d+ MiB, \S+ GPU-hours of steps \(simulated\); no record", told()
    )
    assert not (tmp_path / "runs").exists()
    ending = Ending("oom", "rank 1: out of memory")
    write_unstarted(point.spec, tmp_path / "runs", new_header("simulate"), ending)
    assert told().endswith("; last oom: rank 1: out of memory")
    assert len(list(find_records([tmp_path / "runs"]))) == 1


def test_what_ended_from_outside_is_run_again_as_often_as_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings = [Ending("lost", "its node is gone", True), Ending("ok"), Ending("failed", "no")]
    begun: list[Ending] = []

    def launch(points: list[Point], _: object, runs_dir: Path, __: object) -> list[RunRecord]:
        begun.append(endings[len(begun)])
        return [write_unstarted(p.spec, runs_dir, new_header("local"), begun[-1]) for p in points]

    monkeypatch.setattr(local, "launch", launch)
    config = config_of(tmp_path)
    for retries, rerun, statuses, runs in ((0, "missing", ["lost"], 1), (2, "all", ["failed"], 3)):
        if retries:
            begun[:] = [Ending("ok")] * 2  # the next one fails by itself: it is not tried again
        now = config | {"retries": retries, "rerun": rerun}
        assert [r.status for r in launch_points([PLANNED], [now]) or ()] == statuses
        assert len(begun) == runs
    begun.clear()
    (tmp_path / "other").mkdir()
    now = config | {"retries": 2, "runs_dir": str(tmp_path / "other")}
    assert ([r.status for r in launch_points([PLANNED], [now]) or ()], len(begun)) == (["ok"], 2)


def test_what_else_is_under_way_in_the_folder_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as the same command's points of before its configuration was edited."""
    announce([POINT], [POINT], [], "slurm", {"gpt-older": "job 7_0 is pending"})
    told = capsys.readouterr().err
    assert "(and 1 that are not of this sweep: zeropp status, zeropp cancel)" in told
    announce([POINT], [], [], "slurm", {POINT.spec.spec_id: "job 7_0 is pending"})
    assert "not of this sweep" not in capsys.readouterr().err


def drawn(monkeypatch: pytest.MonkeyPatch, runs_dir: Path, *, terminal: bool) -> str:
    """Everything that a sweep of one point writes to a place of 80 columns."""
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(bars, "CONSOLE", console)
    announce([POINT] * 3, [POINT], [], "simulate", {})
    with SweepProgress(1) as bar:
        bar.update(POINT, "warmup 0: loss 5.5880, 0.41 s, and much more than fits on the line")
        ending = Ending("failed", "no [such] luck " * 9)
        bar.finished(write_unstarted(POINT.spec, runs_dir, new_header("local"), ending))
    return out.getvalue()


def test_a_log_has_one_line_a_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = drawn(monkeypatch, tmp_path, terminal=False).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "infeasible", "failed"]
    assert lines[1].endswith(POINT.reason)


def test_what_is_settled_is_counted_and_only_failures_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = [spec_from_mapping(mapping() | {"seed": seed}) for seed in range(40)]
    points = [Point(spec, spec.plan(), note=f"auto: choice of {spec.seed}") for spec in specs]
    failed = [make_record(fields={"status": s, "reason": "2 GiB"}) for s in ("oom", "infeasible")]
    left = {spec.spec_id: "job 7 is pending" for spec in specs[:12]}
    out = io.StringIO()
    monkeypatch.setattr(bars, "CONSOLE", Console(file=out, width=80))
    announce(points, [points[-1]] * 3 + [points[-2]] * 2, failed, "local", left)
    notes, lines = out.getvalue().splitlines()[:2], out.getvalue().splitlines()[2:]
    assert notes == ["auto: choice of 39", "auto: choice of 38"]
    assert lines[0] == (
        "2 of 40 points to run with launcher=local, 5 runs in all, 12 under way, 26 already "
        "recorded (rerun=all runs them again), of them 1 oom, 1 infeasible (rerun=failed runs "
        "these)"
    )
    assert [line.split()[0] for line in lines[1:]] == ["oom"] + ["left"] * 11
    assert "2 more" in lines[-1]


def test_the_bar_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", drawn(monkeypatch, tmp_path, terminal=True))
    bars = [
        line for line in re.split(r"[\r\n]+", text) if "toy-zeropp-4gpu" in line and "/1 " in line
    ]
    assert bars
    assert all(re.search(r"\d:\d\d:\d\d", line) for line in bars)
    assert all(len(line) == 80 and line.endswith("…") for line in bars)


def test_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the work says nothing itself."""
    out = io.StringIO()
    monkeypatch.setattr(bars, "CONSOLE", Console(file=out, width=80, force_terminal=False))
    monkeypatch.setattr(bars, "_FIRST_LINE_S", 0.02)
    monkeypatch.setattr(bars, "_LOG_EVERY_S", 0.1)
    with bars.progress_line() as bar:
        bar.advance(bar.add_task("cells", total=9))
        time.sleep(0.45)
    lines = out.getvalue().splitlines()
    assert 2 <= len(lines) <= 5
    assert all(text.endswith(" s: 1 of 9, cells") for text in lines)


def test_a_refused_configuration_leaves_no_progress_behind() -> None:
    """Its lines stood below the error, and in the output of what came next."""
    before = {*threading.enumerate()}
    with pytest.raises(SpecError, match="contender/magic") as refused:
        compose("config", ["contender=magic"])
    wait_until(lambda: {*threading.enumerate()} <= before, f"an end of lines after {refused.value}")


@pytest.mark.parametrize("shows_steps", [True, False])
def test_every_step_is_shown_once_where_steps_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, shows_steps: bool
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(bars, "CONSOLE", Console(file=out, width=200, force_terminal=False))
    events: list[dict[str, Any]] = [{"event": "environment"}, {"event": "gate"}]
    events += [{"event": "warmup", "index": 0, "seconds": 1.0, "loss": 5.5}]
    events += [{"event": "step", "index": i, "seconds": 1.0, "loss": 5.0} for i in (1, 2)]
    with SweepProgress(1) as bar:
        watched = local._Watched(POINT, bar, shows_steps)
        for known in (0, 2, 4, 4, 5):
            watched.show(events[:known])
    lines = [line.split("  loss ")[0] for line in out.getvalue().splitlines()]
    expected = ["step    1 (warm-up)", "step    2", "step    3"] if shows_steps else []
    assert lines == expected


def test_a_trace_over_the_device_warns() -> None:
    fields = {"step_s": [], "ranks": [], "predicted": {"peak_bytes": 20 * 2**30}}
    traced = make_record(provenance="traced", fields=fields)  # on a device of 16 GiB
    assert over_device(traced) == "WARNING: 20.0 GiB are more than the device's 16 GiB"
    small = make_record(provenance="traced", fields=fields | {"predicted": {"peak_bytes": 2**30}})
    assert (over_device(small), over_device(make_record())) == ("", "")


STEP = {"event": "step", "index": 2, "seconds": 2.0, "loss": 5.54321, "grad_norm": 1.25}


def test_a_step_on_a_device_of_known_peak() -> None:
    values = spec_values(num_gpus=4)  # batch 16 of 64 tokens
    values["cluster"]["device"] |= {"peak_fp32_tflops": 0.001, "memory_gib": 8.0}
    line = step_line(read_spec(values), STEP | {"peak_bytes": 2 * 2**30})
    assert line.startswith("step    3  loss   5.5432  grad norm   1.2500  2.000 s  128 tokens/s  ")
    assert " GFLOP/s  MFU " in line
    assert line.endswith("memory 2.00 GiB (25.0%)")


def test_what_is_not_known_is_left_out() -> None:
    values = spec_values()
    values["cluster"]["device"] |= {"memory_gib": None}
    warmup = {"event": "warmup", "index": 0, "seconds": 2.0, "peak_bytes": 2**29}
    line = step_line(read_spec(values), warmup)
    assert line.startswith("step    1 (warm-up)  2.000 s  128 tokens/s  ")
    assert line.endswith("memory 512 MiB")
    assert not {"loss", "norm", "MFU"} & set(line.split())


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("num_gpus", "many", "integer"),
        ("num_gpus", 0, "at least 1"),
        ("optimizer.beta1", 1.5, "from 0 to less than 1"),
        ("optimizer.beta2", 1.0, "from 0 to less than 1"),
        ("optimizer.eps", -1.0, "at least 0"),
        ("precision", "fp4", "'fp32', 'bf16' or 'fp8'"),
        ("contender.pp", "all", "'auto'"),
        ("contender.chunks", 0, "at least 1"),
        ("contender.colour", "blue", "zeropp has no such knob (it has pp, shard"),
        ("contender.units", 4, "did you mean contender.unit?"),
        ("model.heads", 5, "must divide model.hidden=64"),
        ("model.kv_heads", 3, "must divide model.heads=4"),
        ("measure.warmup_steps", -1, "at least 0"),
        ("measure.timeout_s", float("nan"), "measure.timeout_s=nan: must be finite"),
        ("measure.timeout_s", float("inf"), "measure.timeout_s=inf: must be finite"),
        ("contender.prefetch", -1, "contender.prefetch=-1: must be at least 0"),
        ("cluster.gpus_per_node", 0, "cluster.gpus_per_node=0: must be at least 1"),
        ("cluster.intra.bandwidth_gb_s", 0, "must be more than 0"),
        ("model.dropout", 1.0, "model.dropout=1.0: must be from 0 to less than 1"),
        ("data.kind", "csv", "'text', 'megatron' or 'synthetic'"),
    ],
)
def test_bad_input_names_field_value_and_way_out(path: str, value: Any, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_from_mapping(changed(path, value))
    message = str(caught.value)
    assert message.startswith(path)
    assert repr(value) in message
    assert words in message
    assert "\n" not in message


def test_missing_key_is_named() -> None:
    values = mapping()
    del values["global_batch"]
    with pytest.raises(SpecError, match=r"^global_batch: missing"):
        spec_from_mapping(values)


def test_spec_id_depends_on_every_value_and_on_nothing_else(tmp_path: Path) -> None:
    assert TOY.spec_id == spec_from_mapping(mapping()).spec_id
    assert TOY.spec_id != spec_from_mapping(changed("optimizer.lr", 0.5)).spec_id
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(TOY.to_dict()))
    assert load_spec(path) == TOY
    with pytest.raises(AttributeError):
        TOY.num_gpus = 8  # type: ignore[misc]


def printed(
    runs_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *words: str,
    expect: int = 0,
) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["benchmarks.status", str(runs_dir), *words])
    assert main() == expect
    return capsys.readouterr().out.splitlines()


def sweep_of_layers_and_batches(runs_dir: Path) -> None:
    """Four points that ended ok, but with layers=8 batch=16 one that failed."""
    for layers, batch in product((4, 8), (8, 16)):
        spec = spec_from_mapping(changed("model.layers", layers) | {"global_batch": batch})
        ending = Ending("failed", "rank 0: no") if layers * batch == 128 else Ending("ok")
        write_unstarted(spec, runs_dir, new_header("local"), ending)


REASON = "contender.pp=3: " + "a long reason with /a/path/that/no/line/holds/" + "x" * 60


def test_a_reason_has_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_unstarted(TOY, tmp_path, new_header("local"), Ending("infeasible", REASON))
    row, reason, counts = printed(tmp_path, monkeypatch, capsys)
    assert row.split()[:3] == [TOY.spec_id, "infeasible", "measured,"]
    assert re.search(r" \d s ago$", row)
    assert reason == f"    {REASON}"
    assert counts == "1 infeasible"


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_folds_between_words_and_never_into_a_narrow_column(
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = {"COLUMNS": str(columns), "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}
    for name, value in terminal.items():
        monkeypatch.setenv(name, value)
    reason = "rank 1: RuntimeError: " + "expected all tensors on one device " * 9
    write_unstarted(TOY, tmp_path, new_header("local"), Ending("failed", f"{reason}{REASON}"))
    first, *folded, long, counts = printed(tmp_path, monkeypatch, capsys)
    assert first.split()[:2] == [TOY.spec_id, "failed"]
    assert 3 <= len(folded) <= 2 + len(reason) // (columns - 20)
    assert all(line.startswith("    ") and len(line) <= columns for line in folded)
    assert " ".join([*folded, long]).split() == f"{reason}{REASON}".split()
    assert long.split() == [REASON.split()[-1]]  # a word that is too long stays whole
    assert counts == "1 failed"


def test_an_attempt_that_is_under_way_counts_before_one_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_unstarted(TOY, tmp_path, new_header("slurm"), Ending("failed", "not submitted"))
    with started(TOY, new_header("local"), tmp_path) as attempt:
        EventWriter(attempt, 0).write("step", index=7, seconds=1.0)
        row, log, counts = printed(tmp_path, monkeypatch, capsys)
    assert log == f"    {attempt / 'rank_000.log'}"
    assert row.split()[:4] == [TOY.spec_id, "running", "step", "7"]
    assert "s ago" in row  # of a point that hangs, this is what shows it
    assert counts == "1 running"


def test_a_suspended_job_is_not_said_to_run(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(attempt, "7")
    job = replace(RUNNING, state="SUSPENDED")
    monkeypatch.setattr(sweep_status, "query_slurm", lambda runs_dir: view_of(attempt, job))
    row, _, counts = printed(attempt.parents[1], monkeypatch, capsys)
    assert row.split()[:4] == [attempt.parent.name, "suspended", "step", "0"]
    assert row.endswith("ago, 9:00 left, job 7_0, on node7")
    assert counts == "1 suspended"


def test_a_point_without_a_plan_is_gone_once_a_search_has_found_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = spec_from_mapping(mapping() | {"contender": {"name": "zeropp", "pp": "auto"}})
    header = new_header("simulate")
    write_unstarted(asked, tmp_path, header, Ending("infeasible", "no choice fits"))
    assert "infeasible" in printed(tmp_path, monkeypatch, capsys)[0]
    write_unstarted(spec_from_mapping(mapping()), tmp_path, header, Ending("ok"))
    row, counts = printed(tmp_path, monkeypatch, capsys)
    assert (row.split()[1], counts) == ("ok", "1 ok")


def test_what_differs_between_points_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_of_layers_and_batches(tmp_path)
    (tmp_path / "notes").mkdir()  # no point, and so not missing
    rows = printed(tmp_path, monkeypatch, capsys)
    named = sorted(" ".join(row.split()[2:4]) for row in rows if "-4gpu-" in row)
    pairs = ("4 global_batch=16", "4 global_batch=8", "8 global_batch=16", "8 global_batch=8")
    assert named == [f"model.layers={pair}," for pair in pairs]
    assert rows[-1] == "1 failed, 3 ok"
    told = json.loads("\n".join(printed(tmp_path, monkeypatch, capsys, "--json")))
    assert {"model.layers": "8", "global_batch": "16"} in [row["differs"] for row in told]


def test_what_follows_from_a_name_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = mapping()["model"] | {"name": "wide", "hidden": 128, "ffn": 512}
    for model in (mapping()["model"], other):
        spec = spec_from_mapping(mapping() | {"model": model})
        write_unstarted(spec, tmp_path, new_header("local"), Ending("ok"))
    rows = printed(tmp_path, monkeypatch, capsys)
    assert [row.split()[2] for row in rows[:-1]] == ["model=toy,", "model=wide,"]


@pytest.mark.parametrize(
    ("words", "counts", "code"),
    [
        (["--check"], "1 failed, 3 ok", 1),
        (["--check", "model.layers=4"], "2 ok", 0),
        (["measure.gate=True", "measure.gate_tolerance=1e-4", "model.layers=4"], "2 ok", 0),
        (["model.layers=", "--check"], "no points in", 1),
        (["--state", "lost"], "no points in", 0),
        (["contender=zeropp", "contender.pp=auto,2", "global_batch=8.0"], "2 ok", 0),
        (["notes", "model.layers=4"], "", 2),
        (["--check", "model.layers=4,8", "global_batch=16"], "1 failed, 1 ok", 1),
        (["--check", "--state", "ok"], "3 ok", 1),  # the state chooses rows, not what is checked
        (["--state", "failed"], "1 failed", 0),
        (["--check", "model=toy", "global_batch=32"], "no points in", 1),
        (["model.layer=4"], "", 2),
        (["--state", "broken"], "", 2),
    ],
)
def test_a_script_can_choose_points_and_check_them(
    words: list[str],
    counts: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep_of_layers_and_batches(tmp_path)
    rows = printed(tmp_path, monkeypatch, capsys, *words, expect=code)
    assert "".join(rows[-1:]).startswith(counts)
    assert bool(rows) == bool(counts)


def test_a_watched_sweep_is_listed_again_when_it_changes_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as running:
        running.enter_context(started(TOY, new_header("local"), tmp_path))
        naps: list[float] = []

        def nap(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 2:
                write_unstarted(TOY, tmp_path, new_header("local"), Ending("ok"))
                running.close()

        monkeypatch.setattr("time.sleep", nap)
        rows = printed(tmp_path, monkeypatch, capsys, "--watch", "--check")
    assert ([row for row in rows if row.startswith("1 ")], len(naps)) == (["1 running", "1 ok"], 2)


def test_a_head_width_is_part_of_a_spec_s_id_only_where_it_is_set() -> None:
    """Specs of before have none, and their records are found by their ids."""
    wide = replace(TOY, model=replace(TOY.model, head_width=32))
    assert "head_width" not in TOY.to_dict()["model"]
    assert spec_from_mapping(wide.to_dict()) == wide
    assert wide.spec_id != TOY.spec_id
