"""Points of a collection in Qdrant: sent, read, searched, counted and taken away."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from qdrant_client import models

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.vectordb.database_writer import VECTOR, Layout, Neighbours
from whiten_index.vectordb.ids import row_uuid, row_uuids
from whiten_index.vectordb.json_rows import from_objects, to_objects
from whiten_index.vectordb.qdrant.connection import Place, Told
from whiten_index.vectordb.qdrant.options import Options, Quantization
from whiten_index.vectordb.row_checks import (
    blocks,
    padded_scores,
    require_rows,
    vectors_array,
    vectors_of,
)

# A server takes 32 MB at once by REST; in JSON a number of a vector takes some 21 bytes.
_REQUEST_BYTES, _JSON_NUMBER = 1 << 20, 21
_ASKED, _SEARCHED = 500, 64


@dataclass(frozen=True)
class Points:
    """The points of one collection, or of the one that an alias stands for.

    A point's id is the UUID of its row's key; its payload has the row's id and kept columns.
    """

    client: Any
    place: Place
    options: Options
    collection: str

    def upsert(self, rows: pa.RecordBatch, layout: Layout) -> None:
        """Put rows in place of those with their keys, or add them, and wait until they are there.

        The client's upload is the one of its calls that takes an array of numbers as it is.

        Raises:
            DatabaseError: they are not rows that any database is to see, or the server refuses.
        """
        require_rows(rows, layout)
        if not len(rows):
            return
        number = 4 if self.options.prefer_grpc else _JSON_NUMBER
        size = number * layout.k + (rows.nbytes - vectors_of(rows).nbytes) // len(rows)
        with Told(self.place)("rows could not be added"):
            self.client.upload_collection(
                self.collection,
                vectors=vectors_of(rows),
                payload=to_objects(rows, (ID, *layout.kept)),
                ids=row_uuids(rows, layout),
                batch_size=max(1, _REQUEST_BYTES // size),
                max_retries=_one_attempt(),
                wait=True,
            )

    def delete(self, ids: Sequence[str | int], layout: Layout) -> None:
        """Take all rows with these ids away; those that are not there are passed over."""
        for some in blocks(ids, _ASKED):
            if PASSAGE in layout.key:
                selector = models.FilterSelector(filter=_of_any(some))
            else:
                selector = models.PointIdsList(points=[row_uuid(each) for each in some])
            with Told(self.place)("rows could not be deleted"):
                self.client.delete(self.collection, points_selector=selector, wait=True)

    def count(self) -> int:
        """Return how many there are."""
        with Told(self.place)("rows could not be counted"):
            return int(self.client.count(self.collection, exact=True).count)

    def fetch(self, ids: Sequence[str | int], layout: Layout) -> pa.Table:
        """Return the rows with these ids, in any order, with the schema of the layout."""
        records = list[Any]()
        for some in blocks(ids, _ASKED):
            with Told(self.place)("rows could not be read"):
                if PASSAGE in layout.key:
                    records += self._of_documents(some)
                else:
                    points = [row_uuid(each) for each in some]
                    records += self.client.retrieve(
                        self.collection, points, with_payload=True, with_vectors=True
                    )
        return _table(records, layout)

    def search(self, vectors: NDArray[np.float32], top_k: int, *, exact: bool) -> Neighbours:
        """Return the nearest rows of queries (q, k): exactly, or by the graph."""
        # Local mode is always exact, and warns of what it passes over.
        params = None if self.place.local else self._search_params(exact=exact)
        asked = [
            models.QueryRequest(query=each, limit=top_k, params=params, with_payload=[ID])
            for each in vectors.tolist()
        ]
        answers = list[Any]()
        for some in blocks(asked, _SEARCHED):
            with Told(self.place)("it could not be searched"):
                answers += self.client.query_batch_points(self.collection, some)
        scores = padded_scores([[each.score for each in one.points] for one in answers], top_k)
        return Neighbours(
            [[point.payload[ID] for point in each.points] for each in answers], scores
        )

    def _search_params(self, *, exact: bool) -> Any:
        chosen = self.options
        quantization = None
        if exact:
            quantization = models.QuantizationSearchParams(ignore=True)
        elif chosen.quantization is not Quantization.NONE:
            quantization = models.QuantizationSearchParams(
                rescore=True, oversampling=chosen.oversampling
            )
        ef = None if exact else chosen.hnsw_ef
        return models.SearchParams(exact=exact, hnsw_ef=ef, quantization=quantization)

    def _of_documents(self, ids: Sequence[str | int]) -> list[Any]:
        """Return the points of all passages of documents."""
        found = list[Any]()
        place: Any = None
        while True:
            points, place = self.client.scroll(
                self.collection, scroll_filter=_of_any(ids), limit=_ASKED, offset=place,
                with_payload=True, with_vectors=True,
            )  # fmt: skip
            found += points
            if place is None:
                return found


@functools.cache
def _one_attempt() -> int:
    """Return the ``max_retries`` with which the client tries once: a push that failed goes on.

    Before 1.20 it counted the first attempt too, and sent nothing at all where this was 0.
    """
    numbers = importlib.metadata.version("qdrant-client").split(".")[:2]
    return 0 if [int(each) for each in numbers] >= [1, 20] else 1


def _of_any(ids: Sequence[str | int]) -> Any:
    """Return a filter for the rows of documents."""
    return models.Filter(must=[models.FieldCondition(key=ID, match=models.MatchAny(any=list(ids)))])


def _table(records: Sequence[Any], layout: Layout) -> pa.Table:
    """Return points as rows of a layout."""
    place = layout.schema.get_field_index(VECTOR)
    found = from_objects([each.payload for each in records], layout.schema.remove(place))
    vectors = np.array([each.vector for each in records], dtype=np.float32)
    column = vectors_array(vectors, layout.k)
    return found.add_column(place, layout.schema.field(place), column)
