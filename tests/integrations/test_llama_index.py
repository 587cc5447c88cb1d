"""LlamaIndex: a vector index over the embedding, a query engine over the retriever."""

import asyncio
import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.storage.kvstore import SimpleKVStore

from tests.integrations.faces_helpers import TOP, Places, expect_hits, sent
from whiten_index import QueryTransform
from whiten_index.errors import ConfigError
from whiten_index.integrations.llama_index import WhitenedEmbedding, WhitenedIndexRetriever

pytestmark = pytest.mark.service


def nodes_of(places: Places) -> list[TextNode]:
    pairs = zip(places.ids, places.texts, strict=True)
    return [TextNode(id_=str(id_), text=text) for id_, text in pairs]


def scored(found: list[NodeWithScore]) -> list[tuple[str, float | None]]:
    return [(each.node.node_id, each.score) for each in found]


def test_a_vector_index_finds_what_the_index_finds(places: Places) -> None:
    embedding = WhitenedEmbedding(places.index)
    made = VectorStoreIndex(nodes_of(places), embed_model=embedding)
    retriever = made.as_retriever(similarity_top_k=TOP)
    for query in places.queries:
        expect_hits(scored(retriever.retrieve(query)), places.expected(query))
        expect_hits(scored(asyncio.run(retriever.aretrieve(query))), places.expected(query))


def test_a_cache_of_texts_alone_is_refused_however_it_is_given(places: Places) -> None:
    """It would give a query the vector of a document, and one transform that of another."""
    embedding = WhitenedEmbedding(places.index)
    written = {**embedding.to_dict(), "embeddings_cache": SimpleKVStore()}

    def assign() -> None:
        embedding.embeddings_cache = SimpleKVStore()

    for give in (
        assign,
        lambda: WhitenedEmbedding(places.index, embeddings_cache=SimpleKVStore()),
        lambda: WhitenedEmbedding(places.index, embeddings_cache={}),
        lambda: WhitenedEmbedding.from_dict(written),
    ):
        with pytest.raises(ConfigError, match=r"leave it out, and give IngestionPipeline\(cache="):
            give()
    assert embedding.embeddings_cache is None
    embedding.embeddings_cache = None
    assert WhitenedEmbedding(places.index, embeddings_cache=None).embeddings_cache is None


def test_after_a_refit_the_vectors_of_two_transforms_are_told_apart(
    places: Places, tmp_path: Path
) -> None:
    index = Path(shutil.copytree(places.index, tmp_path / "index"))
    cache = IngestionCache()

    def ingested(embedding: WhitenedEmbedding) -> Any:
        pipeline = IngestionPipeline(transformations=[embedding], cache=cache)
        return np.array([node.embedding for node in pipeline.run(nodes=nodes_of(places)[:60])])

    before = WhitenedEmbedding(index)
    vectors = ingested(before)
    pickled, written = pickle.dumps(before), before.to_dict()
    places.refit(index)
    new = sent(index)
    assert np.abs(vectors - new).max() > 0.1
    for after in (WhitenedEmbedding(index), WhitenedEmbedding.from_dict(written)):
        assert after.model_name == f"model-whitened-6-{QueryTransform.of(index).query_digest[:8]}"
        assert after.model_name != before.model_name
        np.testing.assert_allclose(ingested(after), new, atol=1e-5)
    for kept in (before, copy.deepcopy(before), pickle.loads(pickled)):
        assert kept.model_name == before.model_name
        np.testing.assert_allclose(ingested(kept), vectors, atol=1e-6)


def test_nodes_are_the_hits_of_the_index(places: Places) -> None:
    retriever = WhitenedIndexRetriever(places.index, top_k=7, row_filter="lang == 'en'")
    for query in places.queries:
        hits = places.expected(query, top_k=7, row_filter="lang == 'en'")
        found = retriever.retrieve(query)
        expect_hits(scored(found), hits)
        for each, hit in zip(found, hits, strict=True):
            columns = dict(hit.columns)
            assert each.node.text == columns.pop("text")
            assert each.node.metadata == {"id": hit.id, **columns}
        expect_hits(scored(asyncio.run(retriever.aretrieve(query))), hits)


def test_a_query_engine_answers_from_the_index(places: Places) -> None:
    llm = MockLLM()
    engine = RetrieverQueryEngine(
        WhitenedIndexRetriever(places.index, top_k=3),
        response_synthesizer=get_response_synthesizer(llm=llm),
    )
    query = places.queries[0]
    hits = places.expected(query, top_k=3)
    for answer in (engine.query(query), asyncio.run(engine.aquery(query))):
        expect_hits(scored(answer.source_nodes), hits)
        # MockLLM repeats its prompt, in which the retrieved texts are.
        assert all(str(hit.columns["text"]) in str(answer) for hit in hits)
