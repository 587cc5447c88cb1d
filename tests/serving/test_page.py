"""The server's page, opened in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import build_texts
from whiten_index import CertifyConfig, UpdateConfig, certify_index, update_index

if TYPE_CHECKING:
    from tests.serving.conftest import Serve, Server

pytestmark = pytest.mark.site

HOSTILE = "<img src=x onerror=alert(1)>"
QUERY = "small red cat"
PHONE = {"width": 375, "height": 800}
TOKEN = "a-token-of-the-page"
# The browser itself writes this to its console.
REFUSED = "Failed to load resource: the server responded with a status of 4"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def page_index(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_words: tuple[str, ...]
) -> Path:
    """An index of three versions: a build, an update, and that with its certificate.

    Texts and a kept column are hostile; one text is long, and ids need 64 bits.
    """
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(tiny_words, 12)) for _ in range(300)]
    texts[:2] = f"{HOSTILE} {QUERY}", f"{QUERY} " * 60
    folder = tmp_path_factory.mktemp("page")
    ids = [2**60 + i for i in range(300)]
    table = pa.table({"id": ids, "lang": [HOSTILE] * 300, "text": texts})
    pq.write_table(table[:250], folder / "c.parquet")
    options = {"id_column": "id", "keep": ("text", "lang")}
    out = str(build_texts(folder / "docs", folder / "c.parquet", tiny_model, **options).out)
    pq.write_table(table, folder / "c.parquet")
    update_index(UpdateConfig(index=out))
    asked = [{"id": str(i), "text": text[:40]} for i, text in zip(ids, texts, strict=True)]
    judged = ["query-id\tcorpus-id\tscore", *(f"{i}\t{i}\t1" for i in ids)]
    queries, qrels = folder / "queries.parquet", folder / "qrels.tsv"
    pq.write_table(pa.Table.from_pylist(asked), queries)
    qrels.write_text("\n".join(judged) + "\n")
    certify_index(CertifyConfig(index=out, queries=str(queries), qrels=str(qrels)))
    return Path(out)


@pytest.fixture(scope="module")
def page_server(serve: Serve, page_index: Path) -> Server:
    return serve(f"docs={page_index}", f"other={page_index}")


@pytest.fixture
def open_page(browser: Any, page_server: Server) -> Iterator[Open]:
    """Opens the page; a script's error or a request to elsewhere fails the test."""
    faults, seen, contexts = list[str](), list[str](), list[Any]()

    def opened(path: str = "/", url: str = page_server.url, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text))
        page.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: seen.append(request.url))
        page.goto(url + path)
        page.allowed = urlsplit(url).netloc
        assert all(urlsplit(each).netloc == page.allowed for each in seen)
        page.seen = seen
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            page.wait_for_load_state()
        context.close()
    assert [fault for fault in faults if not fault.startswith(REFUSED)] == []
    assert {urlsplit(url).hostname for url in seen} == {"127.0.0.1"}


def search(page: Any, text: str = QUERY) -> None:
    page.get_by_role("searchbox", name="Query").fill(text)
    page.keyboard.press("Enter")
    found(page)


def found(page: Any) -> None:
    page.get_by_role("status").filter(has_text=re.compile(r"^\d+ hits? in \S+\sms\.$")).wait_for()


def column(page: Any, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def answer(page_server: Server) -> dict[str, Any]:
    with page_server.client() as client:
        body = {"index": "docs", "text": QUERY, "top_k": 10}
        said: dict[str, Any] = client.post("/v1/compare", json=body).json()
    return said


def ids(hits: Any) -> list[int]:
    return [int(re.findall(r"id (\d+)$", text)[0]) for text in hits.all_inner_texts()]


def test_columns_side_by_side_are_the_server_s_answer(open_page: Open, page_server: Server) -> None:
    page = open_page(viewport={"width": 1400, "height": 900})
    search(page)
    raw, index, other, width = answer(page_server)["columns"] + answer(page_server)["widths"][:1]
    names = page.locator("#columns section").evaluate_all("all => all.map(e => e.ariaLabel)")
    assert names == ["raw embeddings", "docs", "other", "This fit at another width"]
    wanted = [hit["id"] for hit in raw["hits"]]
    for each in (raw, index, other):
        shown = column(page, each["name"])
        hits = shown.locator("li:not(.gone)")
        assert ids(hits) == [hit["id"] for hit in each["hits"]]
        marks = [
            "new" if (now := hit["id"]) not in wanted
            else "=" if (by := wanted.index(now) - rank) == 0
            else f"{'↑' if by > 0 else '↓'} {abs(by)}"
            for rank, hit in enumerate(each["hits"])
        ]  # fmt: skip
        told = shown.locator("li:not(.gone) .mark [aria-hidden]").all_inner_texts()
        assert told == ([] if each is raw else marks)
        lost = [hit["id"] for hit in raw["hits"] if hit["id"] not in ids(hits)]
        assert ids(shown.locator("li.gone")) == lost
        share = "reference" if each is raw else f"{round(100 * each['overlap'])} %"
        assert shown.locator("dd").nth(1).inner_text() == share
    assert 0 < index["overlap"] < 1, "the query shows nothing that moved"
    assert column(page, "docs").get_by_text("not found here; rank").count() > 0
    boxes = [column(page, name).bounding_box() for name in names]
    assert len({box["y"] for box in boxes}) == 1
    # A line for each document that two neighbouring columns know.
    assert page.locator("#columns path").count() > len(wanted)
    assert width["k"] != 0


def test_the_slider_shows_another_width_without_a_request(
    open_page: Open, page_server: Server
) -> None:
    page = open_page(f"/#q={QUERY}&index=docs")
    found(page)
    slider, shown = page.get_by_role("slider"), column(page, "This fit at another width")
    widths, before = answer(page_server)["widths"], len(page.seen)
    slider.focus()
    page.keyboard.press("Home")
    for each in widths:
        assert slider.get_attribute("aria-valuetext") in (None, f"k = {each['k']}")
        assert shown.locator("dd").first.inner_text() == str(each["k"])
        assert ids(shown.locator("li:not(.gone)")) == [hit["id"] for hit in each["hits"]]
        assert page.evaluate("document.activeElement.type") == "range"
        page.keyboard.press("ArrowRight")
    assert len(widths) > 1
    assert len(page.seen) == before
    # The address is that of what is shown.
    again = open_page(page.url.partition(page_server.url)[2])
    found(again)
    assert again.get_by_role("slider").get_attribute("aria-valuetext") == f"k = {widths[-1]['k']}"


def test_texts_of_documents_stay_texts(open_page: Open) -> None:
    page = open_page(f"/#q={QUERY}&index=docs")
    found(page)
    assert page.get_by_text(f"lang: {HOSTILE}").count() >= 30
    search(page, HOSTILE)
    assert page.locator("img").count() == 0
    search(page, f"{QUERY} " * 60)
    hit = column(page, "raw embeddings").locator("li").filter(has=page.get_by_role("button")).first
    short = hit.inner_text()
    hit.get_by_role("button", name="more").click()
    assert len(hit.inner_text()) > len(short)
    hit.get_by_role("button", name="less", expanded=True).click()
    assert hit.inner_text() == short


def test_the_keyboard_alone_reaches_everything(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("combobox", name="Index").wait_for()
    # The search box has the focus.
    page.keyboard.type(QUERY)
    page.keyboard.press("Enter")
    found(page)
    reached = list[str]()
    while (name := focused(page)) != "range" and len(reached) < 60:
        reached.append(name)
        page.keyboard.press("Tab")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid", focused(page)
    assert focused(page) == "range"
    page.get_by_role("tab", name="Search").focus()
    page.keyboard.press("ArrowRight")
    about = page.get_by_role("tab", name="About the index", selected=True)
    assert about.evaluate("tab => tab === document.activeElement")
    assert page.get_by_role("tabpanel").get_attribute("aria-labelledby") == "tab-about"
    page.get_by_role("heading", name="Versions").wait_for()
    page.keyboard.press("Home")
    assert page.get_by_role("searchbox").is_visible()
    page.keyboard.press("Shift+Tab")
    assert page.locator("[role=tab][tabindex='0']").count() == 1


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.type ?? document.activeElement.id"))


def test_about_has_spectrum_certificate_and_history(open_page: Open, page_index: Path) -> None:
    from whiten_index import list_versions

    page = open_page()
    page.get_by_role("tab", name="About the index").click()
    history = page.get_by_role("table", name="Newest first")
    history.wait_for()
    rows = history.locator("tbody tr").all_inner_texts()
    versions = list_versions(page_index)
    assert [row.split()[0] for row in rows] == [each.name for each in versions]
    assert ["published" in row for row in rows] == [each.published for each in versions]
    assert [each.drift is not None for each in versions] == [True, True, False]
    for row, each in zip(rows, versions, strict=True):
        assert (each.decision or "build") in row
        if each.drift is not None:
            assert float(row.split("\t")[5]) == pytest.approx(each.drift, rel=1e-2)
    assert page.get_by_role("img", name="Variance kept").count() == 1
    assert page.get_by_role("img", name="Eigenvalue of direction k").count() == 1
    page.get_by_text("The same as a table").click()
    spectrum = page.get_by_role("table", name="Spectrum").locator("tbody tr")
    assert spectrum.first.inner_text().split()[0] == "1"
    assert page.get_by_role("table", name="Points lost").locator("tbody tr").count() > 1


@pytest.mark.parametrize("tab", ["Search", "About the index"])
def test_it_fits_a_phone(open_page: Open, tab: str) -> None:
    page = open_page(f"/#q={QUERY}&index=docs", viewport=PHONE)
    found(page)
    page.get_by_role("tab", name=tab).click()
    page.locator("section:visible, table:visible").first.wait_for()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"]
    if tab == "Search":
        # The next column is a swipe away.
        box = column(page, "raw embeddings").bounding_box()
        assert 0.7 * PHONE["width"] < box["width"] < PHONE["width"]
        assert page.locator("#scroller").evaluate("e => e.scrollWidth > 2 * e.clientWidth")


def test_queries_that_a_new_model_changed_most_fill_the_box(
    open_page: Open, serve: Serve, migrated: Path
) -> None:
    old = min((migrated / "versions").iterdir())
    url = serve(migrated, f"old={old}").url
    page = open_page(url=url)
    link = page.locator("#changed a").first
    query, scores = link.inner_text(), link.get_attribute("title")
    assert re.fullmatch(r"ndcg@10 \d+ → \d+", scores)
    link.click()
    found(page)
    assert page.get_by_role("searchbox", name="Query").input_value() == query
    names = page.locator("#columns section h2").all_inner_texts()
    assert names[:3] == ["raw embeddings", "docs", "old"]
    page.locator("#index").select_option("old")
    page.locator("#changed").wait_for(state="hidden")


def test_it_is_dark_when_the_system_is(open_page: Open) -> None:
    shades = [
        open_page(color_scheme=scheme).evaluate(
            "['color', 'backgroundColor'].map(each => getComputedStyle(document.body)[each])"
        )
        for scheme in ("light", "dark")
    ]
    light, dark = ([sum(map(int, re.findall(r"\d+", each))) for each in pair] for pair in shades)
    assert light[0] < light[1]
    assert dark[0] > dark[1]


def test_a_token_is_asked_for_and_kept_for_the_tab(
    open_page: Open, serve: Serve, page_index: Path
) -> None:
    url = serve(page_index, variables={"WHITEN_INDEX_TOKEN": TOKEN}).url
    page = open_page(f"/#q={QUERY}", url=url)
    status, field = page.get_by_role("status"), page.get_by_label("Token of this server")
    status.filter(has_text="Error: this server asks for a token").wait_for()
    for token, said in (("another token", "the token is wrong"), (TOKEN, "hits in")):
        assert field.evaluate("field => field === document.activeElement")
        page.keyboard.type(token)
        page.keyboard.press("Enter")
        status.filter(has_text=said).wait_for()
    assert not field.is_visible()
    page.reload()
    found(page)
    assert TOKEN not in page.url


def test_errors_are_shown_in_the_server_s_words(
    open_page: Open, serve: Serve, page_index: Path
) -> None:
    page = open_page(url=serve(page_index, "--max-hits", 5).url)
    page.get_by_role("searchbox").fill(QUERY)
    page.keyboard.press("Enter")
    said = page.get_by_role("status").filter(has_text="Error:")
    said.wait_for()
    assert "Error: a request has 5 hits or candidates at most" in said.inner_text()


def test_an_index_without_raw_embeddings_is_searched_alone(
    open_page: Open, serve: Serve, page_index: Path
) -> None:
    page = open_page(f"/#q={QUERY}", url=serve(page_index, "--compare-memory", 0).url)
    said = page.get_by_role("status").filter(has_text="Raw embeddings are not compared: ")
    said.wait_for()
    assert "raise --compare-memory" in said.inner_text()
    assert page.locator("#columns section").count() == 1
    assert len(ids(column(page, "docs").locator("li"))) == 10
    assert page.locator(".mark:visible, [type=range]").count() == 0
