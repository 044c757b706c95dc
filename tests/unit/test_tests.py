"""What holds for the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]


def imported_modules(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, and of what it takes from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_module_imports_another() -> None:
    """What two of them need lies in a module that is no test."""
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 70
    borrowed = [
        f"{path.relative_to(TESTS)} imports {name}"
        for path in files
        for name in imported_modules(path)
        if name.startswith("tests.") and any(p.startswith("test_") for p in name.split("."))
    ]
    assert borrowed == []
