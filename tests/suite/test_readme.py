"""Every number in the tables of README and docs comes from committed records, and says its kind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.report import load_frame
from benchmarks.report.frame import latest_ok
from benchmarks.report.headline import headline_table
from benchmarks.report.tables import to_markdown

README = Path("README.md").read_text()
MEASURED = Path("docs/measured.md").read_text()
_TABLE = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", flags=re.DOTALL)
TABLES = _TABLE.findall(README) + _TABLE.findall(MEASURED)


def test_pages_have_their_tables() -> None:
    assert [records for records, _ in TABLES] == [
        "results/reference/demo",
        "results/reference/peers",
    ]


def test_overheads_are_what_the_record_says() -> None:
    record = json.loads(Path("results/reference/engine_overhead.json").read_text())
    ratios = [record["engine"]["engine_over_plain"]]
    ratios += [record["split_backward"][0][f"{way}_over_full"] for way in ("store", "graph")]
    for ratio in ratios:
        assert f"| {ratio['median']:.3f} [{ratio['q1']:.3f}, {ratio['q3']:.3f}] |" in MEASURED


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
