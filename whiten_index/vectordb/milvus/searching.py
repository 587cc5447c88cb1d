"""Searches of a collection of Milvus: by its index, or by all its vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pymilvus import DataType

from whiten_index.corpus.batches import ID
from whiten_index.vectordb.database_writer import VECTOR, Neighbours
from whiten_index.vectordb.milvus.rows import STRONG, as_matrix, quoted, with_keys
from whiten_index.vectordb.row_checks import blocks, padded_scores

_QUERIES_AT_ONCE = 1000
# A page of a search of all rows: numbers of 4 bytes are objects of 32 in the client.
_PAGE_BYTES, _PAGE_ROWS, _LEAST_ROWS = 64 << 20, 8192, 256


@dataclass(frozen=True)
class Searching:
    """A collection that is loaded.

    Attributes:
        milvus: a ``Connection``.
        collection: its name.
    """

    milvus: Any
    collection: str

    def by_index(
        self, vectors: NDArray[np.float32], top_k: int, params: dict[str, int]
    ) -> Neighbours:
        """Return the nearest rows of queries (q, k) that the index finds."""
        queries = list(vectors.astype(self._dtype()))
        ids, scores = list[list[str | int]](), list[list[float]]()
        for some in blocks(queries, _QUERIES_AT_ONCE):
            for hits in self.milvus.search(
                self.collection, data=some, limit=top_k, output_fields=[ID],
                search_params={"params": params}, anns_field=VECTOR, **STRONG,
            ):  # fmt: skip
                scores.append([hit["distance"] for hit in hits])
                ids.append([_id_of(hit) for hit in hits])
        return Neighbours(ids, padded_scores(scores, top_k))

    def by_all(self, vectors: NDArray[np.float32], top_k: int) -> Neighbours:
        """Compare queries (q, k) with all vectors; Milvus itself has no way around an index."""
        ids = np.empty((len(vectors), 0), dtype=object)
        scores = np.empty((len(vectors), 0), dtype=np.float32)
        for names, block in self._pages(vectors.shape[1]):
            scores = np.hstack([scores, vectors @ block.T])
            ids = np.hstack([ids, np.broadcast_to(names, (len(vectors), len(names)))])
            best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
            scores = np.take_along_axis(scores, best, axis=1)
            ids = np.take_along_axis(ids, best, axis=1)
        return Neighbours(ids.tolist(), padded_scores(scores.tolist(), top_k))

    def _pages(self, k: int) -> Iterator[tuple[NDArray[Any], NDArray[np.float32]]]:
        """Yield ids and vectors (n, k) of all rows, so many at a time."""
        primary = str(next(field["name"] for field in self._fields() if field.get("is_primary")))
        rows = min(_PAGE_ROWS, max(_LEAST_ROWS, _PAGE_BYTES // (32 * k)))
        wanted = [primary, ID, VECTOR]
        pages = self._pages_by_key if self.milvus.lite else self._pages_by_order
        for page in pages(primary, rows, wanted):
            names = np.empty(len(page), dtype=object)
            names[:] = [row[ID] for row in page]
            yield names, as_matrix([row[VECTOR] for row in page], k)

    def _pages_by_key(self, primary: str, rows: int, wanted: list[str]) -> Iterator[Any]:
        """Yield pages of a collection of Milvus Lite, which sorts all rows anew for each range."""
        every = self.milvus.query(self.collection, filter="", output_fields=[primary], **STRONG)
        for some in blocks([row[primary] for row in every], rows):
            within = with_keys(primary, some)
            yield self.milvus.query(self.collection, filter=within, output_fields=wanted, **STRONG)

    def _pages_by_order(self, primary: str, rows: int, wanted: list[str]) -> Iterator[Any]:
        """Yield pages in the order of the primary keys; the client's own way quotes no key."""
        # The client asks for pages with no consistency: what was written is waited for before.
        self.milvus.query(self.collection, filter="", output_fields=["count(*)"], **STRONG)
        after = ""
        while page := self.milvus.query(
            self.collection, filter=after, limit=rows, output_fields=wanted,
            iterator="True", reduce_stop_for_best="True",
        ):  # fmt: skip
            yield page
            # A page ends early where one of the collection's segments does; the last one is empty.
            after = f"{primary} > {quoted(page[-1][primary])}"

    def _dtype(self) -> type[np.floating[Any]]:
        kind = next(field["type"] for field in self._fields() if field["name"] == VECTOR)
        return np.float16 if kind == DataType.FLOAT16_VECTOR else np.float32

    def _fields(self) -> Any:
        return self.milvus.describe_collection(self.collection)["fields"]


def _id_of(hit: Any) -> str | int:
    """Return the id of a row that was found: a field, or the primary key itself."""
    entity = hit.get("entity") or {}
    found: str | int = entity[ID] if ID in entity else hit[ID]
    return found
