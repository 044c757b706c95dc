"""Private names of torch and DeepSpeed stand in one file per user of them, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.unit.source_trees import sources, trees

FOREIGN = ("torch", "deepspeed")
SEAM = "private_names.py"
# Where each may be: the library's traces, FSDP2, and one file per baseline.
SEAMS = {
    "zeropp/engine/private_names.py",
    "baselines/private_names.py",
    "baselines/torch_pp/private_names.py",
    "baselines/deepspeed_3d/private_names.py",
}


def private(every: list[ast.AST]) -> Iterator[str]:
    """Names with a leading underscore that a file with these nodes takes from torch or
    DeepSpeed."""
    foreign = set(FOREIGN)
    for node in every:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _is_foreign(alias.name)]
            foreign |= {a.asname or a.name for a in node.names if _is_foreign(a.name)}
            yield from (name for name in names if _hidden(name))
        elif isinstance(node, ast.ImportFrom) and node.module and _is_foreign(node.module):
            foreign |= {alias.asname or alias.name for alias in node.names}
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if _hidden(name))
    for node in every:
        if isinstance(node, ast.Attribute) and _hidden(node.attr) and _root(node) in foreign:
            yield ast.unparse(node)


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in FOREIGN


def _hidden(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def _root(node: ast.AST) -> str:
    """The name that a chain of attributes begins with; empty for anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("package", ["zeropp", "baselines", "benchmarks"])
def test_private_names_stand_in_their_own_files(package: str) -> None:
    files = sources(package)
    assert {name for name in files if name.endswith(SEAM)} <= SEAMS
    users = [name for name, text in files.items() if any(word in text for word in FOREIGN)]
    assert len(users) > 10
    found = {name: list(private(list(ast.walk(trees(package)[name])))) for name in users}
    assert {name: names for name, names in found.items() if names and name not in SEAMS} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import name",
        "from torch.distributed import _name",
        "import torch\ntorch._foreach_norm([])",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_timeout()",
        "from torch.nn import functional as F\nF._name",
    ],
)
def test_a_private_name_is_noticed(line: str) -> None:
    assert len(list(private(list(ast.walk(ast.parse(line)))))) == 1
