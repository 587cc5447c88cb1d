"""A transform chosen by labels: judged queries by nDCG, pairs by ranks and by correlation."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import spearmanr

from tests.pipeline import choosing
from tests.pipeline.choosing import (
    Array,
    Judged,
    Place,
    assert_applied,
    choice,
    judged,
    names_of,
    pairs,
    raw_embeddings,
    setting_of,
    stages,
    vectors_of,
)
from whiten_index.encoding.encoder import Encoder
from whiten_index.pipeline.build import BuildReport
from whiten_index.whitening.moments import Moments

place = choosing.place


def ndcg(ranked: list[str], grades: dict[str, int]) -> float:
    """nDCG@10 by its definition, with the gain trec_eval takes: the grade itself."""
    discount = 1 / np.log2(np.arange(2, 12))
    gains = [grades.get(name, 0) for name in ranked[:10]]
    ideal = sorted(grades.values(), reverse=True)[:10]
    return float(gains @ discount[: len(gains)] / (ideal @ discount[: len(ideal)]))


def assert_scored_by_labels(report: BuildReport, model: Path, labels: Judged) -> None:
    raw = raw_embeddings(report)
    names = names_of(report)
    embedded = Encoder.load(str(model)).encode_queries(list(labels.texts.values()))
    for row in choice(report)["candidates"]:
        queries, vectors = vectors_of(Moments.of(raw), row, embedded.astype(np.float64), raw)
        scores = []
        for cosines, query in zip(queries @ vectors.T, labels.texts, strict=True):
            # Each document at the place of its nearest row.
            ranked = list(dict.fromkeys(names[i] for i in np.argsort(-cosines)))
            scores.append(ndcg(ranked, labels.grades[query]))
        assert row["score"] == pytest.approx(np.mean(scores), abs=2e-3)


def test_judged_queries_choose_the_best_by_ndcg(place: Place) -> None:
    labels = judged(place.root, place.texts, count=60)
    report = place.build("out", **labels.options())
    found = choice(report)
    assert found["rule"] == "labels"
    assert found["sample"] == 60
    assert found["measure"].startswith("nDCG@10")
    assert "encode pieces" not in stages(report)
    assert_scored_by_labels(report, place.model, labels)
    assert_applied(report)
    # The best of each width, not the gentlest near it; and then the narrowest near the best.
    leaders = [row for row in found["candidates"] if row["leads"]]
    gentler_near = 0
    for leader in leaders:
        same = [row for row in found["candidates"] if row["k"] == leader["k"]]
        assert leader["score"] == max(row["score"] for row in same)
        near = (row for row in same if row["score"] >= leader["score"] - row["error"])
        gentler_near += any(row["exponent"] < leader["exponent"] for row in near)
    assert gentler_near  # else this would not tell one rule from the other
    top = max(row["score"] for row in leaders)
    near = min(row["k"] for row in leaders if row["score"] >= 0.97 * top)
    assert found["chosen"]["k"] == near


def embedded_pairs(path: str, model: Path) -> tuple[Array, Array]:
    table, encoder = pq.read_table(path), Encoder.load(str(model))
    first, second = (table[name].to_pylist() for name in ("sentence1", "sentence2"))
    return (
        encoder.encode_queries(first).astype(np.float64),
        encoder.encode(second).astype(np.float64),
    )


def cosines_under(fitted_on: Moments, embedded: tuple[Array, Array], row: dict[str, Any]) -> Array:
    """Return the cosine of each pair after one of the transforms."""
    first, second = vectors_of(fitted_on, row, *embedded)
    return np.einsum("nk,nk->n", first, second)


@pytest.mark.parametrize(("exponent", "count"), [(0.125, 30), (0.125, 437), (0.875, 60)])
def test_scored_pairs_choose_the_transform_that_ranks_them_so(
    place: Place, exponent: float, count: int
) -> None:
    """The scores are its own cosines, so that it correlates with them as nothing else does."""
    wanted = {"k": 16, "exponent": exponent, "center": True}
    path = pairs(place.root / "pairs.parquet", count)
    raw = Moments.of(raw_embeddings(place.build("raw", whiten="none")))
    embedded = embedded_pairs(path, place.model)
    scores = cosines_under(raw, embedded, wanted)
    path = pairs(place.root / "pairs.parquet", count, np.round(scores, 6))
    report = place.build("out", pairs=path, k=16)
    assert choice(report)["chosen"] == wanted
    rows = {setting_of(row): row["score"] for row in choice(report)["candidates"]}
    assert rows[setting_of(wanted)] == pytest.approx(1, abs=1e-3)
    # The pair of i-th least score is of fold i mod n, n of them for ten pairs each, 20 at most.
    places = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
    fold = places % {30: 3, 60: 6, 437: 20}[count]
    for row in choice(report)["candidates"]:
        found = cosines_under(raw, embedded, row)
        each = [spearmanr(scores[fold == i], found[fold == i]).statistic for i in set(fold)]
        assert row["score"] == pytest.approx(np.mean(each), abs=2e-3), row
