"""What a record says of the code that a run was made with: digest, commit and dirty flag."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.records.environment import git_state, read_code

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
    write(folder, "zeropp/a.py", "conf/b.yaml", "results/c.json")
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


def test_the_digest_follows_contents_of_python_files_and_of_conf(checkout: Path) -> None:
    before = read_code(ask_git=False).digest
    (checkout / "results/c.json").write_text("2")
    assert read_code(ask_git=False).digest == before
    (checkout / "conf/b.yaml").write_text("2")
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
@pytest.mark.parametrize("name", ["zeropp/engine/new.py", "conf/model/mine.yaml"])
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
