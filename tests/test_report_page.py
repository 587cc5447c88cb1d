"""The report of a sweep: a page that stands alone, its words, and the command that makes it."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.report_helpers import DIM, RAW, header, point, read, sweep_records, write_results
from whiten_index.cli import cli
from whiten_index.errors import ConfigError, StorageError
from whiten_index.report import check_report, page, tables, words, write_report

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


# Words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.size(999), "999\u00a0B"), (words.size(49_152), "49\u00a0KB"),
        (words.size(999_900), "1\u00a0MB"), (words.size(365_208_576), "365\u00a0MB"),
        (words.size(1.5e9), "1.5\u00a0GB"), (words.milliseconds(0.0217), "0.022\u00a0ms"),
        (words.milliseconds(4.31), "4.31\u00a0ms"), (words.milliseconds(41.5), "41.5\u00a0ms"),
        (words.milliseconds(1234.5), "1,234\u00a0ms"), (words.number(72.5), "72.5"),
        (words.number(1536.0), "1,536"), (words.signed(-0.001, 2), "±0.00"),
        (words.signed(0.5, 1), "+0.5"), (words.share(0.9999), "99.9%"),
        (words.share(1.0), "100.0%"),
        (words.times(1536, 64), "24"), (words.times(3, 2), "1.5"), (words.share(None), "–"),
    ],
)  # fmt: skip
def test_figures_read_well(text, expected):
    assert text == expected


def test_the_options_shown_are_those_of_build(tmp_path):
    known = {o for parameter in cli.commands["build"].params
             for o in (*parameter.opts, *parameter.secondary_opts)}  # fmt: skip
    records = [point("auto", index="ivf", codec="sq8"), point("pca"), point("whitening"),
               point("truncate"), point("none", DIM, "sq8"), point("faiss-pca")]  # fmt: skip
    (sweep,) = read(tmp_path, [header(), *records])
    shown = [words.command(p, 0.95) for p in sweep.points]
    assert shown[0] == ("--whiten whitening", "--exponent 0.25", "--center", "--k 64",
                        "--factory IVF256,SQ8")  # fmt: skip
    assert shown[1][0] == "--whiten pca"
    assert shown[4] == ("--whiten none", "--factory SQ8")
    assert shown[5] == ()
    asked = [words.command(p, 0.99) for p in sweep.points]
    assert asked[0] == (*shown[0], "--target-recall 0.99")
    assert asked[1:] == shown[1:]
    assert words.command(sweep.points[0], None) == shown[0]
    assert {option.split()[0] for options in asked for option in options} <= known


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


def test_each_dataset_has_its_pictures_beside_the_page(report):
    names = {path.name for path in (report.parent / "figures").iterdir()}
    assert {"b-scifact-b-quality-bytes.png", "docs-agreement-bytes.png", "docs-spectrum.png"} <= (
        names
    )
    assert len(names) == 10
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in (report.parent / "figures").iterdir())


def test_row_bytes_fixed_bytes_and_rerank_bytes_are_columns_of_their_own(report):
    text = report.read_text(encoding="utf-8")
    for column in ("bytes a row", "fixed bytes", "re-rank bytes a row", "index recall@10"):
        assert re.search(f"<th scope=.col. class=.[^>]*>{column}</th>", text)


def test_every_class_that_has_a_style_is_used(report):
    text = report.read_text(encoding="utf-8")
    style = text[text.index("<style>") : text.index("</style>")]
    used = {name for names in re.findall(r'class="([^"]*)"', text) for name in names.split()}
    assert set(re.findall(r"\.([a-z][a-z-]*)", style)) <= used


def test_the_page_says_what_build_seconds_are_and_what_auto_chooses(report):
    text = html.unescape(report.read_text(encoding="utf-8"))
    assert "Build seconds count projecting, training and adding" in text
    assert "training samples are the sweep's own, smaller than a build's." in text
    assert "<b>auto</b>: γ and centring chosen" in text


def test_the_command_shown_asks_for_the_recall_of_the_sweep(tmp_path):
    start = header()
    start["settings"]["target_recall"] = 0.9
    path = write_results(tmp_path / "r.jsonl", [start, RAW, point(index="ivf", ndcg=0.645)])
    assert "<span>--target-recall 0.9</span>" in write_report(path, tmp_path).read_text()


def test_a_name_that_is_not_utf8_gets_its_report_too(tmp_path):
    start = header(name=os.fsdecode(b"caf\xe9"))
    path = write_report(write_results(tmp_path / "r.jsonl", [start, RAW, point()]), tmp_path)
    assert "<title>Sweep of caf?</title>" in path.read_text(encoding="utf-8")


def test_a_commit_is_shown_short_and_says_where_the_checkout_differs(tmp_path):
    for commit, shown in (("410e0adfeed1234567", "410e0adfeed1"),
                          ("410e0adfeed1234567-dirty", "410e0adfeed1-dirty")):  # fmt: skip
        (sweep,) = read(tmp_path, [{**header(), "commit": commit}, RAW])
        assert ("commit", shown) in tables.facts(sweep)


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


def test_runs_of_one_dataset_are_told_apart(tmp_path):
    records = [header("a"), {**header("b"), "time": "2026-12-01T08:00"}, {**RAW, "run": "b"}]
    text = write_report(write_results(tmp_path / "r.jsonl", records), tmp_path).read_text()
    assert "SciFact, 2026-11-21 10:30" in text
    assert "SciFact, 2026-12-01 08:00" in text
    assert 'id="scifact"' in text
    assert 'id="scifact-2"' in text


def test_facts_that_are_missing_are_left_out(tmp_path):
    bare = {"type": "sweep", "run": "r1"}
    records = [bare, {"type": "point", "run": "r1", "key": "a"},
               {"type": "skipped", "run": "r1", "key": "odd"}]  # fmt: skip
    text = write_report(write_results(tmp_path / "r.jsonl", records), tmp_path).read_text()
    assert "None" not in re.sub(r"None of|data:[^\"]*", "", text)
    assert "not said" in text


def test_the_command_makes_the_report_from_results_alone(tmp_path):
    write_results(tmp_path / "results.jsonl", [header(), RAW, point()])
    done = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(tmp_path / "report.html")
    done = CliRunner().invoke(cli, ["report", str(tmp_path / "no")])
    assert done.exit_code == 5
    assert "name a folder that whiten-index sweep --out wrote" in done.output


def test_a_folder_that_cannot_be_written_is_an_output_error(tmp_path):
    write_results(tmp_path / "results.jsonl", [header(), RAW])
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a file stands where a folder is needed"):
        write_report(tmp_path / "results.jsonl", tmp_path / "file")


def test_without_jinja2_the_error_says_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "jinja2" else find(name))
    message = r"a report needs jinja2; pip install 'whiten-index\[plot\]'"
    with pytest.raises(ConfigError, match=message):
        check_report()
    with pytest.raises(ConfigError, match=message):
        write_report(write_results(tmp_path / "results.jsonl", [header()]), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["results.jsonl"]


def test_drawing_and_templates_load_when_they_are_used():
    script = (
        "import sys; import whiten_index.report; print({'matplotlib', 'jinja2'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_template_is_in_the_package():
    assert (Path(page.__file__).parent / "page.html.jinja").is_file()
