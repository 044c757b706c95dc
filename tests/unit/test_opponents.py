"""The charter of opponents has every setting of the installed packages, as its page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report.opponents import (
    KINDS,
    SECTIONS,
    Section,
    charter,
    fields_of,
    opponents_table,
)


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
