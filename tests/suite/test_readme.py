"""Every number in the README's table comes from the committed records, and says its kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.report import load_frame
from benchmarks.report.frame import latest_ok
from benchmarks.report.headline import headline_table
from benchmarks.report.tables import to_markdown

README = Path("README.md").read_text()
TABLES = re.findall(r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", README, flags=re.DOTALL)


def test_readme_has_a_table() -> None:
    assert TABLES


@pytest.mark.parametrize(("records", "text"), TABLES, ids=[table[0] for table in TABLES])
def test_table_is_what_the_records_say(records: str, text: str) -> None:
    frame, skipped = load_frame([Path(records)])
    assert skipped == []
    assert not frame.empty
    assert text.strip() == to_markdown(headline_table(latest_ok(frame)))


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not Path(link).exists()] == []
