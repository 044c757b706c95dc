"""How long files and functions of the packages may be, and that text files are UTF-8 anywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("zeropp", "baselines", "benchmarks")
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_A_FILE = 700


@cache
def sources() -> dict[str, str]:
    """The text of every file of the packages, by its path."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


@cache
def trees() -> dict[str, ast.Module]:
    """The same, parsed."""
    return {path: ast.parse(text) for path, text in sources().items()}


def functions(inside: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a module; expressions, which are most of its nodes, have none."""
    for node in ast.iter_child_nodes(inside):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        if not isinstance(node, ast.expr):
            yield from functions(node)


def test_no_file_is_too_long() -> None:
    lengths = {path: text.count("\n") for path, text in sources().items()}
    assert len(lengths) > 50
    assert {path: n for path, n in lengths.items() if n > MOST_LINES_OF_A_FILE} == {}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{path}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, tree in trees().items()
        for node in functions(tree)
    }
    assert len(lengths) > 500
    assert {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FUNCTION} == {}


def writes_text(call: ast.Call) -> bool:
    """Whether a call reads or writes a text file: by the names of pathlib, gzip and builtins."""
    name = ast.unparse(call.func).rpartition(".")[2]
    modes = [word.value for word in call.args if isinstance(word, ast.Constant)]
    is_binary = any(isinstance(mode, str) and "b" in mode for mode in modes)
    is_open = name == "open" and ast.unparse(call.func) != "os.open" and not is_binary
    return is_open or name in ("read_text", "write_text")


def test_text_files_are_utf_8_in_every_locale() -> None:
    calls = {
        f"{path}:{node.lineno}": node
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and writes_text(node)
    }
    assert len(calls) > 30
    named = {place for place, call in calls.items() if "utf-8" in ast.unparse(call)}
    assert set(calls) - named == set()
