"""The answers of docs/questions.md: every command ends as the page says. Its code is run by
tests/gloo/test_questions.py."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import CHECKOUT

PAGE = (CHECKOUT / "docs" / "questions.md").read_text("utf-8")
COMMANDS = re.findall(r"```bash\n(.*?)\n```", PAGE, re.DOTALL)
# In one interpreter per command, with shorter searches than a person's.
RUN = """
import runpy, sys
import benchmarks.explain.answer
benchmarks.explain.answer.SEARCH_S = 0.5
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_every_question_has_links_and_an_answer() -> None:
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 18
    for section in sections:
        assert "https://github.com/" in section, section
        assert "```" in section or "](training.md)" in section, section


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers(command: str, tmp_path: Path) -> None:
    refused = command.startswith("! ")
    module, *words = shlex.split(command.removeprefix("! python -m ").removeprefix("python -m "))
    if module == "benchmarks.run":
        words += [f"runs_dir={tmp_path / 'runs'}", f"report_dir={tmp_path / 'report'}"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, module, *words],
        capture_output=True, text=True, timeout=300, check=False, cwd=CHECKOUT,
    )  # fmt: skip
    if refused:
        assert done.returncode == 2, done.stdout + done.stderr
        assert "error: " in done.stderr
    else:
        assert done.returncode in ((0, 1) if "explain" in module else (0,)), done.stderr
        assert done.stdout
