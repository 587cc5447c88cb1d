"""The frameworks' classes run a model's code only where they are given consent."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.encoding import test_consent
from tests.encoding.test_consent import Place
from tests.helpers.code_models import forged
from whiten_index.errors import ConfigError, EncoderError

pytestmark = pytest.mark.service

place = test_consent.place
QUERY = "the cat sat"


def langchain_embeddings(place: Place, index: Path, how: dict[str, Any]) -> Any:
    from whiten_index.integrations.langchain import WhitenedEmbeddings

    return WhitenedEmbeddings(index, **how).embed_query(QUERY)


def langchain_retriever(place: Place, index: Path, how: dict[str, Any]) -> Any:
    from whiten_index.integrations.langchain import WhitenedRetriever

    return WhitenedRetriever(index=str(index), **how).invoke(QUERY)


def llama_embedding(place: Place, index: Path, how: dict[str, Any]) -> Any:
    from whiten_index.integrations.llama_index import WhitenedEmbedding

    return WhitenedEmbedding(index, **how).get_query_embedding(QUERY)


def llama_retriever(place: Place, index: Path, how: dict[str, Any]) -> Any:
    from whiten_index.integrations.llama_index import WhitenedIndexRetriever

    return WhitenedIndexRetriever(index, **how).retrieve(QUERY)


def haystack_text(place: Place, index: Path, how: dict[str, Any]) -> Any:
    from whiten_index.integrations.haystack import WhitenedTextEmbedder

    return WhitenedTextEmbedder(index, **how).run(QUERY)["embedding"]


def haystack_documents(place: Place, index: Path, how: dict[str, Any]) -> Any:
    from haystack import Document

    from whiten_index.integrations.haystack import WhitenedDocumentEmbedder

    embedder = WhitenedDocumentEmbedder(index, progress_bar=False, **how)
    embedder.warm_up()
    return embedder.run([Document(content=QUERY)])["documents"]


def haystack_retriever(place: Place, index: Path, how: dict[str, Any]) -> Any:
    from whiten_index.integrations.haystack import WhitenedIndexRetriever

    return WhitenedIndexRetriever(index, **how).run(QUERY)["documents"]


def mteb_encoder(place: Place, index: Path, how: dict[str, Any]) -> Any:
    from whiten_index.integrations.mteb import WhitenedEncoder

    return [WhitenedEncoder.of_index(index, **how).encoder.encode_queries([QUERY])]


def sentence_transformers(place: Place, index: Path, how: dict[str, Any]) -> Any:
    from whiten_index import QueryTransform
    from whiten_index.integrations.sentence_transformers import export_model

    folder = place.root / "exported"
    transform = QueryTransform.of(index, **how)
    facts = export_model(transform, folder)
    # An export runs nothing; its reader asks for consent again.
    transform.encode_queries([QUERY])
    return facts


FACES: list[Callable[[Place, Path, dict[str, Any]], Any]] = [
    langchain_embeddings, langchain_retriever, llama_embedding, llama_retriever, haystack_text,
    haystack_documents, haystack_retriever, mteb_encoder, sentence_transformers,
]  # fmt: skip


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_a_face_runs_the_models_code_only_with_consent(face, place, tmp_path):
    bad = forged(place.index, tmp_path / "bad")
    for index in (place.index, bad):
        with pytest.raises(EncoderError, match="trust_remote_code=True") as caught:
            face(place, index, {})
        assert str(place.model) in str(caught.value)
        assert not place.ran()
    assert len(face(place, place.index, {"trust_remote_code": True}))
    assert place.ran()


def test_what_frameworks_write_down_carries_no_consent(place):
    from langchain_core.load import dumps

    from whiten_index.integrations import haystack, langchain, llama_index

    how = {"trust_remote_code": True}
    written = [
        dumps(langchain.WhitenedRetriever(index=str(place.index), **how)),
        llama_index.WhitenedEmbedding(place.index, **how).to_json(),
        *(
            json.dumps(kind(place.index, **how).to_dict())
            for kind in (
                haystack.WhitenedTextEmbedder,
                haystack.WhitenedDocumentEmbedder,
                haystack.WhitenedIndexRetriever,
            )
        ),
    ]
    assert all(str(place.index) in each for each in written)
    assert not any("trust_remote_code" in each for each in written)
    for kind in (haystack.WhitenedIndexRetriever, llama_index.WhitenedIndexRetriever):
        with pytest.raises(ConfigError, match="move it out of options"):
            kind(place.index, options=how)
    place.ran()


def test_copies_within_a_program_keep_consent(place):
    from whiten_index.integrations import langchain, llama_index

    how = {"trust_remote_code": True}
    retriever = langchain.WhitenedRetriever(index=str(place.index), **how)
    embedding = llama_index.WhitenedEmbedding(place.index, **how)
    for copied in (copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))):
        assert copied(retriever).invoke(QUERY) == retriever.invoke(QUERY)
        assert copied(embedding).get_query_embedding(QUERY)
    place.ran()
