"""The papers' tables as a page and as Markdown: every figure, nothing that claims too much."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from report_helpers import papers_results

from whiten_index.errors import ArtifactError
from whiten_index.report import write_papers

pytest.importorskip("matplotlib")


class _Page(HTMLParser):
    """The rows of a page's tables as texts, what it refers to, and whether its tags match."""

    VOID = ("meta", "link", "img", "source", "br")

    def __init__(self, text):
        super().__init__()
        self.rows, self.references, self.open, self.tags, self.classes = [], [], [], [], []
        self.folded, self.text, self.source = [], [], text
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.tags.append(tag)
        self.references += [named[name] for name in ("src", "srcset", "href") if name in named]
        self.classes += (named.get("class") or "").split()
        if tag == "tr":
            self.rows.append([])
            self.folded.append("details" in self.open)
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)
        elif tag == "br":
            self.handle_data(" ")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def markdown_rows(text):
    """The cells of every table row, markup taken off."""
    rows = []
    for line in text.splitlines():
        if line.startswith("| "):
            cells = re.split(r"(?<!\\) \| ", line[2:-2])
            rows.append([re.sub(r"\\(.)", r"\1", cell.replace("**", "")) for cell in cells])
    return rows


def shown(value, decimals=2):
    return "–" if value is None else f"{value:.{decimals}f}".replace("-", "−")


def apart(cell, decimals=2):
    """The difference of the two figures that a reader sees."""
    value = float(shown(cell["ours"], decimals)) - float(shown(cell["published"], decimals))
    return f"{'+' if value > 0 else '−'}{abs(value):.{decimals}f}"


def write(path, results):
    path.write_text(json.dumps(results), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def results():
    return papers_results()


@pytest.fixture(scope="module")
def written(tmp_path_factory, results):
    folder = tmp_path_factory.mktemp("papers")
    return write_papers(write(folder / "papers.json", results), folder / "out")


@pytest.fixture(scope="module")
def parsed(written):
    return _Page(written.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def text(written):
    return written.with_name("papers.md").read_text(encoding="utf-8")


@pytest.fixture(params=["page", "markdown"])
def rows(request, parsed, text):
    """The rows of all tables, of the page and of the Markdown."""
    return parsed.rows if request.param == "page" else markdown_rows(text)


# Every figure


def lines_of(rows, results):
    """The lines of each computed row of the first table: their names and their figures."""
    width = len(results["tables"][0]["datasets"])
    found, current = {}, None
    for row in rows:
        for model in ("own <b>model</b>", "BERT-base", "unpublished"):
            if row[0].startswith(model) and "ours" in row:
                current = found.setdefault(model, {})
        if current is not None and len(row) > width and row[-width - 1] in (
            "ours", "published", "difference", "not comparable",
        ):  # fmt: skip
            current.setdefault(row[-width - 1], row[-width:])
        else:
            current = None
    return found


def test_ours_the_published_and_the_difference_stand_in_the_row_of_their_model(rows, results):
    found = lines_of(rows, results)
    by_name = {row["model"]: row for row in results["tables"][0]["rows"]}
    own = list(by_name["own <b>model</b>"]["figures"].values())
    assert found["own <b>model</b>"] == {
        "ours": [shown(cell["mean"]) for cell in own],
        "published": [shown(cell["published"]) for cell in own],
        "difference": [apart(cell) for cell in own],
    }
    unpublished = by_name["unpublished"]["figures"].values()
    assert found["unpublished"] == {"ours": [shown(cell["mean"]) for cell in unpublished]}


# What is written by others stays text


# Pictures


# What cannot be read


def broken(results, change):
    copy = json.loads(json.dumps(results))
    change(copy)
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("tables"), "tables should be a list, and is nothing"),
        (lambda r: r["tables"][0].pop("metric"), r"tables\[0\]\.metric should be a text"),
        (lambda r: r["tables"][0]["rows"][1].update(status="done"),
         r"tables\[0\]\.rows\[1\]\.status should be one of ran, stand-in, not run, and is 'done'"),
        (lambda r: r["tables"][0].update(aggregation="sum"), "one of all, mean, wmean"),
        (lambda r: r["tables"][0]["rows"][0]["figures"].update(X={}), "alone, not of X"),
        (lambda r: r["tables"][0]["rows"][0]["figures"]["STS12"].update(ours="high"),
         r"rows\[0\]\.figures\.STS12\.ours should be a number or null, and is 'high'"),
        (lambda r: r["figures"][0]["series"][2]["y"].pop(), "4 figures each, as x; S_2 has others"),
        (lambda r: r["figures"][0]["series"].append(r["figures"][0]["series"][0]),
         "each of another name"),
        (lambda r: r["figures"][1]["matrix"].pop(), "5 rows of 5, as its labels"),
        (lambda r: r["figures"][1].update(kind="pie"), "kind should be curves or heat_map"),
        (lambda r: r["not_run"][0].pop("why"), r"not_run\[0\]\.why should be a text"),
    ],
)  # fmt: skip
def test_damage_is_named_by_its_place(tmp_path, results, change, message):
    path = write(tmp_path / "papers.json", broken(results, change))
    with pytest.raises(ArtifactError, match=message) as raised:
        write_papers(path, tmp_path / "out")
    assert str(path) in str(raised.value)
    assert "run the reproduction again" in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_missing_or_cut_off_is_an_error(tmp_path, results):
    with pytest.raises(ArtifactError, match=r"it has no papers\.json"):
        write_papers(tmp_path / "papers.json", tmp_path / "out")
    path = write(tmp_path / "papers.json", results)
    path.write_text(path.read_text()[:-200])
    with pytest.raises(ArtifactError, match="cannot be read"):
        write_papers(path, tmp_path / "out")
    path.write_text("[]")
    with pytest.raises(ArtifactError, match="no JSON object"):
        write_papers(path, tmp_path / "out")
