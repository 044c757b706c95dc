"""The project's Python files and their syntax trees, each of which is read and parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
def nodes(folder: str) -> dict[str, list[ast.AST]]:
    """All nodes of these trees; to walk through a tree takes longer than to parse it."""
    return {name: list(ast.walk(tree)) for name, tree in trees(folder).items()}
