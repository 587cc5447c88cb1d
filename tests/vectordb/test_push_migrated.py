"""Pushing an index that was migrated to another embedding model over a table of the old one."""

from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import tiny_models
from whiten_index import BuildConfig, MigrateConfig, QueryTransform, build_index, migrate_index
from whiten_index.errors import GateError
from whiten_index.vectordb.push import push_index
from whiten_index.vectordb.push_config import PushConfig

pytestmark = pytest.mark.service
ROWS = 200


def nearest(folder: Path, texts: list[str]) -> list[str]:
    """Return the id of the nearest row of each text, by a query half opened now."""
    table = lancedb.connect(folder / "lance").open_table("docs")
    vectors = QueryTransform.of(folder / "index").encode_queries(texts)
    return [table.search(each).limit(1).to_list()[0]["id"] for each in vectors]


def test_the_table_follows_to_the_new_model(tmp_path: Path) -> None:
    tiny_models.bert(tmp_path / "model")
    rng = np.random.default_rng(0)
    words = ("cat", "dog", "river", "king", "queen", "book", "cold", "sang")
    texts = [" ".join(rng.choice(words, size=6)) + f" {row}" for row in range(ROWS)]
    ids = [f"d{row}" for row in range(ROWS)]
    pq.write_table(pa.table({"id": ids, "text": texts}), tmp_path / "c.parquet")
    given: dict[str, Any] = {"model": str(tmp_path / "model"), "pooling": "mean", "device": "cpu"}
    index = str(tmp_path / "index")
    build_index(
        BuildConfig(
            corpus=str(tmp_path / "c.parquet"), text_columns="text", id_column="id",
            whiten="pca", k=16, factory="Flat", out=index, **given,
        )
    )  # fmt: skip
    pushed = PushConfig(index=index, to=f"lancedb://{tmp_path / 'lance'}", table="docs")
    before = push_index(pushed)
    assert nearest(tmp_path, texts[:20]) == ids[:20]
    # Of the same width, a new table replaces the old one, and a note names the old query digest.
    migrate_index(MigrateConfig(index=index, layers=(1,), **given))
    after = push_index(pushed)
    assert (after.mode, after.rows) == ("all", ROWS)
    assert before.query_digest in after.notes[0]
    assert nearest(tmp_path, texts[:20]) == ids[:20]
    # Another width breaks programs, which --full says is meant.
    migrate_index(MigrateConfig(index=index, pooling="cls", model=given["model"], k=12))
    with pytest.raises(GateError, match=r"--k is 16 and would be 12.*--full"):
        push_index(pushed)
    assert push_index(PushConfig(**{**vars(pushed), "full": True})).k == 12
    assert nearest(tmp_path, texts[:20]) == ids[:20]
