"""What holds for the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.source_trees import trees


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Names of the modules that a file imports, and of what it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_module_imports_another() -> None:
    """What two of them need lies in a module that is no test."""
    files = trees("tests")
    assert len(files) > 70
    borrowed = [
        f"{path} imports {name}"
        for path, tree in files.items()
        for name in imported_modules(tree)
        if name.startswith("tests.") and any(p.startswith("test_") for p in name.split("."))
    ]
    assert borrowed == []
