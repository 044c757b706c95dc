"""The structure of the packages: rooms, floors and circles of imports, lengths of files and
functions; and that text files are UTF-8 anywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("zeropp", "baselines", "benchmarks")
MOST_LINES_OF_A_FUNCTION = 60  # of its code: neither its signature nor its docstring counts
MOST_LINES_OF_A_FILE = 700
# The rooms of the library, from the top floor to the ground. A room imports those of lower floors.
FLOORS = (
    ("zeropp", "zeropp.__main__"),
    ("zeropp.huggingface",),
    ("zeropp.train",),
    ("zeropp.choose", "zeropp.emulate"),
    ("zeropp.engine",),
    ("zeropp.price",),
    ("zeropp.schedule",),
    ("zeropp.types",),
)
MOST_IMPORTS_BETWEEN_ROOMS = 27


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


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function behind its signature and its docstring."""
    body = function.body[ast.get_docstring(function) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{path}:{node.name}": code_lines(node)
        for path, tree in trees().items()
        for node in functions(tree)
    }
    assert len(lengths) > 500
    assert {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FUNCTION} == {}


def module_of(path: str) -> str:
    """The dotted name of a file's module."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(inside: ast.AST) -> Iterator[str]:
    """The names that code imports, also where a function does, but not for types alone."""
    for node in ast.iter_child_nodes(inside):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif not isinstance(node, ast.expr):
            yield from imported(node)


@cache
def imports() -> dict[str, set[str]]:
    """The modules of this project that each of its modules imports."""
    modules = set(map(module_of, sources()))

    def found(names: Iterator[str]) -> set[str]:
        return {name if name in modules else name.rpartition(".")[0] for name in names} & modules

    return {module_of(path): found(imported(tree)) for path, tree in trees().items()}


def room_of(module: str) -> str:
    """``zeropp.engine`` of ``zeropp.engine.parameters.flat``."""
    return ".".join(module.split(".")[:2])


def test_the_library_is_one_chain_of_rooms() -> None:
    floors = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    arrows = {
        (room_of(module), room_of(target))
        for module, targets in imports().items()
        for target in targets
        if module.startswith("zeropp") and room_of(module) != room_of(target)
    }
    assert {room for arrow in arrows for room in arrow} <= floors.keys()
    assert {room_of(module) for module in imports() if module.startswith("zeropp")} == set(floors)
    assert {arrow for arrow in arrows if floors[arrow[0]] >= floors[arrow[1]]} == set()
    assert 15 < len(arrows) <= MOST_IMPORTS_BETWEEN_ROOMS


def test_no_files_import_each_other_in_a_circle() -> None:
    others = {module: targets - {module} for module, targets in imports().items()}
    TopologicalSorter(others).prepare()  # raises CycleError, with the files of one


def writes_text(call: ast.Call) -> bool:
    """Whether a call reads or writes a text file: by the names of pathlib, gzip and builtins."""
    name = ast.unparse(call.func).rpartition(".")[2]
    modes = [word.value for word in call.args if isinstance(word, ast.Constant)]
    is_binary = any(isinstance(mode, str) and "b" in mode for mode in modes)
    of_bytes = ast.unparse(call.func) in ("os.open", "Image.open") or is_binary
    is_open = name == "open" and not of_bytes
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
