"""Every package that is imported is declared in pyproject.toml, where it is needed."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from tests.unit.source_trees import ROOT, statements

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"zeropp", "baselines", "benchmarks", "docs", "scripts", "tests"}
LIBRARY = ("zeropp",)  # the wheel
SUITE = ("baselines", "benchmarks")
DEVELOP = ("tests", "scripts", "notebooks", "docs")


def imported(folder: str) -> set[str]:
    """Top-level names of all foreign packages that a folder's files import, but for those without
    which a file says in its own words that they are missing."""
    found = set()
    for every in statements(folder).values():
        optional = {
            line for node in every if isinstance(node, ast.Try)
            and any(getattr(h.type, "id", "") == "ImportError" for h in node.handlers)
            for line in node.body
        }  # fmt: skip
        for node in every:
            if node in optional:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - OWN - set(sys.stdlib_module_names)


@cache
def provided(requirement: str) -> set[str]:
    """Top-level names that a required distribution brings; its own if it is not installed."""
    try:
        found = distribution(requirement)
    except PackageNotFoundError:
        return {requirement.replace("-", "_")}
    told = found.read_text("top_level.txt")
    if told:
        return set(told.split())
    return {file.parts[0].removesuffix(".py") for file in found.files or ()}


def names(requirements: list[str]) -> set[str]:
    """Normalised names of requirements."""
    return {re.split(r"[<>=\[]", line)[0].lower().replace("_", "-") for line in requirements}


def test_the_library_needs_torch_and_numpy_only() -> None:
    """``all_gather_object`` and its like, with which ranks compare arguments, call
    ``Tensor.numpy``; torch itself does not require numpy."""
    assert names(PROJECT["dependencies"]) == {"torch", "numpy"}


@pytest.mark.parametrize("folder", [*LIBRARY, *SUITE, *DEVELOP])
def test_what_is_imported_is_declared(folder: str) -> None:
    extras = PROJECT["optional-dependencies"]
    declared = names(PROJECT["dependencies"])
    if folder in SUITE:
        declared |= names(extras["suite"])
    if folder in DEVELOP:
        declared |= names([line for extra in extras.values() for line in extra])
    assert imported(folder) - {name for one in declared for name in provided(one)} == set()
