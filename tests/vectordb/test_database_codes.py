"""Codes of the databases: what a push makes of them, what a plan says, and the queries."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.bad_input import fails, run
from tests.helpers.builds import build, random_rows, write_rows
from tests.vectordb.postgres.helpers import connected
from tests.vectordb.pushed_rows import Rows, append, end
from whiten_index import PushConfig, push_index
from whiten_index.errors import ConfigError
from whiten_index.vectordb import duckdb_writer, sqlite_writer
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.engine_options import Code, LanceOptions, MilvusOptions, QdrantOptions
from whiten_index.vectordb.file_options import DuckOptions, SqliteOptions
from whiten_index.vectordb.postgres_options import PostgresOptions
from whiten_index.vectordb.push import plan_push
from whiten_index.vectordb.registry import open_writer, require_database

K, ROWS = 64, 2000
POSTGRES = {
    "hnsw": {}, "halfvec": {"code": "halfvec"}, "bit": {"code": "bit"},
    "lists of bits": {"index": "ivfflat", "code": "bit", "lists": "20"},
    "lists": {"index": "ivfflat", "lists": "20"},
    "small graph": {"m": "8", "ef_construction": "32", "max_parallel_maintenance_workers": "0"},
}  # fmt: skip
MILVUS = (
    {"index": "flat"}, {"index": "hnsw", "m": "8", "ef_construction": "50"},
    {"index": "hnsw_sq"}, {"index": "ivf_flat", "nlist": "8"}, {"index": "ivf_sq8"},
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Rows around some hundred centres, as embeddings of texts are."""
    rng = np.random.default_rng(3)
    centres = rng.standard_normal((100, K))
    noise = rng.standard_normal((ROWS, K))
    return Rows.of((centres[rng.integers(100, size=ROWS)] + 0.7 * noise).astype(np.float32))


def halves(rows: Rows) -> Rows:
    return Rows.of(rows.vectors, dtype="float16")


def assert_sized(writer: DatabaseWriter, estimate: int | None) -> None:
    """An estimate is within a tenth of the index, and a few pages."""
    index = writer.sizes()["index"]
    assert estimate is not None
    assert abs(index - estimate) <= 0.1 * index + 3 * 8192


@pytest.mark.service
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in POSTGRES), ("hnsw", "float16"),
                        ("lists of bits", "float16")],
)  # fmt: skip
def test_postgresql(address: str, rows: Rows, name: str, dtype: str) -> None:
    given = POSTGRES[name]
    rows = halves(rows) if dtype == "float16" else rows
    options = PostgresOptions.parse(given)
    memory = options.settings_for(ROWS, K, dtype)
    with open_writer(address, "docs", options=given | memory) as writer:
        # The server tells if a graph was too large for the memory.
        notices: list[str] = []
        notice = vars(writer)["_connection"].add_notice_handler
        notice(lambda diagnostic: notices.append(diagnostic.message_primary))
        rows.fill(writer)
        assert notices == []
        rows.assert_found(writer)
        assert rows.recall(writer) >= (0.6 if given.get("code") == "bit" else 0.9)
        assert_sized(writer, options.index_bytes(ROWS, K, dtype))
        found = writer.search(rows.vectors[:20], 10)
        order = options.query("docs", rows.pushed)
    # The SQL of a plan, as a user runs it, finds what the writer does.
    with connected(address) as connection:
        connection.execute("SET enable_seqscan = off")
        *settings, order = order.split("; ")
        for each in settings:
            connection.execute(each)
        vector = f"'{rows.vectors[0].tolist()}'"
        asked = order.replace(":query", vector)
        explained = "\n".join(row[0] for row in connection.execute(f"EXPLAIN {asked}").fetchall())
        assert "docs_vector_idx" in explained
        (definition,) = connection.execute(
            "SELECT indexdef FROM pg_indexes WHERE indexname = 'docs_vector_idx'"
        ).fetchone()
        for built in given.keys() & {"m", "ef_construction", "lists"}:
            assert f"{built}='{given[built]}'" in definition
        got = [1 - distance for _, distance in connection.execute(asked).fetchall()]
    assert np.allclose(got, found[0], atol=1e-3)


@pytest.mark.service
@pytest.mark.parametrize(
    ("index", "extension"), [("vchordrq", "vchord"), ("diskann", "vectorscale")]
)
def test_an_extension_that_the_server_lacks(
    address: str, rows: Rows, index: str, extension: str
) -> None:
    with pytest.raises(ConfigError, match=f"no extension {extension}.*CREATE EXTENSION"):
        rows.push_to(address, index=index)


@pytest.mark.service
def test_an_index_of_another_extension(address: str, rows: Rows) -> None:
    # A stand-in for pgvectorscale: pgvector's graph by the name of its kind of index.
    with connected(address) as connection:
        connection.execute(
            "CREATE SCHEMA scale; CREATE EXTENSION vector; "
            "CREATE ACCESS METHOD diskann TYPE INDEX HANDLER hnswhandler; "
            "CREATE OPERATOR CLASS scale.vector_cosine_ops FOR TYPE vector USING diskann AS "
            "OPERATOR 1 <=> (vector, vector) FOR ORDER BY float_ops, "
            "FUNCTION 1 vector_negative_inner_product(vector, vector), "
            "FUNCTION 2 vector_norm(vector)"
        )
    with open_writer(address, "docs", options={"index": "diskann"}) as writer:
        rows.fill(writer)
        assert rows.recall(writer) >= 0.9
        halved = halves(rows)
        # Before a row is sent.
        with pytest.raises(ConfigError, match="no extension vectorscale that indexes halfvec"):
            writer.begin(halved.pushed, halved.layout)


def test_the_query_names_any_table(rows: Rows) -> None:
    order = PostgresOptions.parse({"code": "bit", "schema": 'a"b'}).query('t$1"$3', rows.pushed)
    assert 'FROM "a""b"."t$1""$3" ORDER BY' in order
    assert order.count(":query") == 2
    assert order.count(":query::vector") == 2


@pytest.mark.service
def test_bits_of_wide_vectors(address: str) -> None:
    wide = Rows.make(50, k=3000)
    with open_writer(address, "docs") as writer, pytest.raises(ConfigError, match="code=bit"):
        writer.begin(wide.pushed, wide.layout)
    with open_writer(address, "docs", options={"code": "bit"}) as writer:
        wide.fill(writer)
        wide.assert_found(writer)


@pytest.mark.service
@pytest.mark.parametrize("later", [{"code": "bit"}, {"index": "ivfflat"}, {"index": "none"}])
def test_a_push_that_goes_on_with_another_code(
    address: str, rows: Rows, later: dict[str, str]
) -> None:
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        append(writer, rows.batches(ROWS))
        writer.finish()
    with open_writer(address, "docs", options=later) as writer:
        writer.resume(rows.layout)
        end(writer)
        expected = PostgresOptions.parse(later).index_bytes(ROWS, K, "float32")
        assert_sized(writer, expected)
        rows.assert_found(writer)


@pytest.mark.service
@pytest.mark.parametrize(
    "given", [{"index": "ivf_rq"}, {"index": "ivf_pq", "num_sub_vectors": "5"}]
)
def test_widths_that_no_code_takes(tmp_path: Path, given: dict[str, str]) -> None:
    odd = Rows.make(300, k=12)
    with open_writer(f"lancedb://{tmp_path}/l", "docs", options=given) as writer:
        with pytest.raises(ConfigError, match="divides, and they have 12"):
            writer.begin(odd.pushed, odd.layout)
        assert writer.pending() is None


LANCE = LanceOptions.codes(K) | {
    "lists": Code({"index": "ivf_flat"}),
    "graph": Code({"index": "ivf_hnsw_sq"}),
    "graph of numbers": Code({"index": "ivf_hnsw_flat"}),
}


@pytest.mark.service
@pytest.mark.parametrize("name", LANCE)
def test_lancedb(tmp_path: Path, rows: Rows, name: str) -> None:
    code = LANCE[name]
    rows = halves(rows) if code.dtype == "float16" else rows
    options = LanceOptions.parse(code.options)
    with open_writer(f"lancedb://{tmp_path}/l", "docs", options=code.options) as writer:
        rows.fill(writer)
        rows.assert_found(writer)
        assert rows.recall(writer) >= 0.8
        assert_sized(writer, options.index_bytes(ROWS, K, code.dtype))
        found = writer.search(rows.vectors[:1], 10)
    import lancedb

    names = {"database": lancedb.connect(f"{tmp_path}/l"), "vector": rows.vectors[0]}
    made = names["database"].open_table("docs").list_indices()
    kind = code.options["index"].replace("_", "")
    assert [each.index_type.lower() for each in made] == [kind] * (kind != "none")
    got = eval(options.query("docs", rows.pushed), names).to_arrow()
    assert np.allclose(1 - got["_distance"].to_numpy(), found[0], atol=1e-3)


@pytest.mark.service
@pytest.mark.parametrize("given", MILVUS, ids=lambda given: given["index"])
def test_milvus_lite(tmp_path: Path, rows: Rows, given: dict[str, str]) -> None:
    address, options = f"milvus://{tmp_path}/m.db", MilvusOptions.parse(given)
    with open_writer(address, "docs", options=given) as writer:
        rows.fill(writer)
        rows.assert_found(writer)
        assert rows.recall(writer) >= 0.8
        found = writer.search(rows.vectors[:1], 10)
        from pymilvus import MilvusClient

        client = MilvusClient(str(tmp_path / "m.db"))
        made = client.describe_index("docs", "vector")
        assert made["index_type"] == given["index"].upper()
        built = {"m": "M", "ef_construction": "efConstruction", "nlist": "nlist"}
        for name in built.keys() & given.keys():
            assert str(made["params"][built[name]]) == given[name]
        names = {"client": client, "vector": rows.vectors[0]}
        got = eval(options.query("docs", rows.pushed), names)
        client.close()
    assert np.allclose([hit["distance"] for hit in got[0]], found[0], atol=1e-3)


@pytest.mark.parametrize("given", [{}, {"m": "8", "ef_construction": "40"}, {"index": "none"}])
def test_duckdb(tmp_path: Path, rows: Rows, given: dict[str, str]) -> None:
    options = DuckOptions.parse(given)
    with open_writer(f"duckdb://{tmp_path}/d.duckdb", "docs", options=given) as writer:
        rows.fill(writer)
        rows.assert_found(writer)
        assert rows.recall(writer) >= 0.95
        assert_sized(writer, options.index_bytes(ROWS, K, "float32"))
        found = writer.search(rows.vectors[:1], 10)
    vector = {"query": rows.vectors[0].tolist()}
    with duckdb_writer.connect(tmp_path / "d.duckdb", make=False) as connection:
        connection.execute("USE db")
        *settings, order = options.query("docs", rows.pushed).split("; ")
        for each in settings:
            connection.execute(each)
        plan = connection.execute(f"EXPLAIN {order}", vector).fetchall()[0][1]
        assert ("HNSW_INDEX_SCAN" in plan) is (options.index == "hnsw")
        got = connection.execute(order, vector).fetchall()
    assert np.allclose([1 - distance for _, distance in got], found[0], atol=1e-5)


@pytest.mark.parametrize("name", SqliteOptions.codes(K))
def test_sqlite(tmp_path: Path, rows: Rows, name: str) -> None:
    code = SqliteOptions.codes(K)[name]
    options = SqliteOptions.parse(code.options)
    with open_writer(f"sqlite://{tmp_path}/s.db", "docs", options=code.options) as writer:
        rows.fill(writer)
        rows.assert_found(writer)
        assert rows.recall(writer) >= (0.6 if name == "bit" else 0.99)
        assert_sized(writer, options.index_bytes(ROWS, K, "float32"))
        found = writer.search(rows.vectors[:1], 10)
    connection = sqlite_writer.connect(tmp_path / "s.db", make=False)
    order = options.query("docs", rows.pushed)
    got = connection.execute(order, {"query": rows.vectors[0].tobytes()}).fetchall()
    connection.close()
    assert np.allclose([1 - distance for _, distance in got], found[0], atol=1e-5)


@pytest.mark.parametrize(
    ("address", "given", "message"),
    [
        ("postgresql://here/db", {"code": "bit", "index": "none"}, "needs an index of pgvector"),
        ("postgresql://here/db", {"code": "bit", "index": "diskann"}, "needs an index of pgvector"),
        ("postgresql://here/db", {"code": "two"}, "--option code: "),
        ("milvus://here", {"index": "faiss"}, "--option index: "),
        ("qdrant://here", {"quantization": "turbo_3_bits"}, "--option quantization: "),
        ("duckdb:///here.duckdb", {"m": "1"}, "--option m: "),
        ("sqlite:///here.db", {"code": "float16"}, "--option code: "),
    ],
)
def test_options_that_do_not_fit(address: str, given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_database(address, given)


def test_bytes_of_codes() -> None:
    for engine in (
        PostgresOptions, LanceOptions, MilvusOptions, QdrantOptions, DuckOptions, SqliteOptions,
    ):  # fmt: skip
        sizes = {
            name: engine.parse(code.options).code_bytes(10_000, 128, code.dtype) or 0
            for name, code in engine.codes(128).items()
        }
        assert max(sizes.values()) == 512
        halved = sizes.get("float16", sizes.get("halfvec"))
        assert halved in (None, 256)
        assert all(0 < size <= 512 for size in sizes.values())


def test_few_rows_have_no_code_in_lancedb() -> None:
    by_rows = {rows: LanceOptions.parse({"index": "ivf_sq"}) for rows in (999, 1000)}
    assert [o.code_bytes(rows, 64, "float32") for rows, o in by_rows.items()] == [256, 64]
    assert [LanceOptions().code_bytes(rows, 64, "float16") for rows in (99_999, 100_000)] == [
        128,
        64,
    ]


def test_few_rows_are_coded_in_qdrant() -> None:
    few, many = (2_000, 64, "float32"), (10_000_000, 64, "float32")
    coded = QdrantOptions.parse({"quantization": "turbo_1_bit"})
    # A server codes a segment, one of eight, from this many kilobytes on.
    assert int(coded.settings_for(*few)["indexing_threshold"]) < 2_000 * 64 * 4 / 1024 / 8
    assert coded.settings_for(*many) == QdrantOptions().settings_for(*few) == {}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("codes")
    build(root / "index", write_rows(root / "c.parquet", random_rows(rows=1500)))
    return root / "index"


def test_a_plan_needs_no_database(index: Path) -> None:
    status, out, _ = run(
        "push", index, "--to", "postgresql://me@nowhere.invalid/db", "--table", "docs", "--plan",
        "--option", "code=bit", "--json",
    )  # fmt: skip
    assert status == 0
    report = json.loads(out)
    assert report["rows"] == 1500
    assert report["code_bytes"] == -(-report["k"] // 8)
    assert report["settings"] == {"maintenance_work_mem": "64MB"}
    assert report["table_bytes"] >= 1500 * 4 * report["k"]
    assert "binary_quantize" in report["query"]


def test_a_plan_of_a_file_is_refused(index: Path, tmp_path: Path) -> None:
    fails(2, "takes no --plan", "push", index, "--to", tmp_path / "v.parquet", "--plan")
    assert not list(tmp_path.iterdir())


@pytest.mark.service
def test_the_plan_is_of_the_push(index: Path, address: str) -> None:
    config = PushConfig(index=str(index), to=address, table="docs", options={"code": "halfvec"})
    planned, report = plan_push(config), push_index(config)
    assert planned["rows"] == report.rows
    with open_writer(address, "docs", options=config.options) as writer:
        assert_sized(writer, planned["index_bytes"])
