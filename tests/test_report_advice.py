"""The report of a sweep: what it recommends, what it remarks on, what it says was not measured."""

from __future__ import annotations

import random
import re

import pytest

from tests.report_helpers import RAW, advice, header, point, read, sweep_records, titles_of
from whiten_index.report import write_report
from whiten_index.report.advice import advise

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


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


def test_where_all_lose_it_says_so_and_names_the_nearest(tmp_path):
    found = advice(tmp_path, RAW, point(k=32, ndcg=0.55), point(k=64, ndcg=0.60, p50=2.0))
    assert "No setting measured comes within 0.6 points of raw (64.51)" in found.headline
    assert "nDCG@10 60.00 (−4.51 points)" in found.headline
    assert "(2.0 times slower)" in found.headline
    assert "Sweep wider vectors than k = 64, or keep the raw embeddings." in found.headline
    assert set(titles_of(found)) == {"Nearest to raw"}
    wide = advice(tmp_path, RAW, point(k=380, ndcg=0.55))
    assert "Keep the raw embeddings where that loss is too much." in wide.headline


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
