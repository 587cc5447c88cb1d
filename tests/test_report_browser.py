"""The report in a real browser: it renders, shows its plots, and fits a phone and a desk."""

from __future__ import annotations

import importlib.util
import json
import os
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from report_helpers import layers_report, papers_results, sweep_records, write_results

from whiten_index.report import write_layers, write_papers, write_report

pytestmark = pytest.mark.browser
CHROMIUM = Path(os.environ.get("WHITEN_INDEX_CHROMIUM", "/usr/bin/chromium"))
SIZES = {"phone": (390, 844), "desk": (1280, 900)}


@pytest.fixture(scope="module")
def chromium():
    if importlib.util.find_spec("playwright") is None or not CHROMIUM.exists():
        pytest.fail(f"needs playwright and a browser at {CHROMIUM}; make browser installs both")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two datasets, one with judgements and one without; names try to break out."""
    folder = tmp_path_factory.mktemp("report")
    judged = sweep_records("r1", "SciFact <script>throw 1</script>")
    unjudged = sweep_records("r2", "docs_" + "0123456789" * 8, 237_766, judged=False)
    return write_report(write_results(folder / "results.jsonl", judged + unjudged), folder)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The pages of the papers and of layers."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "papers.json").write_text(json.dumps(papers_results()), encoding="utf-8")
    return {
        "papers": write_papers(folder / "papers.json", folder),
        "layers": write_layers(layers_report(13), folder),
    }


@contextmanager
def opened(chromium, path, size):
    """A page open at one size, with whatever the browser complained of."""
    width, height = SIZES[size]
    page = chromium.new_page(viewport={"width": width, "height": height})
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("requestfailed", lambda request: page.complaints.append(request.url))
    page.requested = []
    page.on("request", lambda request: page.requested.append(request.url))
    page.goto(path.as_uri())
    page.screenshot(path=path.with_name(f"{path.stem}-{size}.png"), full_page=True)
    yield page
    page.close()


@pytest.fixture(params=list(SIZES))
def page(request, chromium, report):
    with opened(chromium, report, request.param) as page:
        yield page


@pytest.fixture(params=[(name, size) for name in ("papers", "layers") for size in SIZES])
def other(request, chromium, others):
    """One of the other pages, everything that is folded open."""
    name, size = request.param
    with opened(chromium, others[name], size) as page:
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        yield page


def test_it_loads_nothing_else_and_nothing_complains(page, report):
    assert page.complaints == []
    assert [url for url in page.requested if not url.startswith("data:")] == [report.as_uri()]
    assert page.locator("script").count() == 0
    assert "SciFact <script>" in page.title()


def test_every_plot_is_drawn_and_says_what_it_shows(page):
    plots = page.evaluate(
        "[...document.images].map(i => [i.complete, i.naturalWidth, i.clientWidth,"
        " i.clientHeight, i.alt, i.currentSrc])"
    )
    assert len(plots) == 10
    for complete, natural, width, height, alt, source in plots:
        assert complete
        assert min(natural, width, height) > 200
        assert len(alt) > 60
        assert source.startswith("data:image/svg+xml")


def test_the_page_never_scrolls_sideways_and_wide_tables_scroll_in_their_box(page):
    assert wide_boxes(page)


def wide_boxes(page):
    """How many boxes scroll, on a page that does not."""
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') &&"
        " e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    boxes = page.evaluate(
        "[...document.querySelectorAll('.scroll')].map(b => [b.scrollWidth > b.clientWidth,"
        " getComputedStyle(b).overflowX, b.tabIndex, b.getAttribute('aria-label')])"
    )
    assert all(flow == "auto" and tab == 0 and label for _, flow, tab, label in boxes)
    return sum(wide for wide, *_ in boxes)


def test_text_is_large_and_dark_enough(page):
    assert faint_texts(page) == []


def faint_texts(page):
    return page.evaluate(
        """() => {
        const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => {
            v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
            return .2126 * r + .7152 * g + .0722 * b; };
        const behind = e => { for (; e; e = e.parentElement) {
            const c = getComputedStyle(e).backgroundColor;
            if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };
        return [...document.querySelectorAll('main *')]
            .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
            .map(e => { const s = getComputedStyle(e);
                const [a, b] = [light(s.color), light(behind(e))].sort((x, y) => y - x);
                return [(a + .05) / (b + .05), parseFloat(s.fontSize), e.outerHTML.slice(0, 80)]; })
            .filter(([contrast, size]) => contrast < 4.5 || size < 12.5); }"""
    )


def check_levels(levels):
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_the_other_pages_stand_alone_fit_and_can_be_read(other):
    assert other.complaints == []
    assert len([url for url in other.requested if not url.startswith("data:")]) == 1
    assert wide_boxes(other) > 0 or other.viewport_size["width"] > 1000
    assert faint_texts(other) == []
    check_levels(
        other.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    )
    plots = other.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth, i.alt])")
    assert len(plots) == 2
    assert all(complete and width > 200 and len(alt) > 60 for complete, width, alt in plots)
