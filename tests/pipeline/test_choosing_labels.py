"""A transform chosen by judged queries, by nDCG."""

from pathlib import Path

import numpy as np
import pytest

from tests.pipeline import choosing
from tests.pipeline.choosing import Judged, Place
from whiten_index import Moments, load_encoder
from whiten_index.pipeline.build import BuildReport

place = choosing.place


def ndcg(ranked: list[str], grades: dict[str, int]) -> float:
    """nDCG@10 by its definition, with the gain trec_eval takes: the grade itself."""
    discount = 1 / np.log2(np.arange(2, 12))
    gains = [grades.get(name, 0) for name in ranked[:10]]
    ideal = sorted(grades.values(), reverse=True)[:10]
    return float(gains @ discount[: len(gains)] / (ideal @ discount[: len(ideal)]))


def assert_scored_by_labels(report: BuildReport, model: Path, labels: Judged) -> None:
    raw = choosing.raw_embeddings(report)
    names = choosing.names_of(report)
    embedded = load_encoder(str(model)).encode_queries(list(labels.texts.values()))
    for row in choosing.choice(report)["candidates"]:
        queries, vectors = choosing.vectors_of(
            Moments.of(raw), row, embedded.astype(np.float64), raw
        )
        scores = []
        for cosines, query in zip(queries @ vectors.T, labels.texts, strict=True):
            # Each document at the place of its nearest row.
            ranked = list(dict.fromkeys(names[i] for i in np.argsort(-cosines)))
            scores.append(ndcg(ranked, labels.grades[query]))
        assert row["score"] == pytest.approx(np.mean(scores), abs=2e-3)


def test_judged_queries_choose_the_best_by_ndcg(place: Place) -> None:
    labels = choosing.judged(place.root, place.texts, count=60)
    report = place.build("out", **labels.options())
    found = choosing.choice(report)
    assert found["rule"] == "labels"
    assert found["sample"] == 60
    assert found["measure"].startswith("nDCG@10")
    assert "encode pieces" not in choosing.stages(report)
    assert_scored_by_labels(report, place.model, labels)
    choosing.assert_applied(report)
    # So it is where the embeddings are given, and the model encodes the queries alone.
    raw = list(choosing.raw_embeddings(report).astype(np.float32))
    path = choosing.parquet(place.root / "e.parquet", id=choosing.names_of(report), e=raw)
    given = place.build(
        "given", corpus=(path,), text_columns=(), embedding_column="e", **labels.options()
    )
    choosing.assert_same_choice(choosing.choice(given), found)
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
