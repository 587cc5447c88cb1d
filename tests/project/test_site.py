"""The documentation as built into ``site/`` and the page of a sweep, opened in a real browser."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.measure.sweep_records import sweep_records, write_results
from whiten_index.measure.sweep_report import write_report

pytestmark = pytest.mark.site

SITE = Path(__file__).parents[2] / "site"
Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a page; a script that fails or a request to the network fails the test."""
    faults, seen, contexts = list[str](), list[str](), list[Any]()

    def opened(name: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: seen.append(request.url))
        page.on("requestfailed", lambda request: faults.append(request.url))
        page.goto((SITE / name).as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []
    assert not [url for url in seen if url.startswith("http")], "it needs the network"


def test_the_pages_lead_to_one_another(open_page: Open) -> None:
    page = open_page("index.html")
    page.locator(".md-sidebar--primary").get_by_text("Choose a setting").click()
    assert page.locator("h1").inner_text().startswith("Choose a setting")
    page.get_by_role("link", name="It is sometimes wrong").click()
    assert page.url.endswith("auto.html#how-often-it-is-wrong")


def test_search_finds_a_command(open_page: Open) -> None:
    page = open_page("index.html")
    page.keyboard.press("s")
    page.keyboard.type("rollback")
    page.locator(".md-search-result__item a[href*='roll-back.html']").first.wait_for()


@pytest.mark.parametrize("name", sorted(map(str, SITE.rglob("[a-z]*.html"))))
def test_a_page_fits_a_phone(open_page: Open, name: str) -> None:
    page = open_page(name, viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize(("asked", "scheme"), [("light", "default"), ("dark", "slate")])
def test_the_colours_are_those_of_the_system(open_page: Open, asked: str, scheme: str) -> None:
    page = open_page("index.html", color_scheme=asked)
    assert page.locator("body").get_attribute("data-md-color-scheme") == scheme


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)])
def test_a_sweep_s_page_answers_on_its_first_screen(
    open_page: Open, tmp_path: Path, width: int, height: int
) -> None:
    write_results(tmp_path / "results.jsonl", sweep_records())
    page = open_page(write_report(tmp_path), viewport={"width": width, "height": height})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for part in (".command", ".numbers", "figure svg"):
        box = page.locator(part).first.bounding_box()
        assert box["y"] + box["height"] <= height
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("getSelection().toString()") == page.locator("code").text_content()
    page.locator("figure a").first.hover(force=True)
    shown = page.locator("#tip").inner_text().splitlines()
    assert (shown[0], shown[1]) == ("auto k=32 fp32", "bytes per row: 128")
    names = page.locator("tbody th")
    assert names.first.inner_text() == "auto k=32 rabitq + 100 re-ranked"
    for first in ("auto k=32 rabitq", "raw fp32"):
        page.get_by_role("button", name="nDCG@10", exact=True).click()
        assert names.first.inner_text() == first


def test_every_command_and_public_name_is_there(open_page: Open) -> None:
    import whiten_index
    from whiten_index.cli import cli

    options = open_page("options.html").locator("h2, h3").all_inner_texts()
    assert {text.rstrip("¶").split()[-1] for text in options} >= set(cli.commands)
    names = open_page("api.html").locator("h2").all_inner_texts()
    public = set(whiten_index.__all__) - {"__version__"}
    assert {text.rstrip("¶").split("(")[0].strip() for text in names} == public
