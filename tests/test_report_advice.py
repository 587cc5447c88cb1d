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


def test_of_as_few_bytes_the_better_is_recommended_as_in_the_table(tmp_path):
    slow = point("none", DIM, "pq", ndcg=0.6442, per_row=64.0, p50=0.3)
    found = advice(tmp_path, RAW, slow, point(k=64, codec="sq8", ndcg=0.6412, p50=0.1))
    chosen = titles_of(found)["Smallest within 0.6 points of raw"]
    assert chosen.family == "raw"
    (row,) = (budget for budget in found.budgets if budget.limit == 64)
    assert row.best == chosen


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


def test_times_of_a_busy_machine_are_not_compared(tmp_path):
    slow = point(k=64, ndcg=0.6571, p50=0.25)
    slow["latency_ms"] |= {"spread": 2.0, "raw_p50": 1.0}
    found = advice(tmp_path, RAW, slow)
    assert "times faster" not in found.headline
    assert any("the machine was busy" in line for line in found.unmeasured)


def test_a_point_is_compared_with_raw_embeddings_timed_in_the_same_rounds(tmp_path):
    timed = point(k=64, ndcg=0.6571, p50=0.25)
    timed["latency_ms"] |= {"spread": 1.1, "raw_p50": 0.5}
    assert "(2.0 times faster)" in advice(tmp_path, RAW, timed).headline
