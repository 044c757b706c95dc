"""Every command of the documentation is one that the suite takes: its words are read, and its
points are composed and checked. Those of docs/questions.md are run, and end as the page says;
its code is run by tests/gloo/test_docs.py."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.explain import answer
from benchmarks.launch.sweep import spec_of
from benchmarks.show import parse, split_form
from benchmarks.specification.command import CommandParser
from benchmarks.specification.compose import compose
from tests.slurm.commands import call
from zeropp.__main__ import FOLDERS

PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]


class WordsRead(BaseException):
    """The command's words were read without an error."""


def only_parse(name: str) -> Callable[[CommandParser, list[str] | None], None]:
    """A method of parsers that parses, and goes no further."""
    method = getattr(CommandParser, name)

    def parsed(self: CommandParser, words: list[str] | None = None) -> None:
        method(self, words)
        raise WordsRead

    return parsed


def commands(page: Path) -> Iterator[list[str]]:
    """The module and the words of every command in a page's code blocks."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^\s*zeropp (?=\w)", "python -m benchmarks.", line)
            if found := re.match(r"\s*python -m (benchmarks\..*)", line):
                words = shlex.split(found[1], comments=True)
                words = words[: words.index(">")] if ">" in words else words
                if not {"...", "--help"} & set(words):
                    yield words


@cache
def check_points(words: tuple[str, ...]) -> None:
    """Compose and check every point; pages repeat commands."""
    for config in compose("config", words):
        if "verdict" not in config:
            spec_of(config)


def read(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the words as the command would; ends with SystemExit or SpecError where it refuses."""
    if module == "benchmarks.run":
        check_points(tuple(words))
    elif module == "benchmarks.tune":
        assert compose("tune", words)
    elif module == "benchmarks.show":
        assert words[0] == "schedule"
        parse(split_form(words[1:])[0])
    else:
        monkeypatch.setattr(sys, "argv", [module, *words])
        name = module.removeprefix("benchmarks.")
        is_folder = (CHECKOUT / module.replace(".", "/")).is_dir()
        file = FOLDERS.get(name, f"{name}.__main__" if is_folder else name)
        main = importlib.import_module(f"benchmarks.{file}").main
        with monkeypatch.context() as only:
            for method in ("parse_args", "parse_intermixed_args"):
                only.setattr(CommandParser, method, only_parse(method))
            with pytest.raises(WordsRead):
                main()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_suite_takes_every_command(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, *words in commands(page):
        read(module, words, monkeypatch)


def test_an_experiment_may_make_a_command_a_sweep() -> None:
    names = [config["contender"]["name"] for config in compose("config", ["experiment=peers"])]
    assert len(names) > len(set(names)) > 1


def test_there_are_commands() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 35


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
