"""The charter of opponents has every setting of the installed packages, as its page says."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baselines.deepspeed_3d.contender import DEEPSPEED
from baselines.deepspeed_3d.zero3 import DEEPSPEED_ZERO3
from baselines.fsdp.contender import FSDP
from baselines.megatron_core.contender import MEGATRON_CORE
from baselines.torch_pp.contender import TORCHTITAN
from benchmarks import CHECKOUT
from benchmarks.report.opponents import (
    KINDS,
    SECTIONS,
    Section,
    charter,
    opponents_table,
)
from tests.unit.simulated_task import llama_task
from zeropp.choose.contender import Contender
from zeropp.choose.space import SearchPoint
from zeropp.types.layout import Layout

TASK = llama_task(8, 64)
_DEFAULTS = ("default", "default_factory")


def fields_of(section: Section) -> dict[str, str]:
    """The settings of a section in the installed package, with their defaults as they are written
    there. Raises ValueError if none is found, as the package has moved them."""
    spec = importlib.util.find_spec(section.path.split("/")[0])
    places = list(spec.submodule_search_locations or ()) if spec else []
    root, found = Path(*section.path.split("/")[1:]), dict[str, str]()
    for place in places:
        tree = ast.parse((Path(place) / root).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            name = getattr(node, "name", "")
            if isinstance(node, ast.ClassDef) and name in section.owners:
                lines = (line for line in node.body if isinstance(line, ast.AnnAssign))
                found |= {ast.unparse(line.target): _short(line.value) for line in lines}
            elif isinstance(node, ast.FunctionDef) and name in section.owners:
                arguments, defaults = node.args.kwonlyargs, node.args.kw_defaults
                found |= {a.arg: _short(d) for a, d in zip(arguments, defaults, strict=True)}
            elif isinstance(node, ast.FunctionDef) and f"{name}()" in section.owners:
                found |= dict(_assigned(node))
    if not found:
        raise ValueError(f"{section.path}: has no {', '.join(section.owners)}")
    return found


def _assigned(node: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for line in ast.walk(node):
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Attribute):
            yield line.targets[0].attr, ""
        elif isinstance(line, ast.Dict):
            for key, value in zip(line.keys, line.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), _short(value)


def _short(value: ast.expr | None) -> str:
    """A default as text; of a call that declares a field, the default in it."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Field", "field", "pp_int"):
        given = [*value.args, *(k.value for k in value.keywords if k.arg in _DEFAULTS)]
        return _short(given[0]) if given else ""
    return ast.unparse(value)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_setting_of_an_opponent_is_classified(section: Section) -> None:
    if importlib.util.find_spec(section.path.split("/")[0]) is None:
        pytest.skip(f"{section.program} is not installed")
    lines = charter()
    own = lines[lines["section"] == section.name]
    listed = dict(zip(own["field"], own["default"], strict=True))
    assert len(listed) == len(own)  # each once
    assert fields_of(section) == listed


def test_every_setting_says_what_becomes_of_it() -> None:
    lines = charter()
    assert set(lines["section"]) == {section.name for section in SECTIONS}
    for row in lines.itertuples():
        assert str(row.here).startswith(KINDS), row
        assert row.why or str(row.here).startswith("fixed"), row


def test_what_is_against_an_opponent_is_named_on_the_page() -> None:
    lines = charter()
    against = lines[lines["here"] == "against it"]["field"]
    page = (CHECKOUT / "docs" / "opponents.md").read_text(encoding="utf-8")
    named = page.split("*Against it*")[1].split(". The others")[0]
    assert re.findall("`(.*?)`", named) == list(against)


# The programs of the charter whose own contender has the knobs that a line names.
OF_PROGRAM: dict[str, tuple[Contender[Any], ...]] = {
    "DeepSpeed": (DEEPSPEED, DEEPSPEED_ZERO3),
    "FSDP2": (FSDP,),
}
OF_PROGRAM |= {"Megatron-Core": (MEGATRON_CORE,), "torchtitan": (TORCHTITAN,)}
LAYOUTS = (
    Layout(shard=16),
    Layout(replicate=8),
    Layout(pp=2, tp=2, replicate=2),
    Layout(pp=2, context=2, tp=2),
)
DEGREES = {"tp", "pp", "context", "shard", "replicate", "microbatch_size"}


@pytest.mark.parametrize("program", OF_PROGRAM)
def test_what_is_searched_is_a_knob_with_several_values(program: str) -> None:
    lines, sections = charter(), [s.name for s in SECTIONS if s.program == program]
    named = lines[lines["section"].isin(sections) & (lines["here"] == "searched")]["why"]
    knobs = {name for why in named for name in re.findall(r"`(?:contender\.)?(\w+)`", why)}
    knobs -= DEGREES
    tried: dict[str, set[object]] = defaultdict(set)
    for contender in OF_PROGRAM[program]:
        asked = replace(contender.knobs(), **dict.fromkeys(contender.gradient_types, "auto"))
        for degrees in LAYOUTS:
            point = SearchPoint(TASK, asked, degrees, 2)
            for family in contender.space.families(point):
                for name in knobs:
                    if hasattr(family, name):
                        tried[name].add(getattr(family, name))
    assert {name: values for name in knobs if len(values := tried[name]) < 2} == {}


def test_a_new_setting_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "opponent"
    package.mkdir()
    (package / "__init__.py").write_text("")
    text = "class Config:\n    old: int = Field(pp_int(5e8), gt=0)\n    new: bool = True\n"
    text += "def run(*, how='fast'): ...\ndef read():\n    return {'stages': 2}\n"
    (package / "config.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    owners = ["Config", "run", "read()"]
    found = fields_of(Section("any", "opponent", "opponent/config.py", owners))
    assert found == {"old": "500000000.0", "new": "True", "how": "'fast'", "stages": "2"}
    with pytest.raises(ValueError, match=r"opponent/config.py: has no Elsewhere"):
        fields_of(Section("any", "opponent", "opponent/config.py", ["Elsewhere"]))


def test_the_table_of_a_program_has_all_of_its_settings() -> None:
    text = opponents_table("FSDP2")
    assert "`fully_shard` `mesh`" in text
    assert "**searched**" in text
    assert "`cast_forward_inputs`" in text
