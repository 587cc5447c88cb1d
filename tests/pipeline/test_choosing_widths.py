"""Widths that ``--whiten auto`` tries: those that the factory and the budget allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pipeline.choosing import choice, parquet, shards
from whiten_index import BuildConfig, build_index
from whiten_index.errors import ConfigError


def column(path: Path, dim: int, *, rank: int | None = None, rows: int = 300) -> dict[str, Any]:
    """Embeddings that fill the first ``rank`` of their dims."""
    values = np.random.default_rng(0).normal(size=(rows, dim)) * np.geomspace(1, 0.2, dim) + 0.5
    values[:, dim if rank is None else rank :] = 0
    corpus = parquet(path, id=list(range(rows)), e=list(values.astype(np.float32)))
    return {"corpus": (corpus,), "embedding_column": "e", "id_column": "id"}


def test_a_width_is_chosen_that_fits_the_budget(tmp_path: Path) -> None:
    options = column(tmp_path / "c.parquet", 96, rows=2_000) | {"store": str(tmp_path / "store")}
    free = build_index(BuildConfig(out=str(tmp_path / "free"), **options))
    assert choice(free)["chosen"]["k"] == 32
    # 2,000 rows of 32 dims take 16,640 bytes of binary codes and transforms, or more.
    kept = build_index(BuildConfig(out=str(tmp_path / "out"), memory_budget="30KB", **options))
    assert choice(kept)["chosen"]["k"] == 16
    assert kept.manifest["bytes"]["index"]["total"] <= 30_000


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("PQ7", "--factory PQ7 fits none of the round widths.*name one with --k"),
        ("PQ5", "cannot make 'PQ5' over 98 dims"),
        ("Nonsense", "cannot make 'Nonsense'"),
        ("PCA16,Flat", "a transform of its own"),
    ],
)
def test_a_factory_that_fits_no_width_is_refused_before_anything_is_encoded(
    tmp_path: Path, factory: str, told: str
) -> None:
    options = column(tmp_path / "c.parquet", 98)
    with pytest.raises(ConfigError, match=told):
        build_index(BuildConfig(out=str(tmp_path / "out"), factory=factory, **options))
    assert not shards(tmp_path)
