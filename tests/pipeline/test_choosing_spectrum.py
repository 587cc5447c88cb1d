"""A transform chosen by the spectrum: where texts are short or few, and where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.choosing import Place, assert_applied, choice, documents, embedded, parquet
from whiten_index import BuildConfig, build_index


def test_short_texts_are_chosen_for_by_the_spectrum_and_told_why(
    tmp_path: Path, model: Path
) -> None:
    texts = documents(150, sentences=1)
    corpus = parquet(tmp_path / "c.parquet", id=list(range(150)), text=texts)
    place = Place(tmp_path, model, texts)
    report = place.build("out", corpus=(corpus,))
    found = choice(report)
    assert found["rule"] == "spectrum"
    assert "150 of 150 texts are too short" in found["why"]
    assert found["candidates"] == []
    assert 0 <= found["chosen"]["exponent"] <= 1
    assert_applied(report)


@pytest.mark.parametrize("wishes", [{}, {"k": 5}, {"exponent": 0.3}, {"center": False}])
def test_embeddings_are_chosen_for_by_the_spectrum(tmp_path: Path, wishes: dict[str, Any]) -> None:
    options = {**embedded(tmp_path / "c.parquet"), **wishes}
    report = build_index(BuildConfig(out=str(tmp_path / "out"), **options))
    assert choice(report)["rule"] == "spectrum"
    assert "only embeddings" in choice(report)["why"]
    assert choice(report)["chosen"].items() >= wishes.items()
    assert_applied(report)
