"""Long documents from the corpus to the hit: cut, encoded, reused, grouped, shown."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whiten_index import BuildConfig, build_index, open_index
from whiten_index.pipeline.build import BuildReport

SENTENCES = ("the cat sat on the mat.", "a dog ran in the river.", "the king reads a book.")


@pytest.fixture
def corpus(tmp_path: Path, tiny_words: tuple[str, ...]) -> str:
    """Thirty documents of 1 to 40 sentences, and two blank ones; d5 alone holds wine and bread."""
    random = np.random.default_rng(0)
    known = [word for word in tiny_words if word not in ("wine", "bread")]
    texts: list[str | None] = [
        " ".join(" ".join(random.choice(known, 6)) + "." for _ in range(length))
        for length in [*random.integers(1, 12, 28), 40, 1]
    ]
    words = str(texts[5]).split()
    texts[5] = " ".join([*words[: 6 * 4], "wine wine bread bread wine bread.", *words[6 * 4 :]])
    texts += [None, "  "]
    ids = [f"d{i}" for i in range(len(texts))]
    table = pa.table({"id": ids, "text": texts, "year": range(len(texts))})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=10)
    return str(tmp_path / "c.parquet")


def options(model: Path, **more: Any) -> dict[str, Any]:
    plain = {"text_columns": "text", "id_column": "id", "keep": "year", "model": str(model)}
    return {**plain, "shard_rows": 10, "threads": 1, "whiten": "none", "device": "cpu", **more}


def build(out: Path, corpus: str, model: Path, **more: Any) -> BuildReport:
    return build_index(BuildConfig(corpus=(corpus,), out=str(out), **options(model, **more)))


def test_a_second_build_reuses_every_passage_and_other_lengths_do_not_mix(
    tmp_path: Path, corpus: str, tiny_model: Path
) -> None:
    out, store = tmp_path / "out", str(tmp_path / "store")
    first = build(out, corpus, tiny_model, passage_tokens=16, store=store)
    again = build(out, corpus, tiny_model, passage_tokens=16, store=store)
    counts = again.encoded.counts
    assert (counts.encoded, counts.reused) == (0, 30)
    assert counts.passages == first.encoded.counts.passages
    assert again.up_to_date
    alone = build_index(
        BuildConfig(store=store, out=str(tmp_path / "alone"), whiten="none", model=str(tiny_model))
    )
    assert alone.encoded.counts.reused == 30
    assert alone.encoded.counts.passages == counts.passages
    queries = [*SENTENCES]
    found = [
        open_index(folder, device="cpu").search(queries, top_k=7)
        for folder in (out, tmp_path / "alone")
    ]
    assert found[0] == found[1]
    other = build(out, corpus, tiny_model, passage_tokens=12, store=store)
    assert other.encoded.counts.encoded > 0
    assert other.version != first.version
