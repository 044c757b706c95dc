"""Every package that is imported is declared in pyproject.toml, where it is needed."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions

import pytest

from tests.unit.source_trees import ROOT, trees

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"zeropp", "baselines", "benchmarks", "docs", "scripts", "tests"}
LIBRARY = ("zeropp",)  # the wheel: torch alone
SUITE = ("baselines", "benchmarks")
DEVELOP = ("tests", "scripts", "notebooks", "docs")


def imported(folder: str) -> set[str]:
    """Top-level names of all foreign packages that a folder's files import, but for those without
    which a file says in its own words that they are missing."""
    found = set()
    for tree in trees(folder).values():
        optional = {
            line for node in ast.walk(tree) if isinstance(node, ast.Try)
            and any(getattr(h.type, "id", "") == "ImportError" for h in node.handlers)
            for line in node.body
        }  # fmt: skip
        for node in ast.walk(tree):
            if node in optional:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - OWN - set(sys.stdlib_module_names)


@cache
def installed() -> Mapping[str, list[str]]:
    """The distributions of every package that is installed; to list them takes a second."""
    return packages_distributions()


def names(requirements: list[str]) -> set[str]:
    """Normalised names of requirements."""
    return {re.split(r"[<>=\[]", line)[0].lower().replace("_", "-") for line in requirements}


@pytest.mark.parametrize("folder", [*LIBRARY, *SUITE, *DEVELOP])
def test_what_is_imported_is_declared(folder: str) -> None:
    extras = PROJECT["optional-dependencies"]
    declared = names(PROJECT["dependencies"])
    if folder in SUITE:
        declared |= names(extras["suite"])
    if folder in DEVELOP:
        declared |= names([line for extra in extras.values() for line in extra])
    undeclared = {
        name for name in imported(folder) if not names(installed().get(name, [name])) & declared
    }
    assert undeclared == set()
