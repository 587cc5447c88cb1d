"""What an index learns: how many rows it takes, and what is said where they are few."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import pytest

from whiten_index.errors import ConfigError
from whiten_index.index import (
    inner_index,
    least_training_rows,
    require_training_rows,
    too_few_rows,
    train,
)

ROWS = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    faiss.omp_set_num_threads(1)


@pytest.mark.parametrize(
    ("factory", "least"),
    [
        ("SQ8", 1), ("IVF7,Flat", 7), ("PQ4", 256), ("PQ4x4", 16), ("PQ4x4fs", 16),
        ("IVF300,PQ4x4", 300), ("RQ2x6", 64), ("PRQ2x2x5", 32), ("PLSQ2x2x4", 16), ("LSQ2x4", 16),
        ("PQ4x4,RFlat", 16), ("IVF4,PRQ2x2x5", 32), ("PRQ2x2x4fs", 16),
    ],
)  # fmt: skip
def test_a_row_a_centroid_or_value_of_a_code_is_the_least(factory: str, least: int) -> None:
    index = inner_index(factory, 16)
    assert least_training_rows(index) == least
    require_training_rows(index, factory, rows=least)
    with pytest.raises(ConfigError, match=f"it learns {least} centroids"):
        require_training_rows(index, factory, rows=least - 1)


@pytest.mark.parametrize(
    "factory",
    ["PQ4", "IVF16,Flat", "IVF4,PQ4x6", "RQ2x6", "PRQ2x2x6", "LSQ2x4", "PLSQ2x2x4", "IVF4,PRQ2x2x6",
     "PRQ2x2x4fs", "PQ4x6,RFlat"],
)  # fmt: skip
def test_few_rows_are_told_in_our_words_and_not_in_those_of_faiss(
    factory: str, capfd: pytest.CaptureFixture[str]
) -> None:
    index: Any = inner_index(factory, 16)
    said = too_few_rows(index, len(ROWS))
    assert said is not None
    assert "are learned from 300 rows, and FAISS advises" in said
    train(index, ROWS, factory)
    index.add(ROWS)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("factory", ["SQ8", "PQ4x2", "IVF4,Flat", "Flat", "RQ2x2"])
def test_rows_enough_are_not_worth_a_word(factory: str) -> None:
    assert too_few_rows(inner_index(factory, 16), len(ROWS)) is None
