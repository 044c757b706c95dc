"""The digest of the code that a run was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.records.environment import read_code


def test_the_digest_follows_contents_of_python_files_and_of_conf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.records.environment.CHECKOUT", tmp_path)
    for name in ("zeropp/a.py", "conf/b.yaml", "results/c.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    before = read_code(ask_git=False).digest
    (tmp_path / "results/c.json").write_text("2")
    assert read_code(ask_git=False).digest == before
    (tmp_path / "conf/b.yaml").write_text("2")
    assert read_code(ask_git=False).digest != before
