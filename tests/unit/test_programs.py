"""The registry of programs: sources, and one entry for whoever prices a plan."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.specification.contenders import CONTENDERS, PRICED
from tests.unit.simulated_task import task
from zeropp.programs import ENTRIES, Entry, Program, entry_named, program_named

CHECKOUT = Path(__file__).resolve().parents[2]
ENTRY = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


@ENTRY
def test_every_trait_that_is_stated_has_a_source(entry: Entry) -> None:
    assert entry.version
    assert {"bf16", "fp32"} <= set(entry.stated) <= set(entry.sources)
    assert all(len(source) > 10 for source in entry.sources.values())
    assert set(entry.sources) <= {trait.name for trait in fields(Program)}


def test_an_unknown_program_is_an_error_that_names_the_known_ones() -> None:
    assert program_named("zeropp") is entry_named("zeropp").program
    with pytest.raises(
        ValueError, match=r"program='megatron': not registered .known: .*best_public"
    ):
        program_named("megatron")


def test_no_price_and_no_simulation_depends_on_a_name() -> None:
    names = {*ENTRIES, *PRICED, "megatron", "deepspeed", "published"}
    files = [*(CHECKOUT / "zeropp/cost").glob("*.py"), *(CHECKOUT / "zeropp/sim").glob("*.py")]
    assert len(files) > 8
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant):
                assert node.value not in names, f"{path.name}:{node.lineno}: {node.value!r}"
            if isinstance(node, ast.Compare):
                sides = ast.unparse(node)
                assert "contender" not in sides, f"{path.name}:{node.lineno}: {sides}"


def test_tuner_and_contenders_price_registered_programs() -> None:
    for name, contender in PRICED.items():
        program = contender.size(task(), contender.knobs(), 1).program
        assert program in ENTRIES
        assert program == name or name not in CONTENDERS  # what runs is what is priced
