"""The papers' tables as a page and as Markdown: every figure, nothing that claims too much."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser

import numpy as np
import pytest
from report_helpers import papers_results

from whiten_index.errors import ArtifactError, ConfigError, StorageError
from whiten_index.report import markdown, page, write_papers
from whiten_index.report.heat_maps import HeatMap, draw_heat_map, heat_map_picture
from whiten_index.report.style import DOTS_PER_INCH, RED, empty_figure

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


def test_a_stand_in_never_has_a_difference_that_counts(rows, results, parsed, text):
    (row,) = (r for r in results["tables"][0]["rows"] if r["status"] == "stand-in")
    cells = list(row["figures"].values())
    found = lines_of(rows, results)["BERT-base"]
    assert set(found) == {"ours", "published", "not comparable"}
    assert found["not comparable"] == [f"({apart(cell)})" for cell in cells]
    largest = max(abs(c["ours"] - c["published"]) for c in cells)
    said = "".join(parsed.text)
    assert f"{largest:.2f} at most" not in said
    assert "1 row ran with a stand-in, another model: figures that do not compare" in said
    assert "reproduce nothing" in text
    style = re.search(r"tr\.stood td\.figure[^}]*color: var\(--grey\)", "".join(
        re.findall(r"<style>.*?</style>", parsed.source, re.S)))  # fmt: skip
    assert style
    assert parsed.classes.count("stood") == 3


def test_all_aggregations_are_there_on_demand(parsed, text, results):
    wanted = []
    for row in results["tables"][0]["rows"]:
        if row["status"] != "not run":
            wanted += [[how, *(shown(cell[how]) for cell in row["figures"].values())]
                       for how in ("all", "mean", "wmean")]  # fmt: skip
    for found in (parsed.rows, markdown_rows(text)):
        assert [row[1:] for row in found if row[1:] in wanted] == wanted
    folded = [each for each, row in zip(parsed.folded, parsed.rows, strict=True)
              if row[1:] in wanted]  # fmt: skip
    assert all(folded)
    assert text.count("<details>") == text.count("</details>") == parsed.tags.count("details")


def test_every_figure_of_the_drawings_is_in_a_table(rows, results):
    curves, heat_map = results["figures"]
    for place, x in enumerate(curves["x"]):
        assert [str(x), *(shown(each["y"][place]) for each in curves["series"])] in rows
    for label, row in zip(heat_map["labels"], heat_map["matrix"], strict=True):
        assert [label, *map(shown, row)] in rows


def test_shares_of_one_have_four_decimals_and_are_not_added_to_points(rows, parsed):
    assert ["QQP", "f1", "0.4321"] in [row[1:] for row in rows]
    assert [row[-1] for row in rows if row[-2:-1] == ["difference"] and len(row) <= 4] == [
        "+0.0101"
    ]
    summary = next(each for each in parsed.text if "of 5 rows ran" in each)
    assert summary.startswith("3 of 5 rows ran with the papers' own models: 3 figures differ")


def test_rows_that_did_not_run_say_why_with_their_published_figures(rows, results):
    (row,) = (r for r in results["tables"][0]["rows"] if r["status"] == "not run")
    published = [shown(cell["published"]) for cell in row["figures"].values()]
    assert [f"GPT_3, {row['setting']}", "no weights & no hope", *published] in rows
    assert ["Table 2", "flow 1; flow 2", "takes <training>"] in rows


# What is written by others stays text


def test_names_stay_text_and_the_page_refers_to_itself_alone(parsed):
    assert parsed.open == []
    assert not {"i", "own", "far", "training", "script"} & set(parsed.tags)
    assert all(r.startswith(("data:", "#")) for r in parsed.references)
    said = " ".join(parsed.text)
    for name in ("own <b>model</b>", "a|b <i>", "Effect of <k>", "bert is <far> away"):
        assert name in said
    assert "a <own> `model`" in said


def test_no_name_breaks_a_markdown_table(text, results):
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = {}
    for line in rows:
        widths.setdefault(len(re.split(r"(?<!\\)\|", line)), []).append(line)
    assert all(line.endswith("|") for line in rows)
    assert "<b>" not in text
    assert "<i>" not in text
    head = next(line for line in rows if "STS12" in line)
    assert r"a\|b \<i\>" in head
    assert [r for r in markdown_rows(text) if r[-1] == "a|b <i>"]


def test_commands_can_be_copied_whole(parsed, text, results):
    for row in results["tables"][0]["rows"]:
        for name in ("command", "command_of_own"):
            if name in row:
                assert row[name] in parsed.text
                assert row[name] in text.splitlines()
    assert "user-select: all" in parsed.source


@pytest.mark.parametrize("given", ["a `b`", "```", "x\n``y``"])
def test_a_fence_is_longer_than_what_it_fences(given):
    first, *middle, last = markdown.code(given).splitlines()
    assert "\n".join(middle) == given
    assert first == f"{last}sh"
    assert last not in given


# Pictures


def png_size(path):
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_each_drawing_is_a_file_of_its_own_that_the_markdown_shows(written, text):
    files = sorted(path.name for path in (written.parent / "figures").iterdir())
    assert files == ["k-2.png", "k.png"]
    named = re.findall(r"^!\[(.+)\]\((figures/[^)]+)\)$", text, re.M)
    assert [path for _, path in named] == ["figures/k.png", "figures/k-2.png"]
    assert all(len(alt) > 60 for alt, _ in named)


@pytest.mark.parametrize("count", [2, 7, 13, 25])
def test_a_heat_map_has_square_cells_in_both_widths(tmp_path, count):
    values = np.random.default_rng(0).uniform(0, 99, (count, count))
    shown = HeatMap(values, tuple(map(str, range(count))))
    picture = heat_map_picture("m", "t", "c", shown)
    picture.render(tmp_path / "m.png")
    cells = min(0.8, (9.4 - 1.3) / count)
    width, height = png_size(tmp_path / "m.png")
    assert (width, height) == (
        pytest.approx(9.4 * DOTS_PER_INCH, abs=1),
        pytest.approx((count * cells + 0.95) * DOTS_PER_INCH, abs=1),
    )
    for narrow in (False, True):
        figure = picture.figure(narrow=narrow)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        box = axes.get_window_extent()
        assert box.width == pytest.approx(box.height, rel=1e-6)
        assert figure.bbox.contains(box.x0, box.y0)
        assert figure.bbox.contains(box.x1, box.y1)


def test_a_heat_map_shows_its_matrix_and_frames_the_best_cells():
    matrix = np.array([[1.0, 52.126, np.nan], [52.126, -3.5, 7.0], [np.nan, 7.0, 2.0]])
    axes = empty_figure(4, 4).subplots()
    draw_heat_map(axes, HeatMap(matrix, ("0", "1", "2")), cell=1.0)
    drawn = {text.get_position(): text.get_text() for text in axes.texts}
    assert drawn == {
        (j, i): f"{matrix[i, j]:.2f}" for i, j in np.ndindex(3, 3) if np.isfinite(matrix[i, j])
    }
    from matplotlib.colors import to_hex

    framed = {patch.get_xy() for patch in axes.patches if to_hex(patch.get_ec()) == RED.lower()}
    assert framed == {(0.5, -0.5), (-0.5, 0.5)}
    bold = [text.get_position() for text in axes.texts if text.get_weight() == "bold"]
    assert sorted(bold) == [(0, 1), (1, 0)]
    assert "the highest, 0+1, 52.13, is marked" in HeatMap(matrix, ("0", "1", "2")).alt()


@pytest.mark.parametrize(("cell", "decimals"), [(0.5, 2), (0.28, 1), (0.15, 0), (0.08, None)])
def test_numbers_have_the_decimals_that_fit_their_cell(cell, decimals):
    values = np.full((2, 2), 12.345)
    axes = empty_figure(2, 2).subplots()
    draw_heat_map(axes, HeatMap(values, ("a", "b")), cell=cell)
    wanted = set() if decimals is None else {f"{12.345:.{decimals}f}"}
    assert {text.get_text() for text in axes.texts} == wanted
    assert all(text.get_size() >= 7 for text in axes.texts)


def test_colours_rise_in_lightness_and_numbers_stand_out_from_them():
    values = np.linspace(0, 99, 100).reshape(10, 10)
    axes = empty_figure(8, 8).subplots()
    image = draw_heat_map(axes, HeatMap(values, tuple("abcdefghij")), cell=0.8)
    grey = [_light(image.cmap(image.norm(value))[:3]) for value in values.ravel()]
    assert np.all(np.diff(grey) > -1e-3)
    for text in axes.texts:
        j, i = text.get_position()
        light, dark = sorted((grey[10 * i + j], _light(_rgb(text.get_color()))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3.9


def _rgb(colour):
    from matplotlib.colors import to_rgb

    return to_rgb(colour)


def _light(rgb):
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


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


def test_nothing_but_tables_is_enough_and_nan_is_no_figure(tmp_path, results):
    bare = {"tables": broken(results, lambda r: None)["tables"]}
    bare["tables"][0]["rows"][0]["figures"]["STS12"]["ours"] = float("nan")
    bare["tables"][0]["rows"][0]["figures"]["STS12"].pop("mean")
    page = _Page(write_papers(write(tmp_path / "p.json", bare), tmp_path).read_text())
    (row,) = (r for r in page.rows if r[0].startswith("own") and "ours" in r)
    assert row[3] == "–"
    assert "nan" not in " ".join(page.text).lower().split()
    assert "None" not in " ".join(page.text)


def test_without_the_extra_and_without_a_folder_the_error_says_so(tmp_path, monkeypatch, results):
    path = write(tmp_path / "papers.json", results)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a file stands where a folder is needed"):
        write_papers(path, tmp_path / "file")
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib and jinja2; pip install 'whiten-index\["):
        write_papers(path, tmp_path / "out")
