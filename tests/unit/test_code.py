"""What holds for the code itself: how functions are called, and how long they and files are."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator

import pytest

from tests.unit.source_trees import ROOT, children, inside, sources, trees

PACKAGES = ("zeropp", "baselines", "benchmarks")
MOST_POSITIONAL = 4
MOST_LINES_OF_A_FUNCTION = 40
MOST_LINES_OF_A_FILE = 300
MOST_LINES_OF_AN_EXAMPLE = 80

# Functions that take more positional arguments, and why.
EXCEPTIONS = {
    "zeropp/engine/deferred.py:_DeferredLinear.forward": "torch.autograd.Function.apply passes all "
    "arguments by position",
    "zeropp/schedule/justify.py:_Pass._arrive": "called for every action, in the inner loop of the "
    "planner, where keywords cost time",
}


def parsed() -> list[tuple[str, ast.Module]]:
    """The path and the syntax tree of every file of the project's packages."""
    return [found for package in PACKAGES for found in trees(package).items()]


def functions(
    tree: ast.AST, inside: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions of a file with their names, such as ``Engine.step``."""
    for node in children(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inside + node.name, node
            yield from functions(node, f"{inside}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{inside}{node.name}.")
        else:
            yield from functions(node, inside)


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of arguments that a caller may give by position."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def positional_fields(node: ast.ClassDef) -> int:
    """The number of arguments that a dataclass's constructor takes by position; 0 for other
    classes."""
    made = [ast.unparse(one) for one in node.decorator_list]
    made = [one for one in made if one.partition("(")[0] == "dataclass"]
    if not made or "kw_only=True" in made[0]:
        return 0
    count = 0
    for field in node.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        kind = ast.unparse(field.annotation)
        if kind == "KW_ONLY":
            break
        is_made = field.value is not None and "init=False" in ast.unparse(field.value)
        count += not (kind.startswith("ClassVar") or is_made)
    return count


def many_positional(tree: ast.Module) -> Iterator[str]:
    """Functions and dataclasses of a file that take more than ``MOST_POSITIONAL`` arguments by
    position."""
    for name, function in functions(tree):
        if positional(function) > MOST_POSITIONAL:
            yield name
    for node in inside(tree):
        if isinstance(node, ast.ClassDef) and positional_fields(node) > MOST_POSITIONAL:
            yield node.name


def test_many_arguments_are_given_by_name() -> None:
    found = {f"{path}:{name}" for path, tree in parsed() for name in many_positional(tree)}
    assert found == set(EXCEPTIONS)


@pytest.mark.parametrize(
    ("source", "noticed"),
    [
        ("def f(a, b, c, d, e): ...", ["f"]),
        ("def f(a, b, c, d, *, e): ...", []),
        ("class C:\n def f(self, a, b, c, d): ...", []),
        ("class C:\n def __init__(self, a, b, c, d, e): ...", ["C.__init__"]),
        ("def f():\n def g(a, b, c, d, e): ...", ["f.g"]),
        ("@dataclass\nclass C:\n a: int\n b: int\n c: int\n d: int\n e: int = 0", ["C"]),
        ("@dataclass(frozen=True)\nclass C:\n a: int\n b: int\n c: int\n d: int\n e: int", ["C"]),
        ("@dataclass(kw_only=True)\nclass C:\n a: int\n b: int\n c: int\n d: int\n e: int", []),
        ("@dataclass\nclass C:\n a: int\n _: KW_ONLY\n b: int\n c: int\n d: int\n e: int", []),
    ],
)
def test_many_positional_arguments_are_noticed(source: str, noticed: list[str]) -> None:
    assert list(many_positional(ast.parse(source))) == noticed


def test_functions_and_files_are_short() -> None:
    lengths = {
        f"{path}:{name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, tree in parsed()
        for name, node in functions(tree)
    }
    assert len(lengths) > 1000
    assert {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FUNCTION} == {}
    assert statistics.median(lengths.values()) <= 10
    texts = {path: text for package in PACKAGES for path, text in sources(package).items()}
    files = {path: text.count("\n") for path, text in texts.items()}
    assert {path: n for path, n in files.items() if n > MOST_LINES_OF_A_FILE} == {}


def test_examples_fit_on_a_page() -> None:
    examples = sorted((ROOT / "scripts" / "examples").glob("*.py"))
    assert len(examples) >= 2
    lengths = {path.name: path.read_text().count("\n") for path in examples}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES_OF_AN_EXAMPLE} == {}
