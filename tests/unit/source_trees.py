"""The project's Python files and their syntax trees, each of which is read and parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


@cache
def sources(folder: str) -> dict[str, str]:
    """The text of every Python file below a folder of the project, by its path from the root."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def trees(folder: str) -> dict[str, ast.Module]:
    """The syntax trees of these files, which nobody may change."""
    return {name: ast.parse(text) for name, text in sources(folder).items()}


@cache
def statements(folder: str) -> dict[str, list[ast.AST]]:
    """All statements of these files, those inside others too; without their expressions."""
    return {name: list(inside(tree)) for name, tree in trees(folder).items()}


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The statements, handlers and cases right inside a statement. No expression holds a statement,
    and to go through all expressions takes ten times as long."""
    for field in _BLOCKS:
        yield from getattr(node, field, ())


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """All statements inside a module or a statement, however deep."""
    for child in children(node):
        yield child
        yield from inside(child)
