"""LangChain: its own suites, a vector store filled here, and the index as a retriever."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.load import dumps, load
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests
from pydantic import ValidationError

from tests.faces_helpers import (
    K,
    Places,
    expect_pip_line,
    found_by_index,
    query_vectors,
    real_index,
    sent,
)
from whiten_index import QueryTransform, search
from whiten_index.errors import ArtifactError, ConfigError, CorpusError
from whiten_index.integrations import index_reader
from whiten_index.integrations import langchain as face
from whiten_index.integrations.langchain import WhitenedEmbeddings, WhitenedRetriever
from whiten_index.integrations.query_half import QueryHalf
from whiten_index.opened import Hit

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_words: tuple[str, ...]) -> Places:
    return Places.make(tmp_path_factory.mktemp("langchain"), tiny_words)


def as_document(hit: Hit, text_column: str = "text", score_key: str = "score") -> Document:
    columns = {name: value for name, value in hit.columns.items() if name != text_column}
    metadata = {"id": hit.id, score_key: hit.score, **columns}
    return Document(id=str(hit.id), page_content=hit.columns[text_column] or "", metadata=metadata)


# --------------------------------------------------------------------------- LangChain's suites


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


class TestEmbeddingsUnit(Placed, EmbeddingsUnitTests):
    pass


class TestEmbeddings(Placed, EmbeddingsIntegrationTests):
    pass


class TestEmbeddingsOfASavedTransform(Placed, EmbeddingsIntegrationTests):
    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"source": str(self.places.saved), "k": 4}


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


# --------------------------------------------------------------------------- embeddings


def test_vectors_are_those_of_the_index(places: Places) -> None:
    for source in (places.index, places.saved):
        embeddings = WhitenedEmbeddings(source)
        documents = np.array(embeddings.embed_documents(places.texts))
        np.testing.assert_allclose(documents, sent(places.index), atol=1e-5)
        queries = np.array([embeddings.embed_query(query) for query in places.queries])
        np.testing.assert_allclose(queries, query_vectors(places, places.queries), atol=1e-5)
    assert np.abs(np.array(embeddings.embed_documents(places.queries)) - queries).max() > 0.01


def test_fewer_numbers_are_those_of_a_push(places: Places) -> None:
    for source in (places.index, places.saved):
        found = WhitenedEmbeddings(source, k=3).embed_documents(places.texts)
        np.testing.assert_allclose(np.array(found), sent(places.index, k=3), atol=1e-5)


def test_async_vectors_are_the_same(places: Places) -> None:
    embeddings = WhitenedEmbeddings(places.index)

    async def both() -> tuple[list[list[float]], list[float]]:
        return await asyncio.gather(
            embeddings.aembed_documents(places.texts), embeddings.aembed_query("red")
        )

    documents, query = asyncio.run(both())
    np.testing.assert_allclose(documents, embeddings.embed_documents(places.texts), atol=1e-6)
    np.testing.assert_allclose(query, embeddings.embed_query("red"), atol=1e-6)


def test_a_store_of_any_vendor_finds_what_the_index_finds(places: Places) -> None:
    store = InMemoryVectorStore(WhitenedEmbeddings(places.index))
    pairs = zip(places.ids, places.texts, strict=True)
    store.add_documents([Document(id=str(id_), page_content=text) for id_, text in pairs])
    for query in places.queries:
        hits = places.expected(query)
        found = store.similarity_search_with_score(query, k=len(hits))
        assert [document.id for document, _ in found] == [str(hit.id) for hit in hits]
        np.testing.assert_allclose(
            [score for _, score in found], [h.score for h in hits], atol=1e-5
        )


def test_the_real_model_gives_the_vectors_of_its_index(tmp_path: Path) -> None:
    index = real_index(tmp_path)
    embeddings = WhitenedEmbeddings(index)
    found = WhitenedRetriever(index=index, top_k=64).invoke("a violin is sold")
    by_row = sorted(found, key=lambda document: document.metadata["id"])
    vectors = np.array(embeddings.embed_documents([each.page_content for each in by_row]))
    np.testing.assert_allclose(vectors, sent(index), atol=1e-5)
    scores = vectors @ np.array(embeddings.embed_query("a violin is sold"))
    assert scores == pytest.approx([each.metadata["score"] for each in by_row], abs=1e-5)


def test_embeddings_are_pickled_as_a_path(places: Places) -> None:
    embeddings = WhitenedEmbeddings(places.saved, k=4)
    vector = embeddings.embed_query("red")
    written = pickle.dumps(embeddings)
    assert len(written) < 2000
    for copied in (pickle.loads(written), copy.deepcopy(embeddings)):
        assert copied.embed_query("red") == vector
        name = f"model-whitened-4-{QueryTransform.of(places.index, k=4).query_digest[:8]}"
        assert repr(copied) == repr(embeddings) == f"WhitenedEmbeddings({name!r})"


def test_copies_within_a_process_share_the_encoder(places: Places) -> None:
    embeddings = WhitenedEmbeddings(places.saved)
    for copied in (copy.deepcopy(embeddings), copy.copy(embeddings)):
        assert copied._half is embeddings._half
    assert copy.copy(embeddings._half) is embeddings._half


def test_after_a_refit_the_vectors_of_two_transforms_are_told_apart(
    places: Places, tmp_path: Path
) -> None:
    index = Path(shutil.copytree(places.index, tmp_path / "index"))
    before = WhitenedEmbeddings(index)
    vectors = before.embed_documents(places.texts)
    written = pickle.dumps(before)
    unopened = pickle.dumps(QueryHalf(index))
    again = pickle.dumps(pickle.loads(written))
    places.refit(index)
    after = WhitenedEmbeddings(index)
    # One that is open keeps its transform, and so do its copies in this process.
    for kept in (before, copy.deepcopy(before)):
        assert kept.embed_documents(places.texts) == vectors
        assert kept.name == before.name
    assert after.name != before.name
    assert after.name.rsplit("-", 1)[0] == before.name.rsplit("-", 1)[0] == "model-whitened-6"
    new = sent(index)
    np.testing.assert_allclose(after.embed_documents(places.texts[: len(new)]), new, atol=1e-5)
    assert np.abs(np.array(vectors[: len(new)]) - new).max() > 0.1
    for old in (written, again):
        read = pickle.loads(old)
        with pytest.raises(ConfigError, match=r"another transform.* make the embedder anew"):
            read.embed_query("red")
        with pytest.raises(ConfigError, match=r"another transform.* make the embedder anew"):
            read.embed_documents(["red"])
    assert pickle.loads(pickle.dumps(after)).embed_query("red") == after.embed_query("red")
    assert pickle.loads(unopened).query("red") == after.embed_query("red")


def test_another_prompt_of_queries_is_told_too(places: Places, tmp_path: Path) -> None:
    transform = QueryTransform.of(places.index)
    transform.save(tmp_path / "saved")
    embeddings = WhitenedEmbeddings(tmp_path / "saved")
    written = pickle.dumps(embeddings)
    facts = {**transform.encoder_facts, "query_prompt": "the old man "}
    QueryTransform(transform.whitening, facts).save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="another transform, encoder or prompt of queries since"):
        pickle.loads(written).embed_query("red")


def test_a_relative_path_is_that_of_where_it_was_given(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places.index.parent)
    embeddings = WhitenedEmbeddings("index")
    unopened = QueryHalf("saved")
    retriever = WhitenedRetriever(index="index", top_k=2)
    pickled = pickle.dumps((embeddings, unopened, retriever))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(places.passages, "index")
    vector, found = WhitenedEmbeddings(places.index).embed_query("red"), retriever.invoke("red")
    assert found == [as_document(hit) for hit in places.expected("red", top_k=2)]
    for each in ((embeddings, unopened, retriever), pickle.loads(pickled)):
        assert each[0].embed_query("red") == each[1].query("red") == vector
        assert each[2].invoke("red") == each[2].with_config(tags=["x"]).invoke("red") == found
        assert each[2] == retriever
        assert json.loads(dumps(each[2]))["kwargs"]["index"] == "index"
    here = WhitenedRetriever(index="index", top_k=2)
    assert here.invoke("red") != found
    assert here != retriever


def test_texts_longer_than_the_encoder_takes_are_told(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    WhitenedEmbeddings(places.index).embed_documents(["red", "red cat " * 500])
    assert "1 of 2 texts were longer than the 24 tokens" in caplog.text


# --------------------------------------------------------------------------- the retriever


def test_documents_are_the_hits_of_the_index(places: Places) -> None:
    retriever = WhitenedRetriever(index=places.index, top_k=7)
    for query in places.queries:
        expected = [as_document(hit) for hit in places.expected(query, top_k=7)]
        assert retriever.invoke(query) == asyncio.run(retriever.ainvoke(query)) == expected
    assert retriever.batch(places.queries) == [retriever.invoke(query) for query in places.queries]


def test_a_passage_is_the_text_of_its_document(places: Places) -> None:
    hits = found_by_index(places.passages, "the red cat")
    found = WhitenedRetriever(index=places.passages, top_k=5).invoke("the red cat")
    assert found == [as_document(hit, "passage_text") for hit in hits]
    assert {"passage", "passage_start", "passage_end", "lang"} < set(found[0].metadata)


def test_options_of_one_call_go_before_those_of_the_retriever(places: Places) -> None:
    retriever = WhitenedRetriever(index=places.index, top_k=9, row_filter="lang == 'de'")
    plain = retriever.invoke("the red cat")
    assert {each.metadata["lang"] for each in plain} == {"de"}
    assert plain == [as_document(h) for h in places.expected(
        "the red cat", top_k=9, row_filter="lang == 'de'"
    )]  # fmt: skip
    asked = {"top_k": 2, "row_filter": "year >= 2004"}
    expected = [as_document(hit) for hit in places.expected("the red cat", **asked)]
    assert retriever.invoke("the red cat", **asked) == expected
    assert asyncio.run(retriever.ainvoke("the red cat", **asked)) == expected
    with pytest.raises(TypeError, match="colour"):
        retriever.invoke("the red cat", colour="red")


def test_configured_copies_share_the_opened_index(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[str]()

    def counted(path: str, **options: Any) -> Any:
        opened.append(path)
        return search.open_index(path, **options)

    monkeypatch.setattr(index_reader, "open_index", counted)
    retriever = WhitenedRetriever(index=places.index)
    configurable = retriever.configurable_fields(
        top_k=ConfigurableField(id="hits"), row_filter=ConfigurableField(id="where")
    )
    chain = configurable | RunnableLambda(lambda found: [each.metadata["id"] for each in found])
    asked = {"hits": 3, "where": "lang == 'de'"}
    expected = places.expected("red", top_k=3, row_filter="lang == 'de'")
    found = chain.with_config(configurable=asked).invoke("red")
    assert found == [hit.id for hit in expected]
    assert len(chain.invoke("red")) == 10
    assert len(retriever.with_config(tags=["x"]).invoke("red")) == 10
    assert opened == [str(places.index)]
    other = retriever.configurable_fields(index=ConfigurableField(id="where"))
    assert other.with_config(configurable={"where": str(places.passages)}).invoke("red")
    assert opened == [str(places.index), str(places.passages)]


def test_another_column_may_be_the_text(places: Places) -> None:
    retriever = WhitenedRetriever(index=places.index, text_column="note", score_key="cosine")
    hits = places.expected("the cold river", top_k=10)
    assert retriever.invoke("the cold river") == [as_document(h, "note", "cosine") for h in hits]
    assert "" in {each.page_content for each in retriever.invoke("the cold river")}


def test_a_retriever_is_written_down_and_read_again(places: Places) -> None:
    retriever = WhitenedRetriever(
        index=places.index, top_k=3, row_filter="year < 2004", options={"device": "cpu"}
    )
    written = json.loads(dumps(retriever))
    assert written["kwargs"] == {
        "index": str(places.index),
        "top_k": 3,
        "row_filter": "year < 2004",
        "score_key": "score",
        "options": {"device": "cpu"},
    }
    with pytest.warns(Warning, match="beta"):
        read = load(written, allowed_objects=[WhitenedRetriever], valid_namespaces=["whiten_index"])
    for copied in (read, pickle.loads(pickle.dumps(retriever)), copy.deepcopy(retriever)):
        assert copied == retriever
        assert copied.invoke("red") == retriever.invoke("red")
    assert retriever.model_dump(exclude_unset=True)["top_k"] == 3
    assert "reader" not in retriever.model_dump()


def test_a_version_published_since_is_found_on_reload(places: Places, tmp_path: Path) -> None:
    index = Path(shutil.copytree(places.bare, tmp_path / "index"))
    with pytest.raises(ConfigError, match=r"keeps no column text \(none kept\)"):
        WhitenedRetriever(index=index)
    shutil.rmtree(index)
    shutil.copytree(places.index, index)
    retriever = WhitenedRetriever(index=index)
    assert not retriever.reload()
    places.build(index, str(places.index.parent / "c.parquet"), id_column="key")
    assert retriever.invoke("red")
    assert retriever.reload()
    with pytest.raises(ConfigError, match="keeps no column text"):
        retriever.invoke("red")


def test_a_column_published_since_is_not_lost_to_the_score(places: Places, tmp_path: Path) -> None:
    index = Path(shutil.copytree(places.index, tmp_path / "index"))
    retriever = WhitenedRetriever(index=index, score_key="rank")
    assert retriever.invoke("red")
    table = pq.read_table(places.index.parent / "c.parquet")
    ranked = table.append_column("rank", pa.array(range(len(table))))
    pq.write_table(ranked, tmp_path / "c.parquet")
    places.build(index, str(tmp_path / "c.parquet"), keep=("text", "rank"), id_column="key")
    assert retriever.reload()
    with pytest.raises(ConfigError, match="has a column rank of its own"):
        retriever.invoke("red")


def test_threads_take_another_index_once(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = WhitenedRetriever(index=places.index)
    made = list[str]()

    class Slow(index_reader.IndexReader):
        def __init__(self, *given: Any) -> None:
            made.append(str(given[0]))
            threading.Event().wait(0.1)
            super().__init__(*given)

    monkeypatch.setattr(face, "IndexReader", Slow)
    retriever.index = str(places.passages)
    with ThreadPoolExecutor(4) as pool:
        readers = set(map(id, pool.map(lambda _: retriever._reader(), range(4))))
    assert (len(readers), made) == (1, [str(places.passages)])


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k is how many hits are wanted, at least 1; not 0"),
        (
            {"text_column": "title"},
            r"no column title \(text, lang, year, note kept\).* --keep title",
        ),
        ({"text_column": "year"}, "the column year of .* holds int64, not text"),
        ({"score_key": "lang"}, "has a column lang of its own.* with score_key"),
        ({"score_key": "id"}, "has a column id of its own"),
        ({"options": {"topk": 3}}, "topk is no option of open_index; it takes model, device"),
        ({"row_filter": "lang =="}, "filter"),
        ({"row_filter": "size > 3"}, "size"),
    ],
)
def test_options_that_cannot_be_used_are_refused_at_once(
    places: Places, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        WhitenedRetriever(index=places.index, **options)


def test_a_filter_of_another_type_is_refused_at_once(places: Places) -> None:
    with pytest.raises(CorpusError, match="year"):
        WhitenedRetriever(index=places.index, row_filter="year == 'x'")


def test_a_mistyped_field_is_refused(places: Places) -> None:
    with pytest.raises(ValidationError, match="topk"):
        WhitenedRetriever(index=places.index, topk=3)


@pytest.mark.parametrize("make", [WhitenedEmbeddings, lambda path: WhitenedRetriever(index=path)])
def test_what_is_no_index_is_refused(places: Places, tmp_path: Path, make: Any) -> None:
    with pytest.raises(ArtifactError, match="does not exist; check the path, or build an index"):
        make(tmp_path / "none")
    with pytest.raises(ArtifactError, match="CURRENT"):
        make(tmp_path)
    with pytest.raises(ConfigError, match=r"comes from an embedding column .* with --model"):
        make(places.columns)
    with pytest.raises(ConfigError, match="an empty path was given"):
        make("")


@pytest.mark.parametrize("blank", ["", " \n"])
def test_texts_that_say_nothing_are_refused(places: Places, blank: str) -> None:
    embeddings = WhitenedEmbeddings(places.index)
    with pytest.raises(ConfigError, match=r"a query is blank \(number 0"):
        embeddings.embed_query(blank)
    with pytest.raises(ConfigError, match=r"a text is blank \(number 1.* leave it out"):
        embeddings.embed_documents(["red", blank])
    with pytest.raises(ConfigError, match="a query is blank"):
        WhitenedRetriever(index=places.index).invoke(blank)
    with pytest.raises(ConfigError, match="put the one text in brackets"):
        embeddings.embed_documents("red")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="text 0 is None, no text"):
        embeddings.embed_documents([None])  # type: ignore[list-item]
    assert embeddings.embed_documents([]) == []
    assert len(embeddings.embed_query("red")) == K


def test_without_langchain_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "whiten_index.integrations.langchain"
    expect_pip_line(monkeypatch, name, ["langchain_core", "langchain_core.callbacks"], "langchain")
