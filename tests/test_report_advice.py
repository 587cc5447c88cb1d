"""The report of a sweep: what it recommends, what it remarks on, what it says was not measured."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from tests.report_helpers import DIM, RAW, advice, header, point, read, sweep_records, titles_of
from whiten_index.report import write_report
from whiten_index.report.advice import advise
from whiten_index.report.awaited import awaited
from whiten_index.sweep import sweep_config
from whiten_index.sweep.grid import grid

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
