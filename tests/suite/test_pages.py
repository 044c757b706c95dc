"""Every table of README and docs comes from committed records; links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.make import PAGES, filled


def test_tables_are_where_numbers_are_quoted() -> None:
    with_tables = {page.name for page in PAGES if "<!-- table: " in page.read_text()}
    pages = {"index.md", "explain.md", "measured.md", "simulator.md", "verdict.md"}
    assert with_tables == {"README.md", *pages}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_records_say(page: Path) -> None:
    assert filled(page.read_text()) == page.read_text(), "run: python -m docs.make"


def test_a_changed_number_is_found() -> None:
    page = Path("docs/index.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("| GPT mini"))
    assert filled(page.replace(line, line.replace("GPT mini", "GPT mimi"))) == page


def test_links_lead_somewhere() -> None:
    links = [
        page.parent / link
        for page in PAGES
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    ]
    assert len(links) > 20
    assert [link for link in links if not link.exists()] == []
