"""``whiten-index export``: what it says of each form, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from tests import tiny_models
from tests.bad_input_helpers import one_object, run, succeed
from tests.build_helpers import DIM, build, random_rows, write_rows
from whiten_index import BuildConfig, QueryTransform, build_index
from whiten_index.artifacts.manifest import sealed_json
from whiten_index.errors import FormatError
from whiten_index.integrations.sentence_transformers import MARK, export_model
from whiten_index.integrations.sql import export_sql, sql_function
from whiten_index.whitening import Whitening

K = 6
FORMS = {"matrix": "w.safetensors", "query": "q", "sentence-transformers": "m", "sql": "w.sql"}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of texts by a tiny model in a folder. Do not write to it."""
    root = tmp_path_factory.mktemp("texts")
    model = tiny_models.add_modules(tiny_models.bert(root / "secret" / "tiny-bert"), "mean")
    texts = tiny_models.texts(80)
    pq.write_table(pa.table({"id": list(range(80)), "text": texts}), root / "c.parquet")
    build_index(
        BuildConfig(
            corpus=(str(root / "c.parquet"),), out=str(root / "out"), model=str(model), k=K,
            text_columns=("text",), id_column="id", whiten="whitening", device="cpu",
        )
    )  # fmt: skip
    return root / "out"


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of an embedding column. Do not write to it."""
    root = tmp_path_factory.mktemp("columns")
    build(root / "out", write_rows(root / "c.parquet", random_rows()), k=K)
    return root / "out"


# --------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("form", FORMS)
def test_every_form_tells_the_digest_of_the_transform(
    index: Path, tmp_path: Path, form: str
) -> None:
    arguments = ("export", index, tmp_path / FORMS[form], "--as", form)
    for k in (None, 4):
        width = () if k is None else ("--k", k)
        digest = QueryTransform.of(index, k=k).query_digest
        assert f"\n  query digest {digest}\n" in succeed(*arguments, *width)
        assert one_object(succeed(*arguments, *width, "--json"))["query_digest"] == digest
    assert QueryTransform.of(index).query_digest != digest


def test_every_form_holds_the_digest(index: Path, tmp_path: Path) -> None:
    transform = QueryTransform.of(index)
    transform.export_matrix(tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="numpy") as matrix:
        assert matrix.metadata()["query_digest"] == transform.query_digest
    manifest = transform.save(tmp_path / "q") / "manifest.json"
    assert json.loads(manifest.read_text())["query_digest"] == transform.query_digest
    assert export_model(transform, tmp_path / "m")["query_digest"] == transform.query_digest
    held = json.loads((tmp_path / "m" / MARK).read_text())
    assert held["query_digest"] == transform.query_digest
    assert export_sql(transform, tmp_path / "w.sql")["query_digest"] == transform.query_digest
    assert f"query digest {transform.query_digest};" in (tmp_path / "w.sql").read_text()


def test_how_to_make_and_to_call_the_function_is_told(columns: Path, tmp_path: Path) -> None:
    said = succeed("export", columns, tmp_path / "a b.sql")
    assert f"make it: psql -v ON_ERROR_STOP=1 -f '{tmp_path / 'a b.sql'}'\n" in said
    assert "call it: ORDER BY vector <=> (SELECT whiten(%s::vector))\n" in said
    assert "with these quotes" not in said
    head = (tmp_path / "a b.sql").read_text().splitlines()[:4]
    assert "--   psql -v ON_ERROR_STOP=1 -f FILE" in head


@pytest.mark.parametrize("name", ["bad name", "Whiten", "weiß", "a.b", "1st", 'a"b', "a\nb"])
@pytest.mark.parametrize("option", ["--name", "--schema"])
def test_a_name_that_needs_quotes_is_told(
    columns: Path, tmp_path: Path, option: str, name: str
) -> None:
    said = succeed("export", columns, tmp_path / "w.sql", option, name)
    assert "found only if written with these quotes" in said
    quoted = '"' + " ".join(name.replace('"', '""').split()) + '"'
    told = f"public.{quoted}" if option == "--name" else f"{quoted}.whiten"
    assert f"ORDER BY vector <=> (SELECT {told}(%s::vector))\n" in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--name", "whiten_2"), "vector <=> (SELECT public.whiten_2(%s::vector))"),
        (("--schema", "news"), "vector <=> (SELECT news.whiten(%s::vector))"),
        (("--schema", "order"), 'vector <=> (SELECT "order".whiten(%s::vector))'),
        (("--name", "trim"), 'vector <=> (SELECT public."trim"(%s::vector))'),
        (("--vector-schema", "ext"), "vector OPERATOR(ext.<=>) (SELECT whiten(%s::ext.vector))"),
        (("--name", "100%"), 'vector <=> (SELECT public."100%%"(%s::vector))'),
    ],
)
def test_the_call_is_as_short_as_it_may_be(
    columns: Path, tmp_path: Path, options: tuple[str, str], told: str
) -> None:
    said = succeed("export", columns, tmp_path / "w.sql", *options)
    assert f"call it: ORDER BY {told}\n" in said
    assert ("with these quotes" in said) == ('"' in told)
    facts = one_object(succeed("export", columns, tmp_path / "w.sql", *options, "--json"))
    assert facts["order_by"] == told
    assert facts["call"] in told


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float32", 2**-24, 1e-6), ("float16", 2**-11, 2**-10)]
)
def test_what_the_function_costs_is_told(
    columns: Path, tmp_path: Path, dtype: str, least: float, most: float
) -> None:
    arguments = ("export", columns, tmp_path / "w.sql", "--dtype", dtype)
    facts = one_object(succeed(*arguments, "--json"))
    assert facts["dtype"] == dtype
    assert least < facts["error"] < most
    told = f"  relative error of vectors in {dtype} at most about {facts['error']:.1e}\n"
    assert told in succeed(*arguments)


@pytest.mark.parametrize("mean", [0.0, 100.0, 3000.0])
def test_a_mean_far_from_the_origin_costs_the_function_nothing(tmp_path: Path, mean: float) -> None:
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", random_rows(mean=mean)))
    transform = QueryTransform.of(tmp_path / "out")
    assert export_sql(transform, tmp_path / "w.sql")["error"] < 1e-6
    if mean:
        assert transform.whitening.export().error > 1e-6
    parts = re.findall(r"embedding OPERATOR\(\S*-\) '\[(.*?)\]'", (tmp_path / "w.sql").read_text())
    high, low = (np.array(part.split(","), dtype=np.float32) for part in parts)
    # Two float32 numbers hold 48 bits, and a float64 has 53.
    summed = high.astype(np.float64) + low
    np.testing.assert_allclose(summed, transform.whitening.mean, rtol=2.0**-47)


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("form", ["sql", "query", "matrix"])
def test_more_numbers_than_the_vectors_have_are_refused(
    columns: Path, tmp_path: Path, form: str
) -> None:
    path = tmp_path / FORMS[form]
    status, stdout, stderr = run("export", columns, path, "--as", form, "--k", 500)
    assert (status, stdout) == (2, "")
    assert f"the vectors of {columns} have 6 numbers and cannot be cut to 500" in stderr
    assert "build the index with a larger --k" in stderr
    assert not list(tmp_path.iterdir())


def test_more_numbers_than_the_embeddings_have_are_refused(tmp_path: Path) -> None:
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", random_rows()), k=DIM)
    status, _, stderr = run("export", tmp_path / "out", tmp_path / "w.sql", "--k", DIM + 1)
    assert status == 2
    assert "cannot be cut to 13; leave out --k" in stderr


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        ("query", "mm.safetensors", "--as query makes a folder; give a name without .safetensors"),
        ("query", "mm.SQL", "name of a sql file, and --as query makes a folder"),
        ("sentence-transformers", "mm.safetensors", "or leave out --as sentence-transformers for"),
        ("sentence-transformers", "mm.sql/", "makes a folder; give a name without .sql"),
        ("sql", "mm.safetensors", "makes another one; end the name in .sql"),
        ("matrix", "mm.sql", "makes another one; end the name in .safetensors"),
    ],
)
def test_the_name_of_another_form_is_refused(
    index: Path, tmp_path: Path, form: str, name: str, message: str
) -> None:
    status, stdout, stderr = run("export", index, f"{tmp_path}/{name}", "--as", form)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert not list(tmp_path.iterdir())


def test_other_endings_are_free(index: Path, tmp_path: Path) -> None:
    succeed("export", index, tmp_path / "query.v2", "--as", "query")
    succeed("export", index, tmp_path / "whiten.txt", "--as", "sql")
    assert {path.name for path in tmp_path.iterdir()} == {"query.v2", "whiten.txt"}


def test_a_name_that_is_no_text_is_refused(columns: Path, tmp_path: Path) -> None:
    status, _, stderr = run("export", columns, tmp_path / "w.sql", "--name", "f\udcff")
    assert status == 2
    assert "is no name of PostgreSQL" in stderr


def test_a_model_folder_of_a_later_release_is_left_to_it(index: Path, tmp_path: Path) -> None:
    export_model(QueryTransform.of(index), tmp_path / "m")
    mark = tmp_path / "m" / MARK
    mark.write_bytes(sealed_json({**json.loads(mark.read_text()), "format_version": 2}))
    before = mark.read_bytes()
    with pytest.raises(FormatError, match="upgrade whiten-index"):
        export_model(QueryTransform.of(index), tmp_path / "m")
    assert mark.read_bytes() == before


# --------------------------------------------------------------------------- the script


def transform_of(columns: Path, **encoder: Any) -> QueryTransform:
    made = QueryTransform.of(columns)
    return QueryTransform(made.whitening, {**made.encoder_facts, **encoder}, version=made.version)


def test_the_place_of_a_model_is_in_no_comment(index: Path, tmp_path: Path) -> None:
    transform = QueryTransform.of(index)
    assert transform.spec is not None
    assert "/secret/" in transform.spec.model
    script = sql_function(transform)
    assert "secret" not in script
    assert script.count(f"encoder tiny-bert {transform.fingerprint}") == 2


def test_what_is_no_text_in_the_name_of_a_model_or_column_does_not_stop_an_export(
    columns: Path, tmp_path: Path
) -> None:
    transform = transform_of(columns, column="a\udcff\0\nb")
    export_sql(transform, tmp_path / "w.sql")
    assert "encoder column a?? b" in (tmp_path / "w.sql").read_text()


def test_a_script_with_long_facts_is_known_again(columns: Path, tmp_path: Path) -> None:
    transform = transform_of(columns, column="c" * 5000)
    for _ in range(2):
        export_sql(transform, tmp_path / "w.sql")


@pytest.mark.parametrize("name", ["字" * 83, "é" * 125 + ".sql"])
@pytest.mark.parametrize("write", [export_sql, lambda transform, path: transform.save(path)])
def test_a_name_as_long_as_the_disk_takes_is_taken(
    columns: Path, tmp_path: Path, name: str, write: Callable[[QueryTransform, Path], Any]
) -> None:
    for _ in range(2):
        write(QueryTransform.of(columns), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_error_of_rounded_embeddings_is_that_of_their_cosines(columns: Path) -> None:
    whitening: Whitening = QueryTransform.of(columns).whitening
    for relative in (1e-3, 1e-1):
        error = whitening.rounding_error(relative_error=relative)
        cosine = whitening.rounding_cosine(relative_error=relative)
        assert cosine == pytest.approx(1 / np.sqrt(1 + error**2))
