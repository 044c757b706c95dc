"""The charter of opponents has every setting of the installed packages, as its page says."""

from __future__ import annotations

import re
from collections import defaultdict
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
    fields_of,
    opponents_table,
)
from tests.unit.simulated_task import llama_task
from zeropp.choose.contender import Contender
from zeropp.choose.space import SearchPoint
from zeropp.types.layout import Layout

TASK = llama_task(8, 64)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_setting_of_an_opponent_is_classified(section: Section) -> None:
    if not section.is_installed:
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
