"""The report of a sweep: what it reads, what it recommends, and a page that stands alone."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from report_helpers import DIM, header, point, sweep_records, write_results

from whiten_index.cli import cli
from whiten_index.errors import ArtifactError, ConfigError, OutputError
from whiten_index.report import check_report, page, tables, words, write_report
from whiten_index.report.advice import advise
from whiten_index.report.awaited import awaited
from whiten_index.report.charts import charts_of
from whiten_index.report.fronts import front
from whiten_index.report.records import Point, read_results
from whiten_index.sweep import sweep_config
from whiten_index.sweep.grid import grid

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


def read(tmp_path, records):
    return read_results(write_results(tmp_path / "results.jsonl", records))


def advice(tmp_path, *points, **dataset):
    """The advice on a sweep of these points."""
    return advise(read(tmp_path, [header(**dataset), *points])[0])


def titles_of(advice):
    return {title: pick.point for pick in advice.picks for title in pick.titles}


RAW = point("none", DIM, ndcg=0.6451, p50=1.0)


# Reading


def test_figures_are_those_of_the_records(tmp_path):
    record = point("auto", 64, "sq8", "ivf", rerank=100)
    (sweep,) = read(tmp_path, [header(), record])
    (found,) = sweep.points
    assert (found.k, found.codec, found.index, found.candidates) == (64, "sq8", "ivf", 100)
    assert found.per_row == record["bytes"]["per_row"]
    assert found.fixed == record["bytes"]["fixed"]
    assert found.rerank_bytes == record["rerank"]["bytes_per_row"]
    assert found.p50 == record["latency_ms"]["p50"]
    assert found.ndcg == record["quality"]["ndcg@10"]
    assert found.index_recall == record["index_recall@10"]
    assert found.agreement == record["agreement@10"]


def test_a_torn_last_line_is_left_out_and_any_other_is_named(tmp_path):
    path = write_results(tmp_path / "results.jsonl", [header(), RAW])
    whole = path.read_text()
    path.write_text(whole + '{"type": "point", "run')
    assert len(read_results(path)[0].points) == 1
    path.write_text(whole + "{half\n" + json.dumps(RAW) + "\n")
    with pytest.raises(ArtifactError, match=r"line 3 of .* is not JSON; remove it or sweep again"):
        read_results(path)
    path.write_text(whole + "[1, 2]\n")
    message = r"line 3 of .* is no record but b'\[1, 2\]'; remove that line, or sweep again into"
    with pytest.raises(ArtifactError, match=message):
        read_results(path)


def test_a_point_measured_twice_counts_once_as_it_was_last(tmp_path):
    again = {**RAW, "quality": {"ndcg@10": 0.7}}
    (sweep,) = read(tmp_path, [header(), RAW, again])
    assert [p.ndcg for p in sweep.points] == [0.7]
    skipped = {"type": "skipped", "run": "r1", "key": "a", "why": "because"}
    measured = {**point(), "key": "a"}
    (sweep,) = read(tmp_path, [header(), skipped, measured])
    assert (len(sweep.points), len(sweep.skipped)) == (1, 0)


def test_sweeps_of_one_file_stay_apart_and_later_kinds_of_line_do_no_harm(tmp_path):
    records = [header("a", "A"), header("b", "B"), point(run="b"), {"type": "note", "run": "b"},
               point(run="a"), point(k=32, run="a")]  # fmt: skip
    first, second = read(tmp_path, records)
    assert (first.name, len(first.points)) == ("A", 2)
    assert (second.name, len(second.points)) == ("B", 1)


def test_the_line_that_starts_a_sweep_counts_wherever_it_stands(tmp_path):
    records = [RAW, {**point(), "key": "a"}, header("b", "B"), point(run="b"), header()]
    first, second = read(tmp_path, records)
    assert (first.name, len(first.points)) == ("SciFact", 2)
    assert (second.name, len(second.points)) == ("B", 1)


def test_results_that_are_missing_empty_or_headless_say_what_to_do(tmp_path):
    with pytest.raises(ArtifactError, match=r"cannot read .*No such file.* sweep --out wrote"):
        read_results(tmp_path / "results.jsonl")
    with pytest.raises(ArtifactError, match="holds no sweep; run whiten-index sweep"):
        read(tmp_path, [])
    with pytest.raises(ArtifactError, match=r"line 1 of .* of run r1, whose own first line is not"):
        read(tmp_path, [RAW])


def test_what_is_no_measurement_is_absent(tmp_path):
    record = {**point(), "quality": {"ndcg@10": float("nan")}, "latency_ms": None, "bytes": [],
              "agreement@10": "high", "index_recall@10": True, "center": 1}  # fmt: skip
    (sweep,) = read(tmp_path, [header(), record])
    found = sweep.points[0]
    assert [found.ndcg, found.p50, found.per_row, found.agreement, found.index_recall] == [None] * 5
    assert found.center is None


# Fronts

_COORDINATE = st.one_of(st.none(), st.integers(0, 6).map(float))


@given(st.lists(st.tuples(_COORDINATE, _COORDINATE), max_size=12))
def test_the_front_is_what_no_point_beats(pairs):
    points = [
        Point(str(n), "ours", "auto", 8, "fp32", "flat", per_row=x, ndcg=y)
        for n, (x, y) in enumerate(pairs)
    ]
    known = [p for p in points if p.per_row is not None and p.ndcg is not None]

    def beats(a, b):
        no_worse = a.per_row <= b.per_row and a.ndcg >= b.ndcg
        return no_worse and (a.per_row, a.ndcg) != (b.per_row, b.ndcg)

    truth = {(p.per_row, p.ndcg) for p in known if not any(beats(o, p) for o in known)}
    found = front(points, lambda p: p.per_row, lambda p: p.ndcg)
    assert {(p.per_row, p.ndcg) for p in found} == truth
    assert len(found) == len(truth)
    assert found == sorted(found, key=lambda p: p.per_row)


# The recommendation


def test_the_smallest_and_fastest_within_the_tolerance_are_recommended(tmp_path):
    records = sweep_records()
    (sweep,) = read(tmp_path, records)
    raw = next(p.ndcg for p in sweep.points if p.is_raw)
    near = [
        p
        for p in sweep.points
        if not p.is_raw and round(100 * p.ndcg, 2) >= round(100 * raw, 2) - 0.6 - 1e-9
    ]
    found = advise(sweep)
    picks = titles_of(found)
    smallest = picks["Smallest within 0.6 points of raw"]
    assert smallest.per_row == min(p.per_row for p in near if not p.candidates)
    assert picks["Fastest within 0.6 points of raw"].p50 == min(p.p50 for p in near)
    for figure in (f"{100 * smallest.ndcg:.2f}", f"{100 * raw:.2f} raw", "instead of 1,536"):
        assert figure in found.headline


def test_the_sentence_adds_up_for_who_subtracts_what_it_shows(tmp_path):
    found = advice(tmp_path, {**RAW, "quality": {"ndcg@10": 0.643649}},
                   point(codec="sq8", ndcg=0.638451))  # fmt: skip
    assert "nDCG@10 is 63.85 against 64.36 raw (−0.51 points)" in found.headline
    assert "64 bytes instead of 1,536 (24 times less)" in found.headline


def test_a_loss_of_exactly_the_tolerance_as_shown_is_within_it(tmp_path):
    raw = {**RAW, "quality": {"ndcg@10": 0.645}}
    assert "Use " in advice(tmp_path, raw, point(ndcg=0.639)).headline
    assert "No setting measured comes within 0.6 points of raw (64.50)" in (
        advice(tmp_path, raw, point(ndcg=0.6389)).headline
    )


def test_of_as_few_bytes_the_faster_is_the_smallest(tmp_path):
    slow = point("none", DIM, "pq", ndcg=0.6442, per_row=64.0, p50=0.3)
    found = advice(tmp_path, RAW, slow, point(k=64, codec="sq8", ndcg=0.6412, p50=0.1))
    assert titles_of(found)["Smallest within 0.6 points of raw"].family == "ours"
    assert any("raw PQ 64.42 (−0.09)" in line for line in found.remarks)


def test_where_all_lose_it_says_so_and_names_the_nearest(tmp_path):
    found = advice(tmp_path, RAW, point(k=32, ndcg=0.55), point(k=64, ndcg=0.60, p50=2.0))
    assert "No setting measured comes within 0.6 points of raw (64.51)" in found.headline
    assert "nDCG@10 60.00 (−4.51 points)" in found.headline
    assert "(2.0 times slower)" in found.headline
    assert "Sweep wider vectors than k = 64, or keep the raw embeddings." in found.headline
    assert set(titles_of(found)) == {"Nearest to raw"}
    wide = advice(tmp_path, RAW, point(k=380, ndcg=0.55))
    assert "Keep the raw embeddings where that loss is too much." in wide.headline


def test_where_raw_is_missing_nothing_is_compared_with_it(tmp_path):
    found = advice(tmp_path, point(k=64, ndcg=0.64), point(k=32, ndcg=0.637, codec="sq8"))
    assert "within 0.6 points of the best point" in " ".join(titles_of(found))
    assert "raw embeddings was not measured" in found.headline
    assert "against" not in found.headline
    assert "instead of 1,536" in found.headline  # bytes of float32 are known without measuring
    assert any(line.startswith("The raw embeddings:") for line in found.unmeasured)


def test_without_judgements_it_goes_by_agreement_and_says_what_that_is_not(tmp_path):
    raw = point("none", DIM, judged=False, agreement=1.0)
    some = [point(k=128, codec="sq8", judged=False, agreement=0.96),
            point(k=64, codec="sq8", judged=False, agreement=0.91),
            point(k=32, codec="pq", judged=False, agreement=0.70)]  # fmt: skip
    found = advice(tmp_path, raw, *some, judged=False)
    assert found.headline.startswith("No judgements came with this sweep")
    assert "96.0% of the raw neighbours are found" in found.headline
    assert titles_of(found)["Smallest at 95% agreement or more"].k == 128
    assert titles_of(found)["Smallest at 90% agreement or more"].k == 64
    assert "not whether results are better or worse" in " ".join(found.remarks)
    assert found.unmeasured[0] == "Quality: there were no judgements."
    assert "nDCG" not in found.headline
    low = advice(tmp_path, raw, some[2], judged=False)
    assert "No setting finds 80% of the raw embeddings' neighbours" in low.headline
    assert "70.0%" in low.headline


def test_agreement_never_stands_in_for_quality_of_some_points(tmp_path):
    unjudged = point(k=32, codec="pq", judged=False, agreement=1.0)
    found = advice(tmp_path, RAW, point(k=64, ndcg=0.645), unjudged)
    assert all(pick.point.k == 64 for pick in found.picks)


def test_what_is_better_than_raw_says_plus(tmp_path):
    found = advice(tmp_path, RAW, point(k=64, ndcg=0.6571, p50=0.25))
    assert "(+1.20 points)" in found.headline
    assert "(4.0 times faster)" in found.headline
    assert len(found.picks) == 1
    assert len(found.picks[0].titles) == 3


def test_a_winner_that_is_not_ours_is_said_to_be_none_of_ours(tmp_path):
    baseline = point("none", DIM, "sq8", ndcg=0.645)
    found = advice(tmp_path, RAW, baseline, point(k=64, ndcg=0.60))
    assert titles_of(found)["Smallest within 0.6 points of raw"].family == "raw"
    said = " ".join(found.remarks)
    assert "not a transform fitted to the corpus" in said
    assert "60.00 (−4.51)" in said
    alone = advice(tmp_path, RAW, baseline)
    assert "None of those was measured." in " ".join(alone.remarks)
    assert "Transforms fitted to the corpus." in alone.unmeasured


def test_alternatives_of_as_few_bytes_are_set_beside_the_choice(tmp_path):
    others = [point("none", DIM, "pq", ndcg=0.61, per_row=64.0),
              point("truncate", 64, "sq8", ndcg=0.58), point("faiss-pca", 64, "sq8", ndcg=0.63),
              point("none", DIM, "sq8", ndcg=0.644)]  # fmt: skip
    found = advice(tmp_path, RAW, point(k=64, codec="sq8", ndcg=0.642), *others)
    (line,) = [line for line in found.remarks if line.startswith("Alternatives in 64 bytes")]
    for said in ("raw PQ 61.00 (−3.51)", "truncation k=64 SQ8 58.00", "FAISS PCA k=64 SQ8 63.00"):
        assert said in line
    assert "64.40" not in line


def test_reranked_points_are_apart_with_their_bytes(tmp_path):
    again = point(k=64, codec="rabitq", rerank=100, ndcg=0.645)
    found = advice(tmp_path, RAW, again, point(k=128, codec="sq8", ndcg=0.644))
    picks = titles_of(found)
    assert picks["Smallest within 0.6 points of raw"].k == 128
    assert picks["Smallest with re-ranking within 0.6 points of raw"].candidates == 100
    assert any("768 bytes a row beside the index" in line for line in found.remarks)
    assert all(budget.best.candidates is None for budget in found.budgets)


def test_what_saves_nothing_is_not_praised(tmp_path):
    found = advice(tmp_path, RAW, point(k=DIM, ndcg=0.645, per_row=1_544.0, p50=1.2))
    assert "times less" not in found.headline
    assert "times faster" not in found.headline
    said = " ".join(found.remarks)
    assert "Nothing within 0.6 points of raw is smaller" in said
    assert "Nothing within 0.6 points of raw answers faster" in said


def test_a_loss_of_recall_that_ndcg_hides_is_pointed_out(tmp_path):
    def with_recall(record, value):
        return {**record, "quality": {**record["quality"], "recall@100": value}}

    raw = with_recall(RAW, 0.925)
    found = advice(tmp_path, raw, with_recall(point(ndcg=0.645), 0.91))
    (line,) = [line for line in found.remarks if "recall@100" in line]
    assert line.startswith("Recall@100 of the recommended setting is 91.00 against 92.50 raw")
    found = advice(tmp_path, raw, with_recall(point(ndcg=0.645), 0.92))
    assert not [line for line in found.remarks if "recall@100" in line]


def test_fixed_bytes_are_pointed_out_where_they_weigh(tmp_path):
    small = advice(tmp_path, RAW, point(k=64, codec="sq8", ndcg=0.645), rows=500)
    assert any("are fixed: matrix, codebooks" in line for line in small.remarks)
    large = advice(tmp_path, RAW, point(k=64, codec="sq8", ndcg=0.645), rows=10_000_000)
    assert not any("are fixed" in line for line in large.remarks)


def test_budgets_hold_the_best_of_all_that_fit(tmp_path):
    (sweep,) = read(tmp_path, sweep_records())
    plain = [p for p in sweep.points if not p.candidates]
    found = advise(sweep).budgets
    assert [budget.limit for budget in found] == sorted({budget.limit for budget in found})
    for budget in found:
        fitting = [p for p in plain if p.per_row <= budget.limit]
        assert budget.best.ndcg == max(p.ndcg for p in fitting)
        ours = [p.ndcg for p in fitting if p.family == "ours"]
        if budget.best.family != "ours":
            own = [b.own or b.best for b in found if b.limit <= budget.limit]
            assert max(p.ndcg for p in own if p.family == "ours") == max(ours)


def test_where_the_raw_embeddings_fit_a_budget_they_stand_among_the_others(tmp_path):
    wide = point("none", DIM, "fp32", "ivf", ndcg=0.60)
    found = advice(tmp_path, RAW, wide, point(k=64, codec="sq8", ndcg=0.64)).budgets
    assert [(b.limit, b.best.is_raw) for b in found] == [(64, False), (2_048, True)]
    assert found[1].own is None
    better = advice(tmp_path, RAW, point(k=64, codec="sq8", ndcg=0.65)).budgets
    assert [b.best.is_raw for b in better] == [False]
    assert advice(tmp_path, RAW).budgets == ()


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "No point was measured"),
        ([RAW], "Only the raw embeddings were measured"),
        ([{**point(judged=False), "agreement@10": None}], "No point has a figure of quality"),
    ],
)
def test_nothing_to_recommend_is_said(records, said, tmp_path):
    assert advice(tmp_path, *records).headline.startswith(said)
    write_report(tmp_path / "results.jsonl", tmp_path)


def test_what_was_not_measured_is_listed(tmp_path):
    found = advice(tmp_path, RAW, point(k=64), {**point(k=64, codec="sq8"), "latency_ms": None})
    for line in (
        "Other widths: only k = 64 was measured.",
        "Fitted transforms in IVF.",
        "Fitted transforms in HNSW.",
        "FAISS's own PCA.",
        "Latency of 1 of the 3 points.",
    ):
        assert line in found.unmeasured
    full = advise(read(tmp_path, sweep_records())[0])
    assert not any("not finished" in line for line in full.remarks)
    full = full.unmeasured
    assert "HNSW at other widths than k = 64, 128." in full
    assert "1 setting that was skipped, listed above with its reason." in full
    assert not any(line.startswith(("Other widths", "FAISS", "Latency")) for line in full)


def test_an_unfinished_sweep_says_what_is_to_come(tmp_path):
    baseline = point("faiss-pca", 256)
    kinds = ("auto", "pca", "whitening", "truncate")

    def of(kind, k):
        return [point(kind, k, c, i) for c in ("fp32", "sq8", "pq") for i in ("flat", "ivf")]

    some = [RAW, baseline, point("auto", 32)]
    some += [record for kind in kinds for record in of(kind, 64)]
    (line,) = [x for x in advice(tmp_path, *some).remarks if "not finished" in x]
    assert "at k = 32, 128, 256 not every setting asked for was measured yet" in line
    skipped = [{**record, "type": "skipped", "why": "rank"} for kind in kinds
               for k in (32, 128, 256) for record in of(kind, k)]  # fmt: skip
    assert not any("not finished" in x for x in advice(tmp_path, *some, *skipped).remarks)
    (line,) = [x for x in advice(tmp_path, *some[:-1], *skipped).remarks if "not finished" in x]
    assert "at k = 64 not every" in line


@pytest.mark.parametrize(
    "wishes",
    [
        {"codecs": "fp32,sq8,pq,pq48,rabitq"},
        {"widths": "64", "transforms": "auto", "codecs": "pq"},
        {"transforms": "auto", "indexes": "hnsw"},
        {"transforms": "whitening,whitening:0.25", "codecs": "sq8", "rerank": 0},
    ],
)
def test_every_setting_that_a_sweep_lays_out_is_awaited(wishes, tmp_path):
    config = sweep_config(
        {"corpus": ("c.parquet",), "embedding_column": "e", "out": "o",
         "widths": "32,64,128,192,500", **wishes}
    )  # fmt: skip
    laid = grid(config, dim=DIM, rank=381, rows=5_183)
    start = header()
    start["settings"] = {"k": list(config.ks), "transforms": [str(w) for w in config.transforms],
                         "codecs": list(config.codecs), "indexes": list(config.indexes),
                         "rerank": config.rerank}  # fmt: skip
    records = [{"type": "point", "run": "r1", "key": p.key, **p.setting()} for p in laid.points]
    records += [{"type": "skipped", "run": "r1", "key": p.key, **p.setting(), "why": why}
                for p, why in laid.skipped]  # fmt: skip
    (sweep,) = read(tmp_path, [start, *records])
    assert awaited(sweep) == []
    ours = [p for p in sweep.points if p.family in ("ours", "truncate")]
    assert len(ours) >= 2
    for left_out in ours:
        rest = tuple(p for p in sweep.points if p is not left_out)
        assert awaited(replace(sweep, points=rest)) == [left_out.k]


def test_gpus_are_unmeasured_only_where_no_point_is_of_one(tmp_path):
    assert "Other machines, GPUs, filtered" in advice(tmp_path, RAW, point()).unmeasured[-1]
    found = advice(tmp_path, RAW, {**point(), "device": "gpu"})
    assert "GPU" not in " ".join(found.unmeasured)


def test_judgements_that_were_of_no_use_are_counted(tmp_path):
    facts = {"relevant_documents_missing": 12, "judged_queries_without_text": 3}
    said = " ".join(advice(tmp_path, RAW, point(), **facts).remarks)
    assert "12 of the judged documents are not in the corpus" in said
    assert "3 of the judged queries have no text" in said
    assert "judged" not in " ".join(advice(tmp_path, RAW, point()).remarks)


def test_points_without_bytes_or_latency_still_get_advice(tmp_path):
    bare = {**point(k=64, ndcg=0.645), "bytes": None, "latency_ms": None}
    found = advice(tmp_path, RAW, bare)
    assert "its bytes were not measured" in found.headline
    assert set(titles_of(found)) == {"Best nDCG@10 below raw"}


_FIGURES = ("quality", "latency_ms", "bytes", "agreement@10", "index_recall@10", "exponent",
            "center", "factory", "seconds", "throughput", "parameters")  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_any_mixture_of_points_and_figures_gets_advice(seed, tmp_path):
    rng = random.Random(seed)
    records = [r for r in sweep_records() if r["type"] == "point"]
    some = [
        {**record, **{name: None for name in _FIGURES if rng.random() < 0.15}}
        for record in rng.sample(records, rng.randint(0, 12))
    ]
    (sweep,) = read(tmp_path, [header(), *some])
    found = advise(sweep)
    shown = " ".join([found.headline, *found.remarks, *found.unmeasured])
    assert found.headline.endswith(".")
    assert not re.search(r"\bNone (?!of)|\bnan\b|\binf\b", shown)
    judged = any(p.ndcg is not None for p in sweep.points)
    assert (found.measure.name == "nDCG@10") is judged
    for pick in found.picks:
        assert not pick.point.is_raw
        if judged and sweep.raw and sweep.raw.ndcg and "within" in pick.titles[0]:
            assert pick.point.ndcg >= sweep.raw.ndcg - 0.0061


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


# Charts


def test_index_recall_has_its_own_chart_and_fronts_leave_it_out(tmp_path):
    charts = {c.slug: c for c in charts_of(read(tmp_path, sweep_records())[0])}
    assert list(charts) == ["quality-bytes", "quality-latency", "quality-k", "index-recall",
                            "spectrum"]  # fmt: skip
    assert not any("recall" in charts[s].alt.lower() for s in charts if s.startswith("quality"))
    assert "do not read it as quality" in charts["index-recall"].caption


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"tuned_with": "queries"}, "tuned to, on other queries."),
        ({"tuned_with": "rows"}, "tuned to, on rows of the corpus, which are easier than queries."),
        ({"tuned_with": "rows", "judged": False}, "tuned to, on rows of the corpus."),
        ({}, "tuned to."),
    ],
)
def test_index_recall_says_with_what_it_was_tuned(facts, said, tmp_path):
    (sweep,) = read(tmp_path, [header(**facts), RAW, point(index="ivf")])
    (caption,) = [c.caption for c in charts_of(sweep) if c.slug == "index-recall"]
    assert caption.endswith(f"The line is what lists and graphs were {said}")


@pytest.mark.parametrize("target", [0.95, 0.99, 0.995])
def test_the_target_of_recall_is_not_rounded(target, tmp_path):
    start = header()
    start["settings"]["target_recall"] = target
    (sweep,) = read(tmp_path, [start, RAW, point(index="ivf")])
    (chart,) = [c for c in charts_of(sweep) if c.slug == "index-recall"]
    (axes,) = chart.figure(narrow=False).axes
    assert f"tuned to {100 * target:g}%" in [text.get_text() for text in axes.texts]


def test_alt_texts_hold_the_ends_of_the_front_and_raw(tmp_path):
    (sweep,) = read(tmp_path, sweep_records())
    chart = charts_of(sweep)[0]
    first, last = chart.leading[0], chart.leading[-1]
    for value in (first.ndcg, last.ndcg, sweep.raw.ndcg):
        assert f"{100 * value:.2f}" in chart.alt
    assert not any(p.candidates for p in chart.leading)


def test_one_width_has_no_curve_and_no_spectrum_no_spectrum(tmp_path):
    bare = {**header(), "spectrum": None}
    (sweep,) = read(tmp_path, [bare, RAW, point(), point(codec="sq8")])
    assert [c.slug for c in charts_of(sweep)] == ["quality-bytes", "quality-latency",
                                                  "index-recall"]  # fmt: skip


def test_points_outside_a_chart_are_counted(tmp_path):
    (sweep,) = read(tmp_path, [header(), RAW, point(ndcg=0.64), point(codec="pq", ndcg=0.2)])
    chart = charts_of(sweep)[0]
    assert "1 point lies below 48.38 and outside; the table has them." in chart.caption


def test_the_same_results_give_the_same_pictures(tmp_path):
    (sweep,) = read(tmp_path, [header(), RAW, point(), point(k=128)])
    png = tmp_path / "a.png"
    first, second = ((*charts_of(sweep)[0].render(png), png.read_bytes()) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("narrow", [True, False])
def test_labels_of_a_front_keep_clear_of_each_other(narrow, tmp_path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    chart = charts_of(read(tmp_path, sweep_records())[0])[0]
    figure = chart.figure(narrow=narrow)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(chart.leading)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


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
    with pytest.raises(OutputError, match="a file stands where a folder is needed"):
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
