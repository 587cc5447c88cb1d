"""What the tests of the frameworks' classes share: small indexes, and what they hold and find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tests.helpers import tiny_models
from tests.helpers.builds import build as build_columns
from tests.helpers.builds import build_texts, random_rows, write_rows
from whiten_index import PushConfig, QueryTransform, open_index
from whiten_index.search.search_index import Hit
from whiten_index.vectordb.push_source import PushSource

ROWS, K, TOP = 90, 6, 5
PROMPTS = {"document": "the cat ", "query": "the king sang "}


@dataclass(frozen=True)
class Places:
    """Folders that no test writes to.

    Attributes:
        model: of the encoder.
        index: of texts, with the columns ``text`` (some null), ``lang`` and ``year`` kept.
        passages: of passages, with ``lang`` kept.
        columns: of an embedding column, which names no encoder.
        saved: the query transform of ``index``.
        ids: of the documents.
        texts: of the documents.
        queries: some.
    """

    model: Path
    index: Path
    passages: Path
    columns: Path
    saved: Path
    ids: list[int]
    texts: list[str]
    queries: list[str]

    @classmethod
    def make(cls, root: Path, words: Sequence[str]) -> Places:
        model = tiny_models.bert(root / "model")
        tiny_models.add_modules(model, "mean", tiny_models.NORMALIZE, prompts=PROMPTS)
        drawn = different_texts(words, ROWS + 6)
        texts, queries, ids = drawn[:ROWS], drawn[ROWS:], list(range(100, 100 + ROWS))
        table = {
            "key": ids,
            "text": texts,
            "lang": ["en" if i % 3 else "de" for i in range(ROWS)],
            "year": [2000 + i % 7 for i in range(ROWS)],
            "note": [None if i % 2 else f"n{i}" for i in range(ROWS)],
        }
        pq.write_table(pa.table(table), root / "c.parquet")
        corpus = str(root / "c.parquet")
        options: dict[str, Any] = {"id_column": "key"}
        build_columns(root / "columns", write_rows(root / "e.parquet", random_rows()))
        places = (root / name for name in ("index", "passages", "columns", "saved"))
        made = cls(model, *places, ids, texts, queries)
        kept = ("text", "lang", "year", "note")
        made.build(made.index, corpus, keep=kept, **options)
        cut = {"passage_tokens": 14, "overlap": 2}
        made.build(made.passages, corpus, keep=("lang",), **cut, **options)
        QueryTransform.of(made.index).save(made.saved)
        return made

    def build(self, out: Path, corpus: str, **options: Any) -> None:
        """Build from texts."""
        build_texts(out, corpus, self.model, k=K, store_dtype="float32", **options)

    def refit(self, index: Path) -> None:
        """Publish a version with another transform, of a part of the corpus."""
        table = pq.read_table(self.index.parent / "c.parquet")
        corpus = index.with_name(f"{index.name}-part.parquet")
        pq.write_table(table.slice(0, 2 * ROWS // 3), corpus)
        self.build(index, str(corpus), keep=("text", "lang", "year", "note"), id_column="key")

    def expected(self, query: str, *, top_k: int = TOP, **options: Any) -> list[Hit]:
        """Return what the index itself finds."""
        return open_index(self.index).search([query], top_k=top_k, **options)[0]


def different_texts(words: Sequence[str], count: int) -> list[str]:
    random = np.random.default_rng(0)
    made = dict[str, None]()
    while len(made) < count:
        made[" ".join(random.choice(words, size=random.integers(3, 24)))] = None
    return list(made)


def sent(index: Path) -> NDArray[np.float32]:
    """Return the vectors (n, k) of an index's rows, as a push sends them."""
    source = PushSource.open(PushConfig(index=str(index), to="x.npy"))
    return np.concatenate(list(source.vectors()))


def expect_hits(found: Iterable[tuple[str, float | None]], hits: Sequence[Hit]) -> None:
    """Check ids and scores, best first."""
    ids, scores = zip(*found, strict=True)
    assert list(ids) == [str(hit.id) for hit in hits]
    np.testing.assert_allclose(scores, [hit.score for hit in hits], atol=1e-5)
