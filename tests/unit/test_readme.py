"""CONTRIBUTING's table of where things are: what it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = [
    "where ZeroPP's schedule is made",
    "in what order gradients are reduced over replicas",
    "where parameters are gathered",
    "how a DeepSpeed run starts",
    "where a record is written",
    "what a matrix product takes",
    "how to add a contender",
]


def answers() -> dict[str, str]:
    """The table's answers by question."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| you look for | it is in |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()]
    return {question.strip(): answer.strip() for question, answer in rows}


def defined(path: Path) -> set[str]:
    """Names of a file's functions, classes, methods and constants."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assigned = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return named | assigned


def test_the_table_answers_every_question() -> None:
    assert list(answers()) == QUESTIONS


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_an_answer_names_exists(question: str) -> None:
    """A path in backticks, or a path and after it the name of something that it defines."""
    answer = answers()[question]
    places = re.findall(r"`([\w/.]+/[\w.]*)`(?: `(\w+)`)?", answer)
    places += [(path, "") for path in re.findall(r"\]\(([\w/.]+)\)", answer)]
    assert places
    named = sum(1 + bool(name) for path, name in places)
    assert named == answer.count("`") // 2 + answer.count("](")
    for path, name in places:
        assert (ROOT / path).exists(), path
        assert not name or name in defined(ROOT / path), (path, name)


def test_the_reading_list_says_how_long_each_file_is() -> None:
    """Two lists of six files, each with its lines, to a fifth."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Read the code")[2]
    files = re.findall(r"^\d\. `([\w/.]+)` \((\d+) lines\)", text, flags=re.MULTILINE)
    assert len(files) == 12
    for path, lines in files:
        length = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        assert length == pytest.approx(int(lines), rel=0.2), path
