"""The exported transform where it is used: in sentence-transformers, and in PostgreSQL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from tests.helpers import tiny_models
from tests.helpers.builds import build, random_rows, write_rows
from whiten_index import BuildConfig, QueryTransform, build_index
from whiten_index.encoding.load_encoder import load_encoder
from whiten_index.integrations.sentence_transformers import export_model
from whiten_index.integrations.sql import export_sql
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

pytestmark = pytest.mark.service
ROWS, QUERIES, K = 600, 100, 128
TINY_K = 12
Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def sentences(data: Path) -> list[str]:
    """Sentences of Wikinews, of which the last ones are queries."""
    file = pq.ParquetFile(data / "sentences" / "wikinews_en.parquet")
    first = next(file.iter_batches(ROWS + QUERIES, columns=["text"]))
    return [str(text) for text in first.column("text").to_pylist()]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """An index of sentences by MiniLM. Do not write to it."""
    out = tmp_path_factory.mktemp("index") / "out"
    corpus = str(data / "sentences" / "wikinews_en.parquet")
    build_index(
        BuildConfig(
            corpus=(corpus,), out=str(out), model="all-MiniLM-L6-v2", text_columns=("text",),
            limit=ROWS, k=K, whiten="whitening", store_dtype="float32",
        )
    )  # fmt: skip
    return out


def asked(kind: Kind, k: int) -> dict[str, Any]:
    """Return k, if a kind can leave coordinates out."""
    return {} if kind is Kind.NONE else {"k": k}


# Every kind, raw and on unit vectors, which `none` leaves as they are.
KINDS = [
    (kind, unit) for kind in Kind for unit in (False, True) if kind is not Kind.NONE or not unit
]


def fitted(
    texts: Sequence[str],
    k: int,
    *,
    unit: bool = False,
    kind: Kind = Kind.WHITENING,
    similarity: str = "cosine",
    **options: Any,
) -> QueryTransform:
    """Return a transform fitted on the embeddings of texts, with their encoder."""
    encoder = load_encoder(**options)
    embeddings = encoder.encode(texts).astype(np.float64)
    moments = Moments.of(unit_rows(embeddings) if unit else embeddings)
    shape = {"normalize_input": unit, "similarity": similarity, **asked(kind, k)}
    config = WhiteningConfig(kind=kind, **shape)
    return QueryTransform(Whitening.fit(moments, config), encoder.spec.to_json())


def opened(folder: Path) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def assert_same(found: Any, expected: Array, *, atol: float = 1e-5) -> None:
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    np.testing.assert_allclose(found, expected, atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "cls"}, {"pooling": "last"}, {"pooling": "max"},
        {"pooling": "weightedmean"}, {"pooling": "mean_sqrt_len_tokens"},
        {"pooling": "mean", "layers": (0, 2)}, {"pooling": "cls", "layers": (1,)},
        {"pooling": "mean", "max_length": 16}, {"pooling": "mean", "unit": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)  # fmt: skip
def test_the_model_gives_the_vectors_of_the_transform(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    folder, texts = tiny_models.bert(tmp_path / "model"), tiny_models.texts()
    assert_exported(fitted(texts, TINY_K, model=str(folder), **options), tmp_path / "m", texts)


def test_a_real_model_gives_the_vectors_of_the_transform(
    sentences: list[str], tmp_path: Path
) -> None:
    prompts = {"document_prompt": "passage: ", "query_prompt": "query: "}
    transform = fitted(sentences[:200], 32, model="all-MiniLM-L6-v2", **prompts)
    assert_exported(transform, tmp_path / "m", sentences[-23:])


def assert_exported(transform: QueryTransform, folder: Path, texts: list[str]) -> None:
    """Assert that the exported model encodes documents and queries as the transform does."""
    export_model(transform, folder)
    model = opened(folder)
    documents, queries = transform.encode_documents(texts), transform.encode_queries(texts)
    for batch_size in (7, 32):
        assert_same(model.encode(texts, batch_size=batch_size), documents)
    assert_same(model.encode_document(texts), documents)
    assert_same(model.encode_query(texts), queries)
    assert_same(model.encode(texts, normalize_embeddings=True), documents)


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
@pytest.mark.parametrize("pooling", ["last", "first-last-avg"])
def test_every_family_is_exported(family: str, pooling: str, tmp_path: Path) -> None:
    folder = tiny_models.FAMILIES[family](tmp_path / "model")
    tiny_models.add_modules(folder, "mean", prompts={"query": "query: ", "document": "passage: "})
    texts = tiny_models.texts()
    transform = fitted(texts, TINY_K, model=str(folder), pooling=pooling)
    export_model(transform, tmp_path / "m")
    model = opened(tmp_path / "m")
    assert_same(model.encode(texts, batch_size=7), transform.encode_documents(texts))
    assert_same(model.encode_query(texts, batch_size=7), transform.encode_queries(texts))


@pytest.mark.parametrize(("kind", "unit"), KINDS)
def test_every_kind_of_transform_is_a_model(tmp_path: Path, kind: Kind, unit: bool) -> None:
    folder = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"), "mean")
    texts = tiny_models.texts(60)
    transform = fitted(texts, TINY_K, kind=kind, unit=unit, model=str(folder))
    export_model(transform, tmp_path / "m")
    assert_same(opened(tmp_path / "m").encode(texts), transform.encode_documents(texts))


def test_vectors_compared_by_dot_product_keep_their_length(
    tmp_path: Path, database: psycopg.Connection[Any]
) -> None:
    folder = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"), "mean")
    texts = tiny_models.texts(60)
    transform = fitted(texts, TINY_K, kind=Kind.PCA, similarity="dot", model=str(folder))
    export_model(transform, tmp_path / "m")
    model, vectors = opened(tmp_path / "m"), transform.encode_documents(texts)
    assert np.ptp(np.linalg.norm(vectors, axis=1)) > 0.1
    assert_same(model.encode(texts), vectors)
    products = model.similarity(vectors[:3], vectors).numpy()
    np.testing.assert_allclose(products, vectors[:3] @ vectors.T, rtol=1e-5)
    database.execute(script(transform, tmp_path))
    assert_same(called(database, "whiten", transform.encoder.encode(texts)), vectors)


@pytest.fixture
def database(address: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(address, autocommit=True) as connection:
        yield connection


def literal(row: Array) -> str:
    return f"[{','.join(str(number) for number in row)}]"


def small(folder: Path, **options: Any) -> QueryTransform:
    """Return the transform of an index of random embeddings."""
    build(folder / "out", write_rows(folder / "c.parquet", random_rows()), **options)
    return QueryTransform.of(folder / "out")


def called(database: psycopg.Connection[Any], name: str, rows: Array) -> Array:
    found = [
        database.execute(f"SELECT {name}(%s::vector)::text", [literal(row)]).fetchone()
        for row in rows
    ]
    return np.array([json.loads(each[0]) for each in found if each], dtype=np.float32)


def script(transform: QueryTransform, folder: Path, **options: str) -> str:
    export_sql(transform, folder / "f.sql", **options)
    return (folder / "f.sql").read_text()


def test_a_function_that_nobody_exported_is_not_lost(
    tmp_path: Path, database: psycopg.Connection[Any]
) -> None:
    transform = small(tmp_path)
    database.execute(
        "CREATE EXTENSION vector;"
        "CREATE FUNCTION whiten(embedding vector) RETURNS vector LANGUAGE sql IMMUTABLE "
        "AS 'SELECT embedding'"
    )
    with pytest.raises(psycopg.errors.DuplicateFunction, match="did not make it") as error:
        database.execute(script(transform, tmp_path))
    database.execute("ROLLBACK")
    assert database.execute("SELECT whiten('[1,2]')::text").fetchone() == ("[1,2]",)
    (drop,) = re.findall("DROP FUNCTION [^;]*;", str(error.value.diag.message_hint))
    database.execute(drop)
    database.execute(script(transform, tmp_path))


@pytest.mark.parametrize(("kind", "unit"), KINDS)
@pytest.mark.parametrize("mean", [0.0, 3000.0])
def test_every_kind_of_transform_is_a_function(
    tmp_path: Path, database: psycopg.Connection[Any], kind: Kind, unit: bool, mean: float
) -> None:
    """Far from the origin too, where a mean or a bias rounded to float32 costs 1e-3."""
    rows = random_rows(mean=mean)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    options = {"k": None, **asked(kind, 6)}
    build(tmp_path / "out", corpus, whiten=kind.value, normalize_input=unit, **options)
    transform = QueryTransform.of(tmp_path / "out")
    expected = transform.reduce(rows[:100])
    for dtype in ("float32", "float16"):
        export_sql(transform, tmp_path / "f.sql", name=dtype, dtype=dtype)
        database.execute((tmp_path / "f.sql").read_text())
        found = called(database, dtype, rows[:100])
        assert found.shape == expected.shape
        # Rows scaled to unit length far from the origin differ in their last digits only.
        atol = max({"float32": 1e-6, "float16": 5e-4}[dtype], 3e-5 * mean * unit)
        np.testing.assert_allclose(found, expected, atol=atol)


@pytest.mark.parametrize("name", ['a "b"; DROP TABLE docs', "Whiten'$whiten$", "naïve %s {x}"])
def test_names_are_quoted(tmp_path: Path, database: psycopg.Connection[Any], name: str) -> None:
    rows = random_rows()
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows))
    transform = QueryTransform.of(tmp_path / "out")
    quoted = '"' + name.replace('"', '""') + '"'
    database.execute(f"CREATE SCHEMA {quoted}")
    database.execute(f"CREATE EXTENSION vector SCHEMA {quoted}")
    for _ in range(2):
        database.execute(script(transform, tmp_path, name=name, schema=name))
    # As where a dump is restored or an index is built, no schema is searched.
    database.execute("SET search_path = ''")
    argument = f"'{literal(rows[0])}'::{quoted}.vector"
    (found,) = database.execute(f"SELECT {quoted}.{quoted}({argument})::text").fetchone() or ("",)
    assert_same(np.array([json.loads(found)], dtype=np.float32), transform.reduce(rows[:1]))
    # Drivers that take %s take %% for a percent sign.
    double = quoted.replace("%", "%%")
    call = f"{double}.{double}(%s::{double}.vector)"
    database.execute(f"CREATE TABLE {quoted}.docs (id int, vector {quoted}.vector)")
    for number, row in enumerate(transform.reduce(rows[:2])):
        database.execute(f"INSERT INTO {quoted}.docs VALUES ({number}, '{literal(row)}')")
    order = f"SELECT id FROM {double}.docs ORDER BY vector OPERATOR({double}.<=>) (SELECT {call})"
    for number, row in enumerate(rows[:2]):
        assert database.execute(order, [literal(row)]).fetchone() == (number,)
