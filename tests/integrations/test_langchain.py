"""LangChain: its own suites, a vector store filled here, and the index as a retriever."""

import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests, RetrieversIntegrationTests

from tests.integrations.faces_helpers import Places, expect_hits, sent
from whiten_index.errors import ConfigError
from whiten_index.integrations.langchain import WhitenedEmbeddings, WhitenedRetriever

pytestmark = pytest.mark.service


class Placed:
    @pytest.fixture(autouse=True)
    def _placed(self, places: Places) -> None:
        self.places = places

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return WhitenedEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"source": self.places.index}


class TestEmbeddings(Placed, EmbeddingsIntegrationTests):
    pass


class TestRetriever(Placed, RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return WhitenedRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"index": self.places.index}

    @property
    def retriever_query_example(self) -> str:
        return "the red cat sat on the mat"

    @property
    def num_results_arg_name(self) -> str:
        return "top_k"


class TestRetrieverOfPassages(TestRetriever):
    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"index": self.places.passages}


def test_a_store_of_any_vendor_finds_what_the_index_finds(places: Places) -> None:
    store = InMemoryVectorStore(WhitenedEmbeddings(places.index))
    pairs = zip(places.ids, places.texts, strict=True)
    store.add_documents([Document(id=str(id_), page_content=text) for id_, text in pairs])
    for query in places.queries:
        hits = places.expected(query)
        found = store.similarity_search_with_score(query, k=len(hits))
        expect_hits([(document.id, score) for document, score in found], hits)


def test_after_a_refit_the_vectors_of_two_transforms_are_told_apart(
    places: Places, tmp_path: Path
) -> None:
    index = Path(shutil.copytree(places.index, tmp_path / "index"))
    before = WhitenedEmbeddings(index)
    vectors = before.embed_documents(places.texts)
    written = pickle.dumps(before)
    places.refit(index)
    after = WhitenedEmbeddings(index)
    # One that is open keeps its transform, and so do its copies in this process.
    for kept in (before, copy.deepcopy(before), pickle.loads(written)):
        assert kept.embed_documents(places.texts) == vectors
        assert kept.name == before.name
    assert after.name != before.name
    assert after.name.rsplit("-", 1)[0] == before.name.rsplit("-", 1)[0] == "model-whitened-6"
    new = sent(index)
    np.testing.assert_allclose(after.embed_documents(places.texts[: len(new)]), new, atol=1e-5)
    assert np.abs(np.array(vectors[: len(new)]) - new).max() > 0.1
    assert pickle.loads(pickle.dumps(after)).embed_query("red") == after.embed_query("red")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"text_column": "title"},
            r"no column title \(text, lang, year, note kept\).* --keep title",
        ),
        ({"options": {"trust_remote_code": True}}, "trust_remote_code is among written settings"),
        ({"row_filter": "lang =="}, "filter"),
        ({"row_filter": "size > 3"}, "size"),
    ],
)
def test_options_that_cannot_be_used_are_refused_at_once(
    places: Places, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        WhitenedRetriever(index=places.index, **options)


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (("text", "score"), {"kept_score": "s"}),
        (("text", "kept_score"), {"kept_score": "k"}),
        (("text", "score", "kept_score"), None),
        (("text", "kept_score", "score"), None),
    ],
)
def test_no_kept_column_takes_the_place_of_another(
    places: Places, tmp_path: Path, kept: tuple[str, ...], named: dict[str, str] | None
) -> None:
    """Metadata have a score of their own."""
    table = pq.read_table(places.index.parent / "c.parquet").select(["key", "text"])
    for name in ("score", "kept_score"):
        table = table.append_column(name, [[name[0]] * len(table)])
    pq.write_table(table, tmp_path / "c.parquet")
    places.build(tmp_path / "i", str(tmp_path / "c.parquet"), keep=kept, id_column="key")
    if named is None:
        with pytest.raises(ConfigError, match="columns score and kept_score are both kept"):
            WhitenedRetriever(index=tmp_path / "i")
        # One of them is the text.
        made = WhitenedRetriever(index=tmp_path / "i", text_column="kept_score")
        named = {"kept_score": "s"}
    else:
        made = WhitenedRetriever(index=tmp_path / "i")
    hit = made.invoke(table["text"][0].as_py())[0]
    assert {n: v for n, v in hit.metadata.items() if n[:4] == "kept"} == named
    assert isinstance(hit.metadata["score"], float)
