"""The report's page in a real headless Chromium: it opens without a network and works."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright
from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.report.atlas_page import write_page
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.write import write_report
from tests.unit.synthetic_records import make_record, write_records

CHROMIUM = shutil.which("chromium")
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium (Debian's package of that name)"),
]


def _watched(page: Page, file: Path, of: str = "") -> list[str]:
    """Open a file; what the page will say (messages of a kind, or all), its errors, and the
    addresses of requests that a page without a network must not make."""
    found: list[str] = []
    page.set_default_timeout(200_000)
    page.on("console", lambda m: found.extend([m.text] * (of in ("", m.type))))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("request", lambda asked: found.extend([asked.url] * asked.url.startswith("http")))
    page.goto(file.as_uri())
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    root = tmp_path_factory.mktemp("report")
    records = [make_record(c, num_gpus=n) for c in ("zeropp", "deepspeed_3d") for n in (4, 8)]
    records.append(make_record("fsdp", fields={"status": "oom", "reason": "<b>", "step_s": []}))
    records.append(make_record(provenance="simulated", attempt="simulate-1", step_s=[0.1]))
    write_records(records, root / "runs")
    write_report([root / "runs"], root / "out", Console(quiet=True))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS, timeout=200_000)
        opened = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        problems = _watched(opened, root / "out" / "report.html")
        yield opened
        assert problems == []  # over all that the tests did: no error, no request to a network
        browser.close()


@pytest.fixture(scope="module")
def atlas(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of the atlas for two contenders on 4 and 8 GPUs; one lacks a plan, in the
    browser of ``page``, so that its requests and errors are counted, too."""
    pytest.importorskip("altair")
    records = [
        make_record(name, num_gpus=gpus, provenance="simulated", step_s=[0.1 * gpus])
        for name, gpus in (("zeropp", 4), ("fsdp", 4), ("zeropp", 8))
    ]
    root = tmp_path_factory.mktemp("atlas")
    write_records(records, root)
    assert write_page(latest_ok(load_frame([root])[0]), root / "atlas.html") == ""
    assert (root / "atlas.html").stat().st_size < 2e6
    other = page.context.new_page()
    problems = _watched(other, root / "atlas.html", of="error")
    other.wait_for_selector("svg")
    yield other
    assert problems == []


def _choose(atlas: Page, name: str, value: str) -> str:
    """The text of the charts after a choice."""
    choice = atlas.locator("form label, form .vega-bind").filter(has_text=name)
    choice.locator("select").first.select_option(value)
    return " ".join(atlas.locator("svg text").all_text_contents())


def test_the_atlas_shows_the_chosen_case_and_says_what_was_not_searched(atlas: Page) -> None:
    on_4 = _choose(atlas, "GPUs", "4")
    assert on_4.count("tokens/s/GPU") == 2
    assert "zeropp run model=" in on_4
    assert "no program that may have it was searched" in atlas.locator("#answer").inner_text()
    on_8 = _choose(atlas, "GPUs", "8")  # the batch follows: only choices that exist are offered
    batch = atlas.locator("form select[name=per_gpu]")
    assert batch.input_value() == "2"
    assert batch.locator("option:not([disabled])").all_inner_texts() == ["2"]
    assert on_8.count("tokens/s/GPU") == 1
    assert "not searched for this choice" in on_8
    assert "FSDP2" in on_8
    assert "null" not in on_8


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1440, "light"), (1440, "dark")])
def test_the_atlas_fits_every_screen(atlas: Page, width: int, scheme: str) -> None:
    atlas.set_viewport_size({"width": width, "height": 900})
    atlas.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    atlas.reload()
    atlas.wait_for_selector("svg")
    assert atlas.evaluate("document.documentElement.scrollWidth") <= width
    ink, ground = (
        atlas.locator(place).first.evaluate(f"node => getComputedStyle(node).{name}")
        for place, name in (("svg text", "fill"), ("body", "backgroundColor"))
    )
    brighter = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, ground)]
    assert (brighter[0] > brighter[1]) == (scheme == "dark")
    box = atlas.locator("svg").first.bounding_box()
    assert box is not None
    assert (box["width"] > 600) == (width > 800)  # side by side where there is room


def column(page: Page, name: str) -> list[str]:
    """A column of the throughput table, top to bottom."""
    heads = page.locator("#table-throughput th").all_inner_texts()
    index = next(i for i, head in enumerate(heads) if head.startswith(name))
    return page.locator(f"#table-throughput tbody td:nth-child({index + 1})").all_inner_texts()


def test_tables_are_filled(page: Page) -> None:
    lines = {"throughput": 6, "speedup": 3, "evidence": 2}  # a median; step and memory
    assert {name: page.locator(f"#table-{name} tbody tr").count() for name in lines} == lines
    assert "OOM" in column(page, "step [s]")


def test_the_answer_and_the_papers_table_are_on_the_first_screen(page: Page) -> None:
    assert "times as fast" in page.locator("p.answer").first.inner_text()
    box = page.locator("#table-paper").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 900
    assert page.locator("#table-paper b").count() >= 4  # the best of each line
    assert page.locator("#table-paper tr.groups th").all_inner_texts()[1] == "ZeroPP"


def test_numbers_are_set_to_the_right_and_names_stay_in_view(page: Page) -> None:
    number = page.locator("#table-throughput td.number").first
    assert number.evaluate("node => getComputedStyle(node).textAlign") == "right"
    first = page.locator("#table-throughput tbody td").first
    assert first.evaluate("node => getComputedStyle(node).position") == "sticky"


@pytest.mark.parametrize("width", [390, 1440])
def test_a_figure_of_the_docs_is_shown_whole(page: Page, width: int) -> None:
    css = (CHECKOUT / "docs" / "tables.css").read_text()
    picture = (CHECKOUT / "docs" / "images" / "schedules.svg").as_uri()
    body = f"<body class=md-typeset style='margin: 0 1rem'><p><img src='{picture}'></p></body>"
    other = page.context.new_page()
    other.set_viewport_size({"width": width, "height": 844})
    other.goto((CHECKOUT / "docs" / "tables.css").as_uri())  # a page that may read files
    other.set_content(f"<style>img {{ max-width: 100% }} {css}</style>{body}")
    other.wait_for_function("document.images[0].naturalWidth > 0")
    box = other.locator("img").bounding_box()
    other.close()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["width"] > 0.9 * min(width, 900)


@pytest.mark.parametrize(
    ("width", "media"),
    [(390, "screen"), (1032, "print")],  # a phone, and A4 landscape without its margins
)
def test_tables_scroll_or_fold_and_not_the_page(page: Page, width: int, media: str) -> None:
    page.emulate_media(media=media)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 700})
    wide = page.evaluate("document.documentElement.scrollWidth")
    page.emulate_media(media="screen")
    page.set_viewport_size({"width": 1280, "height": 900})
    assert wide <= width


def test_dark_mode_is_dark(page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colour)
    page.emulate_media(color_scheme="light")
    assert light == "rgb(255, 255, 255)"
    assert sum(map(int, dark[4:-1].split(","))) < 120


def numbers(texts: list[str]) -> list[float]:
    return [float(text.split()[0].replace(",", "")) for text in texts]


def test_sorting_by_number_up_and_down_keeps_what_has_none_last(page: Page) -> None:
    button = page.locator("#table-throughput th button", has_text="tokens/s/rank")
    button.click()
    *rising, last = column(page, "tokens/s/rank")
    assert last == "–"
    assert numbers(rising) == sorted(numbers(rising))
    assert len(set(rising)) > 2
    button.click()
    head = page.locator("#table-throughput th[aria-sort=descending]")
    assert head.inner_text().startswith("tokens/s/rank")
    *falling, last = column(page, "tokens/s/rank")
    assert last == "–"
    assert numbers(falling) == sorted(numbers(rising), reverse=True)


def test_sorting_keeps_words_below_numbers(page: Page) -> None:
    button = page.locator("#table-throughput th button", has_text="step [s]")
    for _ in range(2):
        button.click()
        *steps, last = column(page, "step [s]")
        assert (last, len(numbers(steps))) == ("OOM", 5)


def test_filter_hides_rows(page: Page) -> None:
    box = page.locator("#Throughput .filter")
    for word, rows in (("deepspeed", 2), ("", 6)):
        box.fill(word)
        assert page.locator("#table-throughput tbody tr:visible").count() == rows


def test_source_is_one_click_away(page: Page) -> None:
    page.locator("#table-throughput tbody tr", has_text="FSDP2").locator("button.source").click()
    page.locator("#provenance").wait_for()  # until the sources are unpacked
    text = page.locator("#provenance").inner_text()
    for fact in ("0123456789abcdef", "node0", "2.13.0", "global_batch", "oom <b>"):
        assert fact in text
    page.locator("#provenance button").click()
    assert not page.locator("#provenance").is_visible()


@pytest.mark.parametrize("table", ["speedup", "evidence"])
def test_both_sides_of_a_comparison_have_a_source(page: Page, table: str) -> None:
    ids = []
    for word in ("source", "against"):
        page.locator(f"#table-{table} tbody tr").first.get_by_text(word, exact=True).click()
        page.locator("#provenance").wait_for()
        ids.append(page.locator("#provenance-title").inner_text())
        assert "0123456789abcdef" in page.locator("#provenance").inner_text()
        page.locator("#provenance button").click()
    assert ids[0] != ids[1]


def test_figures_are_shown(page: Page) -> None:
    widths = page.eval_on_selector_all("figure img", "all => all.map(one => one.naturalWidth)")
    names = page.eval_on_selector_all("figure", "all => all.map(one => one.id)")
    assert len(widths) == len(names) >= 8
    assert min(widths) > 100
    for section in ("throughput", "memory", "speedup", "scaling", "timeline", "loss", "evidence"):
        assert any(name.startswith(f"figure-{section}") for name in names), section
