"""Every table of README and docs comes from committed records, and so does every number of a result
in a sentence of the pages that give the answers; links lead somewhere; sentences are short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.report.atlas_page import cases
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.verdict.atlas import COMMITTED
from docs.make import PAGES, filled


def test_tables_are_where_numbers_are_quoted() -> None:
    with_tables = {page.name for page in PAGES if "<!-- table: " in page.read_text()}
    pages = ["atlas", "explain", "gpu", "measured", "opponents", "replay", "scaling", "schedules"]
    pages += ["simulator", "training", "verdict"]
    assert with_tables == {"README.md", *(f"{page}.md" for page in pages)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_records_say(page: Path) -> None:
    assert filled(page.read_text()) == page.read_text(), "run: python -m docs.make"


def test_the_atlas_has_the_committed_rows() -> None:
    lines = cases(latest_ok(load_frame([COMMITTED])[0]))
    page = Path("docs/atlas.html").read_text(encoding="utf-8")
    assert len(page) < 2e6
    assert lines["key"].is_unique
    for column in ("key", "text", "plan"):
        missing = [text for text in lines[column] if json.dumps(text) not in page]
        assert missing == [], "run: python -m docs.make"


def test_a_changed_number_is_found() -> None:
    page = Path("docs/measured.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("| GPT mini"))
    assert filled(page.replace(line, line.replace("GPT mini", "GPT mimi"))) == page


def test_every_committed_record_says_what_made_it() -> None:
    """Each has a line, whose second column names a command, or the commit that made it last."""
    place = Path("results/reference")
    lines = (place / "README.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    tables = "".join(table for table, *_ in cells)
    folders = [place / name for name in ("atlas", "claim_33", "memory", "validation")]
    paths = [path for folder in (place, *folders) for path in folder.iterdir()]
    unnamed = {path.name for path in paths if path not in folders and path.name not in tables}
    assert unnamed == {"README.md"}
    modules = ("evidence", "validation")
    commands = ("`zeropp ", "`./scripts/", *(f"`python -m benchmarks.{name}." for name in modules))
    for table, made_by, _, _ in cells:
        assert made_by.startswith(commands) or re.match(r"[0-9a-f]{8}\b", made_by), table


# Numbers that look like results: shares, factors, counts of a total, two decimals.
_RESULT = re.compile(
    r"\d[\d,]*(?:\.\d+)?\s?(?:%|×|times\b)|(?<!-)\b\d+ of (?:the )?\d+|\b\d+\.\d{2,}\b"
)
# Those that are none: what the paper claims, limits and constants that somebody chose, versions.
_STATED = {
    "README.md": {"33 %", "2.13", "3.11"},
    "atlas.md": {"2 %"},
    "explain.md": {"15 %"},
    "from_torchtitan.md": {"2.14"},
    "gpu.md": {"2.11"},
    "index.md": {"33 %", "3.11"},
    "metrics.md": {"1 %", "2 %", "95 %"},
    "opponents.md": {"0.16", "2.13"},
    "published_rows.md": {"1.5 times", "100 %"},
    "replay.md": {"1.4 %", "3 %"},  # of commit 09d4f5b9, with a program that is gone
    "report.md": {"2 %", "10 %"},
    "scaling.md": {"16 %", "19 %"},  # the room that plans leave
    "schedules.md": {"2.11", "2.13", "2.14", "2.15"},
    "simulator.md": {"2.11 times", "1.23", "1.19", "1.22 times", "1.85 times"},  # constants
    "verdict.md": {"33 %", "1.33", "1.33 times", "1.1 times", "1 %", "6 %", "90 %", "8 ×"},
    "verify.md": {"2.13"},
}


def results_in(text: str) -> list[str]:
    """The numbers of results in a page's sentences, without those that come from records, or that
    stand in a table of the page."""
    tables = "".join(line for line in text.splitlines() if line.startswith("|"))
    for generated in (r"<!-- (table|value): .*?<!-- end of \1 -->", r"```.*?```", r"`[^`\n]*`"):
        text = re.sub(generated, "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|arXiv [\d.]+|\[\d{4}\.\d{5}|^\|.*", "]", text, flags=re.MULTILINE)
    known = {*re.findall(r"[\d,.]+\b", tables)}
    return [one for one in _RESULT.findall(text) if not {*re.findall(r"[\d,.]+\b", one)} <= known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_of_results_in_sentences_come_from_records(page: Path) -> None:
    written = {*results_in(page.read_text())} - _STATED.get(page.name, set())
    assert written == set(), "put them between <!-- value: ... --> and <!-- end of value -->"


def test_a_written_result_is_found() -> None:
    text = (
        "1.27 times as fast in 12 of 31 cells, 9.6 % of <!-- value: a b -->3 %<!-- end of value -->"
    )
    assert results_in(text) == ["1.27 times", "12 of 31", "9.6 %"]
    assert results_in(f"{text}\n\n| 1.27 | 31 |\n") == ["12 of 31", "9.6 %"]


def test_no_line_begins_with_a_number_of_records() -> None:
    """Markdown would begin a paragraph there, in the middle of a sentence."""
    begin = [page.name for page in PAGES if "\n<!-- value: " in page.read_text()]
    assert begin == []


def test_links_lead_somewhere() -> None:
    links = [
        page.parent / link
        for page in PAGES
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    ]
    assert len(links) > 20
    assert [link for link in links if not link.exists()] == []


# Pages whose sentences are held to a length, and their words, without tables and code.
_SHORT = {
    "../README.md": 640,
    "../CHANGELOG.md": 1_000,
    "atlas.md": 440,
    "cluster.md": 480,
    "decisions.md": 50,
    "explain.md": 860,
    "extending.md": 770,
    "from_megatron.md": 240,
    "from_torchtitan.md": 330,
    "gpu.md": 390,
    "index.md": 90,
    "measured.md": 480,
    "metrics.md": 700,
    "opponents.md": 280,
    "published_rows.md": 330,
    "questions.md": 650,
    "replay.md": 600,
    "report.md": 610,
    "scaling.md": 315,
    "schedules.md": 540,
    "simulator.md": 1_520,
    "slurm.md": 710,
    "training.md": 1_480,
    "verdict.md": 980,
    "verify.md": 530,
    "zeropp.md": 1_050,
}
_LONGEST_SENTENCE = 40
_LONGEST_OF_README = 30
_UNCLEAR = ("but for", "of which", "so many", "who take part", "nobody knows", "is told")


def sentences(text: str) -> list[str]:
    """A page's sentences, without tables, code and the targets of links."""
    text = re.sub(r"<!-- table: .*?<!-- end of table -->|```.*?```", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|</?[a-z][^>]*>|\]\([^)]*\)|^ *\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"^( *(?:[*-]|\d+\.) |#+ )", r"\n\n\1", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|(?<=[.?!:])[)\"*]*\s+", text)
    return [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]


def words(sentence: str) -> int:
    return len(re.findall(r"\S*\w\S*", sentence))


def test_the_site_is_short() -> None:
    pages = [path.read_text() for path in Path("docs").glob("*.md")]
    assert sum(words(one) for page in pages for one in sentences(page)) <= 14_250


@pytest.mark.parametrize(("name", "most"), _SHORT.items())
def test_pages_are_short_and_their_sentences_too(name: str, most: int) -> None:
    text = (Path("docs") / name).read_text()
    assert set(_SHORT) >= {path.name for path in Path("docs").glob("*.md")}
    found = [(words(one), one) for one in sentences(text)]
    longest = _LONGEST_OF_README if name == "../README.md" else _LONGEST_SENTENCE
    assert [one for length, one in found if length > longest] == []
    assert sum(length for length, _ in found) <= most
    own = " ".join(
        re.sub(r"<!-- table: .*?<!-- end of table -->", "", text, flags=re.DOTALL).split()
    )
    assert [words for words in _UNCLEAR if re.search(rf"\b{words}\b", own)] == []


def test_a_long_sentence_is_found() -> None:
    long = "word " * 41
    assert [len(one.split()) for one in sentences(f"* {long}end.\nA `code x y` b.")] == [43, 3]
