"""The report of a sweep: a page that stands alone, its words, and the command that makes it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from tests.report_helpers import RAW, header, point, sweep_records, write_results
from whiten_index.cli import cli
from whiten_index.report import write_report

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


# Words


# The page


class _Page(HTMLParser):
    """What a page refers to, and whether its tags match."""

    VOID = ("meta", "link", "img", "source")

    def __init__(self, text):
        super().__init__()
        self.references, self.open, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [v for name, v in attrs if name in ("src", "srcset", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    records = sweep_records("r1", "<b>SciFact</b>") + sweep_records("r2", "docs", judged=False)
    return write_report(write_results(folder / "results.jsonl", records), folder)


def test_the_page_is_whole_and_refers_to_itself_alone(report):
    text = report.read_text(encoding="utf-8")
    parsed = _Page(text)
    assert parsed.open == []
    assert "script" not in parsed.tags
    assert all(r.startswith(("data:", "#")) for r in parsed.references)
    assert not re.search(r"https?://|url\(|@import", text)
    assert "<b>SciFact</b>" not in text
    assert "&lt;b&gt;SciFact&lt;/b&gt;" in text


def test_two_datasets_are_compared_and_one_setting_serves_both(tmp_path):
    records = []
    for run, name, low in (("a", "A", 0.60), ("b", "B", 0.64)):
        records += [header(run, name), {**RAW, "run": run},
                    point(k=64, codec="sq8", run=run, ndcg=low),
                    point(k=128, codec="sq8", run=run, ndcg=0.644)]  # fmt: skip
    path = write_report(write_results(tmp_path / "results.jsonl", records), tmp_path)
    assert "on each of A and B is auto k=128 SQ8, with 128 bytes a row" in path.read_text()
    none = [header("a", "A"), {**RAW, "run": "a"}, point(run="a", ndcg=0.5),
            header("b", "B"), {**RAW, "run": "b"}, point(run="b", ndcg=0.5)]  # fmt: skip
    path = write_report(write_results(tmp_path / "results.jsonl", none), tmp_path)
    assert "No one setting stays within 0.6 points of raw nDCG@10 on A and B" in path.read_text()


def test_the_command_makes_the_report_from_results_alone(tmp_path):
    write_results(tmp_path / "results.jsonl", [header(), RAW, point()])
    done = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(tmp_path / "report.html")
    done = CliRunner().invoke(cli, ["report", str(tmp_path / "no")])
    assert done.exit_code == 5
    assert "name a folder that whiten-index sweep --out wrote" in done.output
