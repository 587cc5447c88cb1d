"""Files from elsewhere that are made to take all memory: one line says the limit, no more is read.

Each is read by a command in a process that may take 2 GiB more than its libraries do.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whiten_index.artifacts.limits import load_json

DEEP = "[" * 200_000 + "]" * 200_000
LEVELS = "nests more than 100 levels"
UNPACKS = "unpacks to more than 1,073,741,824 bytes and 100 times its size"


def endless(path: Path) -> Path:
    """A file of 8 GiB without a newline, which takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(8 << 30)
    return path


def deep(path: Path) -> Path:
    path.write_text(f'{{"id": {DEEP}}}\n')
    return path


LIMITS = {endless: "more than 16,777,216 bytes", deep: LEVELS}


def number(value: int) -> bytes:
    """A field of a footer after another."""
    value, found = 2 * value, b"\x16"
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def patched(path: Path, *changes: tuple[bytes, bytes]) -> Path:
    """A Parquet file with other bytes in its footer."""
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:-8]
    for old, new in changes:
        assert old in footer
        footer = footer.replace(old, new)
    path.write_bytes(data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


def claiming(path: Path, rows: int) -> Path:
    """A Parquet file whose footer claims other rows than it has."""
    pq.write_table(pa.table({"text": ["a text"] * 7777}), path)
    return patched(path, (number(7777), number(rows)))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that are in order."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "qrels.tsv").write_text("query_id\tdoc_id\trelevance\nq\td\t1\n")
    (folder / "queries.jsonl").write_text('{"id": "q", "text": "a"}\n')
    (folder / "run.trec").write_text("q Q0 d 1 0.5 tag\n")
    pq.write_table(pa.table({"id": ["d"], "text": ["a"]}), folder / "corpus.parquet")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[object]]]:
    command = [sys.executable, "-m", "tests.damage.limits_child"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        given, came = child.stdin, child.stdout

        # A corpus may unpack to 1 GiB, which readers hold twice for a moment.
        def ask(arguments: list[str], room: int = 3 << 30) -> list[object]:
            given.write(json.dumps([room, arguments]) + "\n")
            given.flush()
            return list(json.loads(came.readline()))

        yield ask
        given.close()


def assert_says(found: list[object], code: int, limit: str) -> None:
    status, said, raised = found
    assert raised is None
    lines = str(said).strip().splitlines()
    assert len(lines) == 1, said
    assert limit in lines[0]
    assert len(lines[0]) < 1000
    assert status == code


@pytest.mark.parametrize(
    ("how", "name"), [(endless, "p.tsv"), (endless, "p.jsonl"), (deep, "p.jsonl")]
)
def test_labels(run, tiny_model, tmp_path, how, name):  # type: ignore[no-untyped-def]
    arguments = ["eval", "sts", str(how(tmp_path / name)), "--model", str(tiny_model)]
    assert_says(run(arguments), 3, LIMITS[how])


def judged(sound: Path, **files: Path) -> list[str]:
    names = {"qrels": "qrels.tsv", "run": "run.trec"}
    given = {name: sound / found for name, found in names.items()} | files
    return ["eval", "retrieval", *(f"--{name}={path}" for name, path in given.items())]


@pytest.mark.parametrize(
    ("how", "option", "name"),
    [
        (endless, "run", "r.trec"),
        (endless, "run", "r.run"),
        (endless, "run", "r.jsonl"),
        (deep, "run", "r.jsonl"),
        (endless, "qrels", "q.tsv"),
        (endless, "qrels", "q.qrels"),
    ],
)
def test_runs_and_judgements(run, sound, tmp_path, how, option, name):  # type: ignore[no-untyped-def]
    assert_says(run(judged(sound, **{option: how(tmp_path / name)})), 3, LIMITS[how])


@pytest.mark.parametrize("how", [endless, deep])
@pytest.mark.parametrize(
    ("wrong", "other"), [("queries.jsonl", "corpus.parquet"), ("corpus.jsonl", "queries.jsonl")]
)
def test_the_queries_and_corpus_of_a_set(  # type: ignore[no-untyped-def]
    run, sound, tmp_path, tiny_model, how, wrong, other
):
    (tmp_path / "set" / "qrels").mkdir(parents=True)
    how(tmp_path / "set" / wrong)
    shutil.copy(sound / other, tmp_path / "set" / other)
    shutil.copy(sound / "qrels.tsv", tmp_path / "set" / "qrels" / "test.tsv")
    work = ["--model", str(tiny_model), "--store", str(tmp_path / "store")]
    arguments = ["eval", "retrieval", str(tmp_path / "set"), *work]
    assert_says(run(arguments), 3, LIMITS[how])


@pytest.mark.parametrize("name", ["config.json", "modules.json"])
@pytest.mark.parametrize("how", [endless, deep])
def test_the_configuration_of_a_model(run, sound, tmp_path, tiny_model, name, how):  # type: ignore[no-untyped-def]
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    how(tmp_path / name)
    corpus, store = str(sound / "corpus.parquet"), str(tmp_path / "store")
    named = ["--model", str(tmp_path), "--text-column", "text"]
    found = run(["encode", corpus, "--store", store, *named])
    assert_says(found, 4, LIMITS[how])


@pytest.mark.parametrize(
    ("how", "name"),
    [*((endless, f"q.{kind}") for kind in ("jsonl", "csv", "tsv", "txt")), (deep, "q.jsonl")],
)
def test_queries_to_search(run, filtered, tmp_path, how, name):  # type: ignore[no-untyped-def]
    found = run(["search", filtered[1], "--queries", str(how(tmp_path / name))])
    assert_says(found, 3, LIMITS[how])
    if name == "q.csv":
        (tmp_path / name).write_text('id,text\n1,"' + "a long cell\n" * 1_000_000)
        found = run(["search", filtered[1], "--queries", str(tmp_path / name)])
        assert_says(found, 3, "field larger than field limit")


def test_a_job_file(run, tmp_path):  # type: ignore[no-untyped-def]
    arguments = ["build", "--config", str(endless(tmp_path / "job.toml"))]
    assert_says(run(arguments), 2, "more than 1,048,576 bytes")
    (tmp_path / "long.toml").write_text(f'overlap = "{"a" * 500_000}"')
    begun = time.monotonic()
    given = ["c.parquet", "--text-column", "text", "--out", str(tmp_path / "i")]
    found = run(["build", *given, "--config", str(tmp_path / "long.toml")])
    assert_says(found, 2, "--overlap takes a whole number")
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 20_000) + " = 1",
        f"[{'.'.join('a' * 150)}]\nb = 1",
        "a = " + "[" * 9_000,
        "top-k = 0x" + "f" * 4_000,
    ],
)
def test_a_job_file_that_python_cannot_show(run, tmp_path, text):  # type: ignore[no-untyped-def]
    (tmp_path / "job.toml").write_text(text)
    assert_says(run(["build", "--config", str(tmp_path / "job.toml")]), 2, "is not TOML")


def test_a_device_as_a_job_file(run):  # type: ignore[no-untyped-def]
    assert_says(run(["build", "--config", "/dev/zero"]), 2, "is a pipe, a socket or a device")


def test_results_of_a_sweep_that_nest(run, tmp_path):  # type: ignore[no-untyped-def]
    deep(tmp_path / "results.jsonl")
    assert_says(run(["report", str(tmp_path)]), 5, "line 1 of")


def test_a_footer_that_claims_rows(run, tmp_path):  # type: ignore[no-untyped-def]
    corpus = str(claiming(tmp_path / "c.parquet", 1 << 40))
    store = str(tmp_path / "store")
    arguments = ["encode", corpus, "--store", store, "--text-column", "text", "--model", "none"]
    assert_says(run(arguments), 3, "10,000,000,000 is the limit")


def test_json_within_the_limit_is_read_and_beyond_it_a_value_error():  # type: ignore[no-untyped-def]
    assert load_json("[" * 101 + "]" * 101)
    assert load_json(b'{"a": [1]}') == {"a": [1]}
    for levels in (102, 1_000_000):
        with pytest.raises(ValueError, match="more than 100 levels"):
            load_json("[" * levels + "]" * levels)


@pytest.mark.parametrize("command", ["encode", "search"])
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (" or ".join(f"x == {i}" for i in range(10_000)), "more than 1,000 terms"),
        ("(" * 10_000 + "x == 1" + ")" * 10_000, "nests more than 100 levels"),
        ("not " * 10_000 + "x == 1", "nests more than 100 levels"),
        ("not " * 300 + "x == 1", "nests more than 100 levels"),
        ("x == 1 or " + "'a' * " * 3_000 + "y", "nests more than 100 levels"),
        (" < ".join("x" for _ in range(10_000)), "more than 1,000 terms"),
        ("x in [" + ", ".join(map(str, range(2_000_000))) + "]", "more than 4,194,304 characters"),
    ],
    ids=["or", "parentheses", "not", "some not", "product", "chain", "characters"],
)
def test_a_row_filter_beyond_the_limits(run, tmp_path, command, text, limit, filtered):  # type: ignore[no-untyped-def]
    corpus, index = filtered
    given = {
        "encode": ["encode", corpus, "--store", str(tmp_path / "s"), "--embedding-column", "e"],
        "search": ["search", index, "--queries", corpus, "--embedding-column", "e"],
    }[command]
    found = run([*given, "--filter", text])
    assert found[2] is None
    assert found[0] == 2
    assert limit in str(found[1])
    assert len(str(found[1])) < 1000


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory, run) -> tuple[str, str]:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("filtered")
    corpus, index = str(folder / "c.parquet"), str(folder / "index")
    vectors = [[float(i % 7), float(i % 5), float(i % 3)] for i in range(200)]
    pq.write_table(pa.table({"id": range(200), "x": range(200), "e": vectors}), corpus)
    named = ["--embedding-column", "e", "--id-column", "id", "--keep", "x", "--k", "2"]
    assert run(["build", corpus, "--out", index, *named])[0] == 0
    return corpus, index


def test_a_row_filter_within_the_limits_is_computed(run, tmp_path, filtered):  # type: ignore[no-untyped-def]
    corpus, _ = filtered
    named = ["--embedding-column", "e", "--store", str(tmp_path / "s"), "--json"]
    for text in (
        " or ".join(f"x == {i}" for i in range(1000)),
        f"x in {list(range(10_000))}",
        "(" * 90 + "x >= 0" + ")" * 90,
        "not " * 98 + "x >= 0",
    ):
        assert run(["encode", corpus, *named, "--filter", text])[0] == 0


@pytest.mark.parametrize("name", ["qrels", "run", "lists", "lists of texts"])
def test_one_long_value_in_thousands_of_rows(run, sound, tmp_path, name):  # type: ignore[no-untyped-def]
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 4000), pa.array(["a" * (1 << 20)]))
    numbers, path = [1] * 4000, tmp_path / "f.parquet"
    part = pa.array([[0.0] * (1 << 16)] * 64, pa.list_(pa.float32()))
    table = {
        "lists": {"query_id": pa.chunked_array([part] * 33)},
        "lists of texts": {"query_id": pa.ListArray.from_arrays([0, 4000], texts)},
        "qrels": {"query_id": ["q"] * 4000, "doc_id": texts, "relevance": numbers},
        "run": {"query_id": ["q"] * 4000, "doc_id": texts, "score": numbers},
    }[name]
    pq.write_table(pa.table(table), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1 << 20
    assert_says(run(judged(sound, **{"qrels" if name == "qrels" else "run": path})), 3, UNPACKS)


def test_millions_of_rows_in_some_kilobytes(run, sound, tmp_path):  # type: ignore[no-untyped-def]
    same, path = pa.array([0] * 6_000_000, pa.int32()), tmp_path / "f.parquet"
    ids = pa.DictionaryArray.from_arrays(same, ["d"])
    table = pa.table({"query_id": ids, "doc_id": ids, "score": same})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1 << 20
    assert_says(run(judged(sound, run=path)), 3, "unpacks to more than 1,073,741,824 bytes")


def test_a_text_of_a_corpus_that_is_too_long(run, tmp_path):  # type: ignore[no-untyped-def]
    table = pa.table({"id": ["a", "b"], "text": ["a text", "a" * (17 << 20)]})
    pq.write_table(table, path := tmp_path / "c.parquet", compression="zstd")
    build = ["build", str(path), "--text-column", "text", "--id-column", "id", "--local-files-only"]
    found = run([*build, "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")])
    assert_says(found, 3, "c.parquet#0:1 of the corpus has more than 16,777,216 bytes of text")


def test_a_footer_that_claims_any_size_plans_no_shards(run, tmp_path):  # type: ignore[no-untyped-def]
    table, path = pa.table({"text": [f"t{row}" for row in range(77_777)]}), tmp_path / "c.parquet"
    pq.write_table(table, path, use_dictionary=False, compression="none", write_statistics=False)
    size = pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size
    patched(path, (number(size), number(1 << 61)), (number(77_777), number(10**9)))
    build = ["encode", str(path), "--text-column", "text", "--store", str(tmp_path / "store")]
    assert_says(run(build, 1 << 30), 3, "c.parquet is damaged")


def test_a_file_of_similar_texts_is_read_in_shards(run, tmp_path):  # type: ignore[no-untyped-def]
    """Contracts of one template, say, are packed to a thousandth."""
    path = tmp_path / "c.parquet"
    texts, kind = [f"{row} {'a' * (64 << 10)}" for row in range(2000)], pa.large_string()
    with pq.ParquetWriter(path, pa.schema({"text": kind}), compression="zstd") as writer:
        for _ in range(10):
            writer.write_table(pa.table({"text": pa.array(texts, kind)}))
    assert path.stat().st_size < 1 << 20
    named = ["--text-column", "text", "--filter", "text == '7'", "--json"]
    found = run(["encode", str(path), *named, "--store", str(tmp_path / "store")])
    assert_says(found, 3, "(20000 filtered)")


@pytest.mark.parametrize("case", [
    "text", "a.text", "wrong size", "encoded text", "filtered", "numbers", "prefixes",
    "wrong size of prefixes", "wrong encoding", "few rows", "hidden dictionary",
])  # fmt: skip
def test_a_corpus_that_names_one_value_thousands_of_times(run, tmp_path, case):  # type: ignore[no-untyped-def]
    name, encoded = "a.text" if case == "a.text" else "text", case in ("encoded text", "filtered")
    path = written(tmp_path, 4000, "a" * (8 << 20), encoded=encoded, name=name)
    named, room = ["--text-column", name], 3 << 30
    if case in ("filtered", "prefixes", "numbers"):
        named, room = ["--embedding-column", "e"], room if case == "prefixes" else 1 << 30
    if case in ("filtered", "prefixes"):
        named += ["--filter", "text == 'a'"]
    if case == "prefixes":
        part = pa.array(["a" * (1 << 20)] * 50)
        texts = pa.table({"text": pa.chunked_array([part] * 80), "e": [[1.0, 2.0]] * 4000})
        encoding = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
        pq.write_table(texts, path, compression="zstd", **encoding)
    if case in ("wrong size of prefixes", "wrong encoding", "few rows"):
        size, rows = (120 << 20, 32) if case == "few rows" else (1 << 20, 4000)
        texts = pa.array(["a" * size], pa.large_string()).take(pa.array([0] * rows))
        encoding = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
        pq.write_table(pa.table({"text": texts}), path, compression="zstd", **encoding)
    column = pq.read_metadata(path).row_group(0).column(0)
    if case.startswith("wrong size"):
        patched(path, (number(column.total_uncompressed_size), number(1)))
    if case == "wrong encoding":
        patched(path, (b"\x25\x06\x0e", b"\x25\x06\x00"))  # PLAIN
    if case == "hidden dictionary":
        places = [number(each)[1:] for each in (column.data_page_offset, 4)]
        patched(path, (b"\x26" + b"\x26".join(places) + b"\x1c", b"\x26\x08\x3c"))
        assert not pq.read_metadata(path).row_group(0).column(0).has_dictionary_page
    if case == "numbers":
        part = pa.array([[0.0] * (1 << 16)] * 64, pa.list_(pa.float32(), 1 << 16))
        pq.write_table(pa.table({"e": pa.chunked_array([part] * 72)}), path, compression="zstd")
    assert path.stat().st_size < 1 << 18
    found = run(["encode", str(path), *named, "--store", str(tmp_path / "store")], room)
    assert_says(found, 3, UNPACKS)
    assert "--shard-rows" in str(found[1])


@pytest.mark.parametrize("short", [0, 400])
def test_long_texts_beside_lists_are_read_a_few_rows_at_a_time(run, tmp_path, short):  # type: ignore[no-untyped-def]
    rows = range(short + 800)
    texts = [f"{row} {'a' * (1 << 20 if row >= short else 1)}" for row in rows]
    lists = {"tags": [["a"] * 60] * len(rows), "e": [[row % 5.0, 1.0] for row in rows]}
    path = tmp_path / "c.parquet"
    table = pa.table({"text": texts, **lists})
    pq.write_table(table, path, write_batch_size=8, use_dictionary=not short)
    named = ["--embedding-column", "e", "--keep", "tags", "--filter", "text != ''"]
    store = ["--store", str(tmp_path / "store"), "--shard-rows", "50"]
    assert run(["encode", str(path), *named, *store], 1 << 30)[0] == 0


def test_a_row_filter_that_memory_does_not_hold(run, tmp_path):  # type: ignore[no-untyped-def]
    path = written(tmp_path, 3000, "a" * (300 << 10), encoded=True)
    named = ["--embedding-column", "e", "--filter", "text == 'a'"]
    found = run(["encode", str(path), *named, "--store", str(tmp_path / "store")], 1 << 29)
    assert_says(found, 7, f"cannot read {path}: out of memory")


def test_a_long_text_of_a_dictionary_is_pushed_a_few_rows_at_a_time(run, tmp_path):  # type: ignore[no-untyped-def]
    path = written(tmp_path, 60, "a" * (10 << 20), encoded=True)
    named = ["--embedding-column", "e", "--keep", "text", "--shard-rows", "30"]
    index = str(tmp_path / "index")
    store = ["--store", str(tmp_path / "store"), "--k", "2"]
    assert run(["build", str(path), *named, *store, "--out", index], 3 << 30)[0] == 0
    pushed = tmp_path / "pushed.parquet"
    assert run(["push", index, "--to", str(pushed)], 2 << 30)[0] == 0
    assert pq.read_metadata(pushed).num_rows == 60


@pytest.mark.parametrize("levels", [1, 2])
def test_lists_of_one_text_are_refused(run, tmp_path, levels):  # type: ignore[no-untyped-def]
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 3_000_000), pa.array(["a" * 1000]))
    for number in (30, 1000)[-levels:]:
        starts = pa.array(range(0, len(texts) + 1, number), pa.int32())
        texts = pa.ListArray.from_arrays(starts, texts)
    table = pa.table({"tags": texts, "e": [[row % 5.0, row % 3.0] for row in range(len(texts))]})
    pq.write_table(table, path := tmp_path / "c.parquet", compression="zstd", store_schema=False)
    named = ["--embedding-column", "e", "--keep", "tags", "--store", str(tmp_path / "store")]
    assert_says(run(["encode", str(path), *named], 1 << 30), 3, UNPACKS)


def test_a_long_text_that_all_rows_keep_is_refused(run, tmp_path):  # type: ignore[no-untyped-def]
    path = written(tmp_path, 400, "a" * (4 << 20), encoded=True)
    named = ["--embedding-column", "e", "--keep", "text", "--shard-rows", "200", "--k", "2"]
    found = run(["build", str(path), *named, "--out", str(tmp_path / "index")])
    assert_says(found, 3, f"the rows of the kept columns repeat long texts (it {UNPACKS})")


def test_memory_that_ends_in_a_stage_names_it(run, tmp_path):  # type: ignore[no-untyped-def]
    pq.write_table(pa.table({"e": [[1.0] * 40_000] * 3}), path := tmp_path / "c.parquet")
    named = ["--embedding-column", "e", "--store", str(tmp_path / "store")]
    assert_says(run(["encode", str(path), *named], 2 << 30), 7, "cannot finish the step 'encode'")


def written(folder: Path, rows: int, text: str, *, encoded: bool, name: str = "text") -> Path:
    """A Parquet file of one text in all rows, whose reader is asked for a dictionary or not."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array([text]))
    table = pa.table({name: texts, "e": [[row % 5.0, row % 3.0] for row in range(rows)]})
    pq.write_table(table, path := folder / "c.parquet", compression="zstd", store_schema=encoded)
    return path
