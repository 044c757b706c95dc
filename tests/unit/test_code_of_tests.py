"""What holds for the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.source_trees import statements


def imported_modules(every: list[ast.AST]) -> Iterator[str]:
    """Names of the modules that a file with these statements imports, and of what it takes from
    them."""
    for node in every:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_module_imports_another() -> None:
    """What two of them need lies in a module that is no test."""
    files = statements("tests")
    assert len(files) > 70
    borrowed = [
        f"{path} imports {name}"
        for path, every in files.items()
        for name in imported_modules(every)
        if name.startswith("tests.") and any(p.startswith("test_") for p in name.split("."))
    ]
    assert borrowed == []
