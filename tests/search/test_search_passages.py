"""An index of passages against brute force: a document counts by its best passage, and once."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from tests.helpers.builds import corpus_source, cosines
from whiten_index import BuildConfig, EmbeddingStore, build_index, open_index
from whiten_index.corpus.batches import row_digests
from whiten_index.store.dtypes import StoreDtype
from whiten_index.store.records import CorpusPart, CorpusRecord

DIM, DOCUMENTS = 8, 60
Array = NDArray[np.float32]


def passage_counts() -> NDArray[np.int64]:
    counts = np.random.default_rng(0).integers(1, 7, DOCUMENTS)
    counts[[7, 20]] = 90, 1
    return counts


def embeddings(counts: NDArray[np.int64]) -> Array:
    random = np.random.default_rng(1)
    rows = random.standard_normal((counts.sum(), DIM)).astype(np.float32)
    # The passages of one long document are much alike.
    start = counts[:7].sum()
    rows[start : start + 90] = rows[start] + 0.05 * random.standard_normal((90, DIM))
    return rows


def rows_of(document: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": document * 10,
            "name": f"n{document}",
            "passage": number,
            "passage_start": number * 5,
            "passage_end": number * 5 + 7,
            "passage_text": f"text {document}\n{number}",
        }
        for number in range(count)
    ]


def build(folder: Path, **options: Any) -> Path:
    """Publish an index of passages from a store that is filled by hand, in shards of 20."""
    counts = passage_counts()
    rows = embeddings(counts)
    encoder = {"kind": "column", "column": "e", "dim": DIM, "query_encoder": None}
    store = EmbeddingStore.create(folder / "store", encoder, "0" * 32)
    parts, start = [], 0
    for first in range(0, DOCUMENTS, 20):
        listed = [row for d in range(first, first + 20) for row in rows_of(d, counts[d])]
        some = rows[start : start + len(listed)]
        digests = row_digests(row.tobytes() for row in some)
        store.write(digests, some, dtype=StoreDtype.FLOAT32)
        name = store.write_digests(digests)
        documents = store.write_documents(pa.Table.from_pylist(listed))
        parts.append(CorpusPart(name, documents, len(listed), 20, 0, 4 * DIM * len(listed)))
        start += len(listed)
    store.save_corpus(CorpusRecord(corpus_source(passages=[16, 2]), tuple(parts), {}))
    options = {"whiten": "none", "store": str(folder / "store"), **options}
    build_index(BuildConfig(out=str(folder / "index"), **options))
    return folder / "index"


@pytest.fixture(scope="module")
def queries() -> Array:
    counts = passage_counts()
    rows = embeddings(counts)
    near_the_long_one = rows[counts[:7].sum() + np.array([3, 50])]
    others = np.random.default_rng(2).standard_normal((9, DIM)).astype(np.float32)
    return np.concatenate([near_the_long_one, others])


def best_passages(by_row: NDArray[np.float64]) -> list[tuple[int, int, float]]:
    """Return (document, row, cosine) of each document's best passage, best first."""
    stops = np.cumsum(passage_counts())
    pairs = []
    for document, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
        row = start + int(np.argmax(by_row[start:stop]))
        pairs.append((document, row, float(by_row[row])))
    return sorted(pairs, key=lambda pair: -pair[2])


@pytest.mark.parametrize("top_k", [1, 7, DOCUMENTS, 10_000])
@pytest.mark.parametrize(("factory", "rerank"), [("Flat", None), ("SQ4", 300)])
def test_search_gives_each_document_once_with_its_best_passage(
    tmp_path: Path, queries: Array, top_k: int, factory: str, rerank: int | None
) -> None:
    index = build(tmp_path, factory=factory)
    opened = open_index(index, rerank=rerank, store=tmp_path / "store")
    assert opened.grouped
    assert len(opened) == passage_counts().sum()
    truth = cosines(queries.astype(float), embeddings(passage_counts()).astype(float))
    for hits, row in zip(opened.search_embeddings(queries, top_k=top_k), truth, strict=True):
        expected = best_passages(row)[:top_k]
        assert [(hit.id, hit.row) for hit in hits] == [(10 * d, r) for d, r, _ in expected]
        np.testing.assert_allclose([hit.score for hit in hits], [e[2] for e in expected], atol=1e-5)
        for hit in hits:
            document, number = hit.id // 10, hit.columns["passage"]
            listed = rows_of(document, number + 1)[number]
            assert {"id": hit.id, **hit.columns} == listed
    near = opened.search_like(70, top_k=5)
    assert len({hit.id for hit in near}) == 5
    assert 70 not in [hit.id for hit in near]


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "HNSW8", "PQ8x4fs"])
@pytest.mark.parametrize("top_k", [1, 7, 10_000])
def test_a_filter_leaves_documents_once_by_their_best_passage_that_passes(
    tmp_path: Path, queries: Array, factory: str, top_k: int
) -> None:
    opened = open_index(build(tmp_path, factory=factory))
    counts = passage_counts()
    document = np.repeat(np.arange(DOCUMENTS), counts)
    number = np.concatenate([np.arange(count) for count in counts])
    truth = cosines(queries.astype(float), embeddings(counts).astype(float))
    for text, passes in (
        ("passage == 0", number == 0),
        ("id in [70, 200, 30]", np.isin(document, [7, 20, 3])),
        ("id == 70 and passage >= 88", (document == 7) & (number >= 88)),
        ("name == 'none'", np.zeros(len(number), bool)),
    ):
        expected = min(len(np.unique(document[passes])), top_k)
        for hits, row in zip(
            opened.search_embeddings(queries, top_k=top_k, row_filter=text), truth, strict=True
        ):
            assert len({hit.id for hit in hits}) == len(hits) == expected
            assert all(passes[hit.row] for hit in hits)
            if factory == "Flat":
                for hit in hits:
                    own = np.flatnonzero(passes & (document * 10 == hit.id))
                    assert hit.row == own[np.argmax(row[own])]
