"""Report of a sweep: reading of results, recommendation, page, Markdown and JSON."""

import html
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.bad_input import fails
from tests.measure.sweep_records import DIM, RAW, header, point, read, sweep_records, write_results
from whiten_index.cli import cli
from whiten_index.errors import ArtifactError
from whiten_index.measure import results, sweep_report
from whiten_index.measure.results import AGREEMENT, ESTIMATE, NDCG, PER_ROW, read_sweeps, recommend
from whiten_index.measure.sweep_report import write_report

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


def advice(folder: Path, *points: Any, **dataset: Any) -> results.Recommendation:
    return recommend(read(folder, header(**dataset), *points)[0])


def test_a_torn_last_line_is_left_out_and_any_other_damage_is_named(tmp_path):
    path = write_results(tmp_path / "results.jsonl", [header(), RAW])
    whole = path.read_text()
    path.write_text(whole + '{"type": "point", "run')
    (sweep,) = read_sweeps(path)
    assert (len(sweep.points), sweep.torn) == (1, True)
    page = write_report(tmp_path)
    assert "The last line of the results is cut off" in Path(page).read_text()
    for line in ("{half", "[1, 2]", "3", json.dumps(RAW)):
        path.write_text(f"{whole}{line}\n{whole}")
        with pytest.raises(ArtifactError, match=r"line 3 of .* is damaged .*; remove that line"):
            read_sweeps(path)
    assert whole.count("0.6451") == 1
    path.write_text(whole.replace("0.6451", "0.6541"))
    with pytest.raises(ArtifactError, match=r"line 2 of .* is damaged"):
        read_sweeps(path)


@pytest.mark.parametrize(
    "field",
    [{"k": "wide"}, {"k": 10**400}, {"parameters": 1}, {"bytes": "many"}, {AGREEMENT: [[]]}],
    ids=["text", "huge", "number", "no object", "list"],
)
def test_a_field_of_another_type_is_damage(tmp_path, field):
    write_results(tmp_path / "results.jsonl", [header(), RAW, {**point(), **field}])
    with pytest.raises(ArtifactError, match=r"results\.jsonl has a field of another type"):
        write_report(tmp_path)


def test_only_a_file_of_lines_is_read(tmp_path):
    path = tmp_path / "results.jsonl"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(path)
        with pytest.raises(ArtifactError, match="is a pipe, a socket or a device"):
            read_sweeps(path)
        path.unlink()
    path.write_bytes(bytes(17 << 20))
    with pytest.raises(ArtifactError, match="line 1 has more than 16,777,216 bytes"):
        read_sweeps(path)


def test_of_equal_keys_the_last_record_counts(tmp_path):
    skipped = {"type": "skipped", "run": "r1", "key": "a", "why": "because"}
    again = {**RAW, "quality": {"ndcg@10": 0.7}}
    (sweep,) = read(tmp_path, header(), RAW, again, skipped, {**point(), "key": "a"})
    assert [found.number(NDCG) for found in sweep.points if found.is_raw] == [0.7]
    assert (len(sweep.points), len(sweep.skipped)) == (2, 0)


def test_sweeps_of_one_file_stay_apart_wherever_their_first_lines_are(tmp_path):
    first, second = read(
        tmp_path, RAW, header("b", "B"), point(run="b"), {"type": "note", "run": "b"}, header(),
        {**point(), "key": "a"},
    )  # fmt: skip
    assert (first.name, len(first.points)) == ("SciFact", 2)
    assert (second.name, len(second.points)) == ("B", 1)


def test_missing_empty_and_headless_results_say_what_to_do(tmp_path):
    with pytest.raises(ArtifactError, match=r"cannot read .*No such file.* sweep --out wrote"):
        read_sweeps(tmp_path / "results.jsonl")
    with pytest.raises(ArtifactError, match="holds no sweep; run whiten-index sweep"):
        read(tmp_path)
    with pytest.raises(ArtifactError, match=r"has points of run r1, whose first line is not"):
        read(tmp_path, RAW)


def test_the_fewest_bytes_within_the_tolerance_are_recommended(tmp_path):
    (sweep,) = read(tmp_path, *sweep_records())
    least = sweep.raw.number(NDCG) - 0.006
    near = [p for p in sweep.points if not p.is_raw and p.number(NDCG) >= least]
    found = recommend(sweep)
    sizes = [p.number(PER_ROW) for p in near if not p.candidates]
    assert found.point.number(PER_ROW) == min(sizes)
    for figure in (*(f"{100 * p.number(NDCG):.2f}" for p in (found.point, sweep.raw)), "raw 1,536"):
        assert figure in found.reason


def test_figures_are_compared_as_they_are_shown(tmp_path):
    raw = {**RAW, "quality": {"ndcg@10": 0.645}}
    kept = advice(tmp_path, raw, point(ndcg=0.639)).reason
    assert "the nDCG@10 of the raw embeddings (64.50): 63.90 at" in kept
    lost = advice(tmp_path, raw, point(ndcg=0.6389))
    assert "No setting is within 0.6 points" in lost.reason
    assert "63.89" in lost.reason
    assert "keep the raw embeddings, or sweep a larger k" in lost.reason


def test_the_interval_of_the_difference_decides_and_not_its_mean(tmp_path):
    unsure, sure = point(k=64, ndcg=0.6449), point(k=128, codec="sq8", ndcg=0.6440)
    unsure["intervals"] = {"ndcg@10_to_raw": [-0.0081, 0.0079]}
    sure["intervals"] = {"ndcg@10_to_raw": [-0.0059, 0.0049]}
    assert advice(tmp_path, RAW, unsure, sure).point.k == 128
    none = advice(tmp_path, RAW, unsure)
    assert "No setting is within 0.6 points" in none.reason
    assert "by the 95% interval" in none.reason


def test_reranked_points_are_taken_only_if_no_other_qualifies(tmp_path):
    again = point(k=64, codec="rabitq", rerank=100, ndcg=0.645)
    assert advice(tmp_path, RAW, again, point(k=128, codec="sq8", ndcg=0.644)).point.k == 128
    only = advice(tmp_path, RAW, again, point(k=128, codec="sq8", ndcg=0.5))
    assert only.point.candidates == 100
    # The index of a named factory does not say that its hits are ranked again.
    assert only.command.endswith(" && whiten-index search INDEX --rerank 100 TEXT")
    assert "8 bytes per row (768 more in the store, raw 1,536)" in only.reason


def test_without_raw_the_best_point_is_the_reference(tmp_path):
    found = advice(tmp_path, point(k=64, ndcg=0.64), point(k=32, ndcg=0.637, codec="sq8"))
    assert found.point.k == 32
    assert "of the best point (raw: unknown) (64.00): 63.70 at" in found.reason


def test_without_judgements_agreement_decides_and_the_reason_says_so(tmp_path):
    raw = point("none", DIM, judged=False, agreement=1.0)
    some = [point(k=128, codec="sq8", judged=False, agreement=0.96),
            point(k=64, codec="sq8", judged=False, agreement=0.91),
            point(k=32, codec="pq", judged=False, agreement=0.70)]  # fmt: skip
    found = advice(tmp_path, raw, *some)
    assert (found.point.k, found.measure) == (128, AGREEMENT)
    assert "at 95% or more of the raw embeddings' ten nearest neighbours: 96.0%" in found.reason
    assert "quality is unknown" in found.reason
    assert advice(tmp_path, raw, *some[1:]).point.k == 64
    assert "No setting is at 80% or more" in advice(tmp_path, raw, some[2]).reason
    # One judged point suffices for quality to decide; agreement never stands in for it.
    unjudged = point(k=32, codec="pq", judged=False, agreement=1.0)
    assert advice(tmp_path, RAW, point(k=64, ndcg=0.645), unjudged).point.k == 64


def test_without_judgements_the_score_by_pieces_decides_as_it_does_in_a_build(tmp_path):
    """The index finds 0.96 of the neighbours; what FAISS makes has no such score."""
    raw = {**point("none", DIM, judged=False), "pieces": 0.72, "index_recall@10": 1.0}
    some = [{**point(k=k, judged=False, agreement=0.8), "pieces": score}
            for k, score in ((32, 0.70), (64, 0.73), (128, 0.75))]  # fmt: skip
    found = advice(tmp_path, raw, *some, point("faiss-pca", 16, judged=False, agreement=1.0))
    assert (found.point.k, found.measure) == (64, ESTIMATE)
    assert "within 3% of the score of the raw embeddings (0.720): 0.701 at" in found.reason
    assert "is an estimate from pieces of the texts" in found.reason


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "no point has the figures it needs"),
        ([RAW], "only raw embeddings were measured"),
        ([{**point(judged=False), "agreement@10": None}], "no point has the figures it needs"),
    ],
)
def test_nothing_to_recommend_is_said(records, reason, tmp_path):
    found = advice(tmp_path, *records)
    assert (found.point, found.reason) == (None, f"There is nothing to recommend: {reason}.")
    write_report(tmp_path)


@pytest.mark.parametrize("seed", range(10))
def test_any_mixture_of_points_and_figures_gets_a_report(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_report, "charts_of", lambda *_: ())
    rng, names = random.Random(seed), ("quality", "latency_ms", "bytes", "agreement@10", "factory")
    some = [
        {**record, **{name: None for name in names if rng.random() < 0.15}}
        for record in rng.sample(sweep_records()[1:-1], rng.randint(0, 12))
    ]
    (sweep,) = read(tmp_path, header(), *some)
    found = recommend(sweep)
    assert found.reason.endswith(".")
    assert (found.measure == NDCG) is any(p.number(NDCG) is not None for p in sweep.points)
    assert found.point is None or not found.point.is_raw
    page = write_report(tmp_path).read_text()
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b", page)


def test_times_of_a_busy_machine_are_not_to_be_compared(tmp_path):
    steady, shaky = point(k=64), point(k=32)
    read(tmp_path, header(), RAW, steady, shaky)
    quiet = write_report(tmp_path).read_text()
    shaky["latency_ms"]["spread"] = 1.6
    read(tmp_path, header(), RAW, steady, shaky)
    busy = write_report(tmp_path).read_text()
    told = "The machine was busy: the times of 1 of the 3 points differ"
    assert (told in quiet, told in busy) == (False, True)


@given(st.lists(st.tuples(*[st.one_of(st.none(), st.integers(0, 6).map(float))] * 2), max_size=12))
def test_the_front_is_what_no_point_beats(pairs):
    points = [
        results.Measured({"bytes": {"per_row": x}, "quality": {"ndcg@10": y}}) for x, y in pairs
    ]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]

    def beaten(x, y):
        return any(a <= x and b >= y and (a, b) != (x, y) for a, b in known)

    found = [(p.number(PER_ROW), p.number(NDCG)) for p in results.front(points, PER_ROW, NDCG)]
    assert found == sorted({pair for pair in known if not beaten(*pair)})


def test_the_options_shown_are_those_of_build(tmp_path):
    known = {o for parameter in cli.commands["build"].params
             for o in (*parameter.opts, *parameter.secondary_opts)}  # fmt: skip
    records = [point("auto", index="ivf", codec="sq8"), point("pca"), point("whitening"),
               point("truncate"), point("none", DIM, "sq8"), point("faiss-pca")]  # fmt: skip
    (sweep,) = read(tmp_path, header(), *records)
    shown = [p.build_options(0.95) for p in sweep.points]
    assert shown[0] == "--whiten whitening --exponent 0.25 --center --k 64 --factory IVF256,SQ8"
    assert shown[1].startswith("--whiten pca --center")
    assert shown[4:] == ["--whiten none --factory SQ8", ""]
    assert sweep.points[0].build_options(0.99) == f"{shown[0]} --target-recall 0.99"
    assert set(re.findall(r"--[a-z-]+", " ".join(shown))) <= known


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    records = sweep_records("r1", "<b>Sci|Fact</b>\x1b\x7f")
    records += sweep_records("r2", "docs", judged=False)
    write_results(folder / "results.jsonl", records)
    return write_report(folder)


def test_the_page_is_whole_and_refers_to_itself_alone(report):
    text = report.read_text(encoding="utf-8")
    assert not re.search(r"""\b(src|srcset|href)\s*=\s*(?!"data:|"#)""", text)
    assert not re.search(r"https?://(?!www\.w3\.org/)|url\((?!#)|@import", text)
    assert len(text) < 1_000_000
    assert "<b>Sci|Fact</b>" not in text
    assert r"&lt;b&gt;Sci|Fact&lt;/b&gt;\x1b\x7f" in text
    assert "FAISS has no &lt;HNSW&gt;" in text


def test_names_send_nothing_to_a_terminal(report):
    for name in ("report.html", "report.md"):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", (report.parent / name).read_text())


def test_each_sweep_has_its_charts_whose_points_lead_to_their_rows(report):
    page = report.read_text(encoding="utf-8")
    assert re.findall(r"<figure>\s*<h3>(.*?)</h3>", page) == [
        "Quality against bytes per row", "Quality against ms per query",
        "Agreement against bytes per row", "Agreement against ms per query",
        "Spectrum of the embeddings",
    ]  # fmt: skip
    rows = re.findall('<tr id="(.*?)"', page)
    assert sorted(2 * rows) == sorted(re.findall('<a xlink:href="#(.*?)"', page))


def test_the_table_is_sorted_and_marks_the_recommended_row(report):
    page = html.unescape(report.read_text(encoding="utf-8"))
    judged, _ = read_sweeps(report.parent / "results.jsonl")
    advice, points = recommend(judged), {point.name: point for point in judged.points}
    names = re.findall(r'<tr [^>]*><th scope="row">(.*?)</th>', page)[: len(points)]
    sizes = [points[name].number("bytes.per_row") for name in names]
    assert sizes == sorted(sizes)
    assert advice.point in judged.points
    rows = re.findall(r'<tr .*class="recommended"><th scope="row">(.*?)</th>', page)
    assert len(rows) == 2
    assert f"**{rows[0]}**" in (report.parent / "report.md").read_text().replace("\\", "")
    assert advice.reason.startswith(rows[0])
    assert advice.reason in page
    assert len(re.findall('<tr .*class="raw">', page)) == 2


def test_the_page_begins_with_the_command_and_three_numbers_beside_raw(tmp_path):
    few = point(k=64, codec="sq8", ndcg=0.6413, p50=0.25)
    few["intervals"] = {"ndcg@10_to_raw": [-0.017, 0.0093], "quality.ndcg@10": [0.61, 0.67]}
    read(tmp_path, {**header(), "build": "whiten-index build 'my  docs' --id-column id"}, RAW, few)
    first = write_report(tmp_path).read_text(encoding="utf-8").partition("<figure>")[0]
    (command,) = re.findall(r"<code>(.*?)</code>", first)
    assert html.unescape(re.sub("<.*?>", "", command)) == (
        "whiten-index build 'my  docs' --id-column id --out INDEX --whiten whitening "
        "--exponent 0.25 --center --k 64 --factory SQ8"
    )
    numbers = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", first)
    assert [[name, *re.split("(?:</?small>)+", cell)[:-1]] for name, cell in numbers] == [
        ["bytes per row", "64", "raw 1,536"],
        ["nDCG@10", "64.13", "raw 64.51", "difference -1.70 to +0.93 (95%)"],
        ["query p50", "0.250\xa0ms", "raw 1.00\xa0ms"],
    ]


def test_the_markdown_is_one_table_a_sweep_in_which_names_are_no_markup(report):
    text = (report.parent / "report.md").read_text()
    assert r"## \<b\>Sci\|Fact\</b\>" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_reports_of_others_stay_as_they_are(tmp_path, name):
    write_results(tmp_path / "results.jsonl", [header(), RAW])
    sweep = ["sweep", "no.parquet", "--text-column", "text", "--out", tmp_path]
    for make in (Path.mkdir, lambda path: path.write_text("## my own")):
        make(tmp_path / name)
        for command in (["report", tmp_path], sweep):
            fails(2, f"{name} holds something else than the report of a sweep", *command)
        if (tmp_path / name).is_dir():
            (tmp_path / name).rmdir()
    assert (tmp_path / name).read_text() == "## my own"


def test_without_what_draws_the_report_has_no_page(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_results(tmp_path / "results.jsonl", [header(), RAW])
    assert write_report(tmp_path) == tmp_path / "report.md"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"results.jsonl", "report.md"}
