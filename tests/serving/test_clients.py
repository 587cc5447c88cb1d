"""Clients of OpenAI's API, pointed at a server: reduced vectors without a line of ours."""

from pathlib import Path

import numpy as np
import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.serving.conftest import K, Serve
from whiten_index import BuildConfig, QueryTransform, build_index, load_encoder, open_index

pytestmark = pytest.mark.service

TEXTS = ["a cat sat on the mat", "two birds flew north"]
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def url(serve: Serve, index: Path) -> str:
    return serve(index, variables={"WHITEN_INDEX_TOKEN": TOKEN}).url + "/v1"


@pytest.fixture(scope="module")
def wanted(index: Path) -> np.ndarray:
    return QueryTransform.of(index).encode_queries(TEXTS)


def test_the_official_client(url: str, index: Path, wanted: np.ndarray) -> None:
    client = openai.OpenAI(base_url=url, api_key=TOKEN)
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="docs", input=TEXTS, **options)
        assert np.allclose([each.embedding for each in answer.data], wanted, atol=1e-5)
    short = client.embeddings.create(model="docs", input=TEXTS[0], dimensions=3)
    expected = QueryTransform.of(index, k=3).encode_queries(TEXTS[:1])
    assert np.allclose(short.data[0].embedding, expected, atol=1e-5)
    assert [each.id for each in client.models.list()] == ["docs"]
    with pytest.raises(openai.NotFoundError, match="no index is served as 'x'"):
        client.embeddings.create(model="x", input=TEXTS)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong").embeddings.create(model="docs", input="a")


def test_langchain(url: str, wanted: np.ndarray) -> None:
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(
        model="docs", base_url=url, api_key=TOKEN, check_embedding_ctx_length=False
    )
    assert np.allclose(client.embed_query(TEXTS[0]), wanted[0], atol=1e-5)
    assert np.allclose(client.embed_documents(TEXTS), wanted, atol=1e-5)


def test_llama_index(url: str, wanted: np.ndarray) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    client = OpenAILikeEmbedding(model_name="docs", api_base=url, api_key=TOKEN)
    found = client.get_query_embedding(TEXTS[0])
    assert len(found) == K
    assert np.allclose(found, wanted[0], atol=1e-5)


def test_an_index_whose_encoder_is_a_served_index(
    url: str, wanted: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    encoder = load_encoder("openai:docs", base_url=url)
    np.testing.assert_allclose(encoder.encode(TEXTS), wanted, atol=1e-5)
    texts = [f"{TEXTS[row % 2]} {row}" for row in range(700)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "c.parquet")
    config = BuildConfig(
        corpus=str(tmp_path / "c.parquet"), text_columns="text", out=str(tmp_path / "index"),
        model="openai:docs", base_url=url, whiten="none",
    )  # fmt: skip
    found = open_index(build_index(config).out, base_url=url).search(texts[:3], top_k=1)
    assert len(found) == 3
