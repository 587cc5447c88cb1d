"""Haystack's components: pipelines that fill a store and ask it, and one that needs no store."""

from typing import Any

import pytest
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.components.writers import DocumentWriter
from haystack.document_stores.in_memory import InMemoryDocumentStore

from tests.integrations.faces_helpers import TOP, Places, expect_hits
from whiten_index.integrations.haystack import (
    WhitenedDocumentEmbedder,
    WhitenedIndexRetriever,
    WhitenedTextEmbedder,
)

pytestmark = pytest.mark.service
ALLOWED = ["whiten_index.*"]


def documents_of(places: Places) -> list[Document]:
    pairs = enumerate(zip(places.ids, places.texts, strict=True))
    return [Document(id=str(id_), content=text, meta={"row": i}) for i, (id_, text) in pairs]


def scored(found: list[Document]) -> list[tuple[str, float | None]]:
    return [(each.id, each.score) for each in found]


def again(pipeline: Pipeline) -> Pipeline:
    """Return what is read of a pipeline that was written down."""
    read = Pipeline.loads(pipeline.dumps(), allowed_modules=ALLOWED)
    assert read.dumps() == pipeline.dumps()
    return read


def test_a_store_is_filled_and_asked_as_the_index(places: Places) -> None:
    writing = Pipeline()
    store = InMemoryDocumentStore(embedding_similarity_function="dot_product")
    writing.add_component("embedder", WhitenedDocumentEmbedder(places.index, progress_bar=False))
    writing.add_component("writer", DocumentWriter(store))
    writing.connect("embedder.documents", "writer.documents")
    writing.run({"embedder": {"documents": documents_of(places)}})

    asking = Pipeline()
    asking.add_component("embedder", WhitenedTextEmbedder(places.saved))
    asking.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=TOP))
    asking.connect("embedder.embedding", "retriever.query_embedding")
    # The store is told by its name in memory, so the one that was written down is the same.
    for pipeline in (asking, again(asking)):
        for query in places.queries:
            found = pipeline.run({"embedder": {"text": query}})["retriever"]["documents"]
            expect_hits(scored(found), places.expected(query))
            assert found[0].content == places.texts[found[0].meta["row"]]


def test_the_index_is_asked_without_a_store(places: Places) -> None:
    pipeline = Pipeline()
    retriever = WhitenedIndexRetriever(
        places.index, top_k=TOP, row_filter="lang == 'en'", options={"device": "cpu"}
    )
    pipeline.add_component("retriever", retriever)
    for each in (pipeline, again(pipeline)):
        for query in places.queries:
            found = each.run({"retriever": {"query": query}})["retriever"]["documents"]
            hits = places.expected(query, row_filter="lang == 'en'")
            expect_hits(scored(found), hits)
            for document, hit in zip(found, hits, strict=True):
                assert {"text": document.content, **document.meta} == hit.columns
        asked: dict[str, Any] = {"top_k": 2, "row_filter": "year > 2003"}
        found = each.run({"retriever": {"query": query, **asked}})["retriever"]["documents"]
        expect_hits(scored(found), places.expected(query, **asked))
