"""The answers of docs/questions.md: every command ends as the page says. Its code is run by
tests/gloo/test_docs.py."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.explain import answer
from tests.slurm.commands import call

PAGE = (CHECKOUT / "docs" / "questions.md").read_text("utf-8")
COMMANDS = re.findall(r"```bash\n(.*?)\n```", PAGE, re.DOTALL)


def test_every_question_has_links_and_an_answer() -> None:
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 18
    for section in sections:
        assert "https://github.com/" in section, section
        assert "```" in section or "](training.md)" in section, section


def search_shorter() -> None:
    """Than a person does, in the process of a command."""
    answer.SEARCH_S = 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers(command: str, tmp_path: Path) -> None:
    _, refused, told = command.rpartition("! ")
    word, *words = shlex.split(told.removeprefix("zeropp "))
    module = f"benchmarks.{word}"
    if module == "benchmarks.run":
        words += [f"runs_dir={tmp_path / 'runs'}", f"report_dir={tmp_path / 'report'}"]
    module += ".__main__" * (CHECKOUT / module.replace(".", "/")).is_dir()
    done = call(module, words, os.environ, search_shorter)
    if refused:
        assert done.returncode == 2, done.printed
        assert "error: " in done.printed
    else:
        assert done.returncode in ((0, 1) if "explain" in module else (0,)), done.printed
        assert done.stdout
