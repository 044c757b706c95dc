"""Records from what ranks wrote: every way an attempt can end, and what a record says of the code.
No torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch.attempt import (
    ALIVE,
    BEAT_S,
    QUIET_S,
    DamagedError,
    Ending,
    age_s,
    close_abandoned,
    finish_attempt,
    freeze,
    is_alive,
    keep_alive,
    killed,
    new_header,
    started,
    write_unstarted,
)
from benchmarks.launch.points import Point, Rerun, plan_point, records_of, still_to_run
from benchmarks.records.environment import git_state, read_code
from benchmarks.records.events import EventWriter
from benchmarks.records.record import RecordError, find_records, read_record
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.unit.conftest import silent_for
from tests.unit.toy_spec import mapping
from tests.waiting import wait_until
from zeropp.types.timeline import Provenance


@pytest.fixture
def spec() -> RunSpec:
    return spec_from_mapping(
        mapping() | {"num_gpus": 2, "measure": {"warmup_steps": 1, "steps": 2}}
    )


@pytest.fixture
def attempt(tmp_path: Path, spec: RunSpec) -> Path:
    directory = tmp_path / spec.spec_id / "local-1"
    directory.mkdir(parents=True)
    freeze(spec, new_header("local"), directory)
    return directory


def write_rank(directory: Path, rank: int, *, steps: int = 2, done: bool = True) -> EventWriter:
    events = EventWriter(directory, rank)
    events.write("environment", host=f"node{rank}")
    events.write("warmup", index=0, seconds=9.0, loss=5.0)
    for index in range(steps):
        events.write("step", index=1 + index, seconds=1.0 + rank + index, loss=4.0 - index)
    if done:
        events.write("memory", peak_rss_bytes=100 + rank)
        events.write("counters", unshard=8)
        events.write("done")
    return events


def test_a_whole_attempt(attempt: Path, spec: RunSpec) -> None:
    row = [0, "compute", "0F0", 0.0, 1.0]
    write_rank(attempt, 0).write("spans", clock="compute stream", rows=[row])
    write_rank(attempt, 1)
    record = finish_attempt(attempt)
    assert (record.status, record.reason) == ("ok", "")
    assert (record.spans, record.span_clock) == ([row], "compute stream")
    timed = (record.warmup_s, record.step_s, record.losses)  # the slower rank of each step
    assert timed == ([9.0], [2.0, 3.0], [5.0, 4.0, 3.0])
    assert [rank.peak_rss_bytes for rank in record.ranks] == [100, 101]
    assert record.ranks[1].environment["host"] == "node1"
    assert record.spec_id == spec.spec_id
    assert read_record(attempt / "record.json") == record


def test_records_in_hidden_folders_are_not_of_these_runs(attempt: Path) -> None:
    """A snapshot of the checkout lies below the runs folder, with the committed records in it."""
    write_rank(attempt, 0)
    finish_attempt(attempt)
    runs = attempt.parents[1]
    copy = runs / "slurm" / "sweep" / ".checkout" / "results" / "point" / "local-1"
    copy.mkdir(parents=True)
    (copy / "record.json").write_text((attempt / "record.json").read_text())
    assert list(find_records([runs])) == [attempt / "record.json"]
    assert len(list(find_records([copy]))) == 1  # asked for by its name


def test_records_are_found_behind_links_once_and_closed_folders_are_named(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(attempt, 0)
    finish_attempt(attempt)
    linked, closed = attempt.parent / "a link", attempt.parent / "closed"
    linked.mkdir()
    (linked / "point").symlink_to(attempt)
    (linked / "round").symlink_to(linked)
    (linked / "same").symlink_to(attempt)
    assert list(find_records([linked / "same"])) == [linked / "same" / "record.json"]
    assert list(find_records([linked])) == [linked / "point" / "record.json"]
    closed.mkdir()
    scandir = os.scandir

    def refuse(place: str) -> object:
        if str(place) == str(closed):  # as for another user than root, whom modes do not stop
            raise PermissionError(13, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    assert sorted(find_records([attempt.parent])) == [closed, attempt / "record.json"]


def test_an_attempt_has_one_record(attempt: Path) -> None:
    write_rank(attempt, 0)
    first = finish_attempt(attempt)
    write_rank(attempt, 1)
    with pytest.raises(FileExistsError, match="is there, and no record is overwritten"):
        finish_attempt(attempt)
    assert read_record(attempt / "record.json") == first


def test_what_was_measured_before_a_kill_is_kept(attempt: Path) -> None:
    write_rank(attempt, 0, steps=2, done=False)
    write_rank(attempt, 1, steps=1, done=False)
    with (attempt / "rank_001.jsonl").open("a") as file:
        file.write('{"event": "st')  # cut off in mid-write
    record = finish_attempt(attempt, killed(1, 9))
    assert (record.status, record.interrupted) == ("failed", True)
    assert (
        record.reason
        == "rank 1 was killed by signal 9 (SIGKILL; often the system's, for lack of memory)"
    )
    assert record.step_s == [2.0]  # only steps that every rank finished


CLOSED = ("error", {"type": "RuntimeError", "message": "peer closed"})


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (("error", {"type": "ValueError", "message": "token 999\nmore"}), CLOSED,
         Ending("failed", "rank 1: ValueError: token 999")),
        (CLOSED, ("oom", {"type": "OutOfMemoryError", "message": "tried 2 GiB"}),
         Ending("oom", "rank 0: OutOfMemoryError: tried 2 GiB")),
        (("signal", {"name": "SIGTERM"}), CLOSED,
         Ending("failed", "rank 1 left on SIGTERM", interrupted=True)),
        (("error", {"type": "AssertionError", "message": ""}), CLOSED,
         Ending("failed", "rank 1: AssertionError")),
        (("oom", {"type": "MemoryError", "message": ""}), CLOSED,
         Ending("oom", "rank 1: MemoryError")),
    ],
)  # fmt: skip
def test_the_first_end_is_the_reason_but_after_lack_of_memory(
    attempt: Path, first: Any, second: Any, expected: Ending
) -> None:
    for rank, (kind, fields) in ((1, first), (0, second)):
        write_rank(attempt, rank, done=False).write(kind, **fields)
    record = finish_attempt(attempt)
    assert Ending(record.status, record.reason, record.interrupted) == expected
    assert record.step_s == [2.0, 3.0]


def test_a_failed_gate_names_the_worst_parameter(attempt: Path) -> None:
    def check(kind: str, worst: str, error: float) -> dict[str, Any]:
        return {"kind": kind, "worst": worst, "step": 2, "error": error, "limit": 0.01}

    checks = [check("loss (sgd)", "", 0.02), check("mlp.up.weight", "3.mlp.up.weight", 0.5)]
    fields = {"loss_error": 0.02, "grad_norm_error": 0.0, "parameter_error": 0.5, "shape": "toy"}
    EventWriter(attempt, 0).write("gate", passed=False, tolerance=1e-4, checks=checks, **fields)
    record = finish_attempt(attempt)
    assert record.reason == (
        "gate: 3.mlp.up.weight differs from one process by 5.0e-01 in step 2, relative to its own; "
        "allowed 1.0e-02; 1 more of 2 checks failed"
    )
    assert read_record(attempt / "record.json") == record


def test_a_damaged_line_costs_itself_alone(attempt: Path) -> None:
    write_rank(attempt, 0, steps=2, done=False)
    path = attempt / "rank_000.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = lines[1][:20]  # the warm-up
    path.write_bytes("\n".join([*lines, "[1]", '{"event": 3}', ""]).encode() + b"\xff\x00\n")
    write_rank(attempt, 1, steps=2)
    record = finish_attempt(attempt)
    assert (record.step_s, record.warmup_s) == ([2.0, 3.0], [])
    assert record.reason == "1 of 2 ranks ended without saying why"


@pytest.mark.parametrize(("longest_s", "is_noted"), [(24.0, True), (4.9, False)])
def test_a_step_that_holds_a_pause_is_noted(
    attempt: Path, longest_s: float, is_noted: bool
) -> None:
    for rank in range(2):
        events = EventWriter(attempt, rank)
        for index, seconds in enumerate([0.1, 0.1, longest_s if rank else 0.1, 0.1]):
            events.write("step", index=index, seconds=seconds)
        events.write("done")
    record = finish_attempt(attempt)
    assert record.status == "ok"
    notes = [note for note in record.notes if note.startswith("timed step 3 of 4 took 24.0 s")]
    assert len(notes) == len(record.notes) == is_noted


_HOLDER = """
import sys
from pathlib import Path
from benchmarks.launch.attempt import keep_alive
with keep_alive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_whoever_holds_an_attempt_is_alive_until_it_ends_however_it_ends(attempt: Path) -> None:
    """Also from another container: with process numbers of its own."""
    command = [sys.executable, "-c", _HOLDER, str(attempt / ALIVE)]
    for words in (command, ["unshare", "--pid", "--fork", "--kill-child", *command]):
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        if holder.stdout.readline() != "held\n":
            pytest.skip("no other namespaces here")
        silent_for(attempt, 2 * QUIET_S)  # on this machine the lock decides
        assert is_alive(attempt)
        assert close_abandoned(attempt.parents[1]) == []
        assert not (attempt / "record.json").exists()
        holder.kill()
        holder.wait()
        # the one inside dies with the one outside
        wait_until(lambda: not is_alive(attempt), "the end of whoever holds the attempt")


def test_elsewhere_the_heartbeat_decides(attempt: Path) -> None:
    (attempt / ALIVE).write_text("another boot of another machine")
    for silent_s, alive in ((0, True), (QUIET_S - 10, True), (QUIET_S + 10, False)):
        silent_for(attempt, silent_s)
        assert is_alive(attempt) == alive


def test_a_holder_beats(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BEAT_S < QUIET_S / 3
    monkeypatch.setattr("benchmarks.launch.attempt.BEAT_S", 0.01)
    with keep_alive(attempt / ALIVE):
        silent_for(attempt, QUIET_S)
        wait_until(lambda: age_s(attempt / ALIVE) < QUIET_S / 2, "a beat")


def test_nothing_is_recorded_of_what_cannot_be_read(attempt: Path) -> None:
    (attempt / "spec.json").write_text("{")
    with pytest.raises(DamagedError, match=r"spec.json: not readable as JSON"):
        finish_attempt(attempt)


def test_an_attempt_whose_launcher_died_is_closed(attempt: Path) -> None:
    write_rank(attempt, 0, done=False)
    assert close_abandoned(attempt.parents[1]) == []
    record = read_record(attempt / "record.json")
    assert (record.reason, record.step_s) == ("the launcher was killed", [1.0, 2.0])
    assert record.record_id == f"{attempt.parent.name}/{attempt.name}"


@pytest.mark.parametrize(
    ("ending", "missing", "failed"),
    [
        (Ending("ok"), False, False),
        (Ending("failed", "gate"), False, True),
        (Ending("failed", "killed", interrupted=True), True, True),
        (Ending("oom", "2 GiB"), False, True),
    ],
)
def test_which_points_run_again(
    attempt: Path, spec: RunSpec, ending: Ending, missing: bool, failed: bool
) -> None:
    finish_attempt(attempt, ending)
    runs_dir, points = attempt.parents[1], [Point(spec, None, "")]

    def to_run(rerun: Rerun, provenance: Provenance = "measured") -> list[Point]:
        return still_to_run(points, runs_dir, provenance=provenance, variant="", rerun=rerun)[0]

    assert bool(to_run("missing")) == missing
    assert bool(to_run("failed")) == failed
    assert to_run("all") == points
    assert to_run("missing", "simulated") == points


def test_unreadable_records_are_named_and_skipped(attempt: Path, spec: RunSpec) -> None:
    write_unstarted(spec, attempt.parents[1], new_header("local"), Ending("infeasible", "why"))
    write_rank(attempt, 0)
    finish_attempt(attempt)
    document: dict[str, Any] = json.loads((attempt / "record.json").read_text())
    for change, why in (({"status": "splendid"}, "status"), ({"schema_version": 9}, "version.*9")):
        (attempt / "record.json").write_text(json.dumps(document | change))
        with pytest.raises(RecordError, match=f"record.json: .*{why}"):
            read_record(attempt / "record.json")
    assert [r.status for r in records_of(spec, attempt.parents[1])] == ["infeasible"]


def test_the_code_is_that_of_the_rank_and_not_of_the_launcher(attempt: Path) -> None:
    for rank, digest in enumerate(("edited", "edited", "another")):
        code = {"sha": "abc", "dirty": rank == 0, "digest": digest}
        EventWriter(attempt, rank).write("environment", host="node", code=code)
    record = finish_attempt(attempt)
    assert (record.git_sha, record.git_dirty, record.code_digest) == ("abc", True, "edited")
    assert record.notes == [
        "the suite's files changed between submission and start; the ranks' count",
        "other files of the suite than on rank 0 ran on ranks 2",
    ]


def test_without_a_word_of_rank_0_the_launcher_s_code_stands(attempt: Path) -> None:
    record = finish_attempt(attempt)
    code = read_code()
    assert (record.git_sha, record.code_digest, record.notes) == (code.sha, code.digest, [])


@pytest.mark.parametrize(
    ("steps", "deaf", "who"),
    [
        ([3, 2], [], "; steps done: 2 by rank 1, 3 by others"),
        ([3, 3], [0], "; steps done: 3; rank 0 did not answer"),
        ([2, 3], [0], "; steps done: 2 by rank 0, 3 by others; rank 0 did not answer"),
        ([3, 3], [0, 1], "; steps done: 3"),
        ([0, 0], [1], "; rank 1 did not answer"),
        ([0, 0], [], ""),
    ],
)
def test_what_was_done_in_time_is_told_with_the_rank_that_does_not_answer(
    tmp_path: Path, spec: RunSpec, steps: list[int], deaf: list[int], who: str
) -> None:
    with started(spec, new_header("local"), tmp_path) as attempt:
        for rank, number in enumerate(steps):
            writer = EventWriter(attempt, rank)
            writer.write("environment")
            for index in range(number):
                writer.write("step", index=index, seconds=1.0)
            if rank not in deaf:
                writer.write("signal", name="SIGTERM")
        assert finish_attempt(attempt, Ending("timeout", "late")).reason == f"late{who}"


def test_colours_and_half_letters_of_a_message_are_not_recorded(attempt: Path) -> None:
    record = finish_attempt(attempt, Ending("failed", "rank 1: \x1b[31mbad\x1b[0m \udc80\x07name"))
    assert record.reason == "rank 1: bad name"
    assert read_record(attempt / "record.json").reason == "rank 1: bad name"


@pytest.mark.parametrize(
    ("reasons", "settled"),
    [
        (["rank 1 was killed by signal 9 (SIGKILL)"] * 2, False),
        ([f"rank {rank} was killed by signal 9 (SIGKILL)" for rank in (1, 0, 1)], True),
        (["rank 1: Killed (srun)"] * 3, True),
        (["2 of 2 ranks ended without saying why"] * 3, True),
        (["Slurm: CANCELLED"] * 3, False),
        (["rank 1: Killed (srun)", "Slurm: CANCELLED", "rank 1: Killed (srun)"], False),
    ],
)
def test_what_is_killed_each_time_does_not_run_for_ever(
    tmp_path: Path, spec: RunSpec, reasons: list[str], settled: bool
) -> None:
    for reason in reasons:
        ending = Ending("failed", reason, interrupted=True)
        write_unstarted(spec, tmp_path, new_header("local"), ending)
    points = [plan_point(spec)]
    missing, failed = still_to_run(
        points, tmp_path, provenance="measured", variant="", rerun="missing"
    )
    assert (missing, [record.reason for record in failed]) == (
        ([], reasons[-1:]) if settled else (points, [])
    )
    assert still_to_run(points, tmp_path, provenance="measured", variant="", rerun="failed")[0]


NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="not installed: git")
UNKNOWN = ("unknown", True)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1\n")


def git(folder: Path, *words: str) -> str:
    """What git prints; it reads no configuration but the repository's own."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    variables |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    person = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = subprocess.run(
        ["git", *person, "-C", str(folder), *words],
        capture_output=True,
        text=True,
        check=True,
        env=variables,
        timeout=300,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the suite takes for its checkout; git has not seen it."""
    folder = tmp_path / "outer" / "checkout"
    write(folder, "zeropp/a.py", "conf/program/b.yaml", "results/c.json")
    return at(folder, monkeypatch)


def at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("benchmarks.records.environment.CHECKOUT", folder)
    return folder


def committed(folder: Path) -> str:
    """Make the folder a repository with one commit of all its files; returns the commit."""
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "all")
    return git(folder, "rev-parse", "HEAD")


def test_the_digest_follows_what_takes_part_in_a_run(checkout: Path) -> None:
    before = read_code(ask_git=False).digest
    write(checkout, "conf/launcher/mine.yaml", "benchmarks/report/new.py", "conf/model/mine.yaml")
    (checkout / "results/c.json").write_text("2")
    assert read_code(ask_git=False).digest == before
    (checkout / "conf/program/b.yaml").write_text("2")
    assert read_code(ask_git=False).digest != before


@NEEDS_GIT
def test_a_commit_is_named_and_what_differs_from_it_is_told(checkout: Path) -> None:
    sha = committed(checkout)
    assert git_state() == (sha, False)
    write(checkout, "results/new.json", "zeropp/notes.txt")
    assert git_state() == (sha, False)
    (checkout / "results/c.json").write_text("2")
    assert git_state() == (sha, True)


@NEEDS_GIT
@pytest.mark.parametrize("name", ["zeropp/engine/new.py", "conf/program/mine.yaml"])
def test_a_file_of_the_suite_that_git_does_not_have_makes_it_dirty(
    name: str, checkout: Path
) -> None:
    write(checkout, ".gitignore")
    (checkout / ".gitignore").write_text("mine.yaml\n")
    sha = committed(checkout)
    assert git_state() == (sha, False)
    write(checkout, name)
    assert git_state() == (sha, True)


@NEEDS_GIT
def test_variables_name_no_other_repository_but_may_configure_git(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha, other = committed(checkout), tmp_path / "other"
    write(other, "theirs.txt")
    committed(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # as in a hook
    assert git_state() == (sha, False)
    (checkout / "zeropp/a.py").chmod(0o755)
    assert git_state() == (sha, True)
    for name, value in (("COUNT", "1"), ("KEY_0", "core.fileMode"), ("VALUE_0", "false")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert git_state() == (sha, False)


@NEEDS_GIT
def test_shallow_clones_and_worktrees_are_named(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(checkout)
    (checkout / "zeropp/a.py").write_text("2")
    git(checkout, "commit", "--quiet", "-am", "more")
    sha, source = git(checkout, "rev-parse", "HEAD"), checkout.as_uri()
    git(tmp_path, "clone", "--quiet", "--depth", "1", source, "shallow")
    git(checkout, "worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"))
    for name in ("shallow", "tree"):
        folder = at(tmp_path / name, monkeypatch)
        assert git_state() == (sha, False)
        (folder / "zeropp/a.py").write_text("3")
        assert git_state() == (sha, True)


@NEEDS_GIT
def test_without_git_or_a_repository_of_its_own_nothing_is_known(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_state() == UNKNOWN
    write(checkout.parent, "theirs.txt")  # a repository around the files is not theirs
    (checkout.parent / ".gitignore").write_text("checkout\n")
    committed(checkout.parent)
    assert git_state() == UNKNOWN
    monkeypatch.setenv("PATH", str(checkout))
    code = read_code()
    assert (code.sha, code.dirty) == UNKNOWN
    assert len(code.digest) == 16


@NEEDS_GIT
def test_a_git_that_does_not_answer_is_not_taken_for_a_clean_checkout(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sha = committed(checkout)
    real, wrapper = shutil.which("git"), tmp_path / "bin" / "git"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *\' status \'*) exit 1;; esac\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    assert git_state() == (sha, True)
