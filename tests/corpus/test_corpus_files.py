"""The files of a corpus: which are found by folder, glob and URI, and damage that is named."""

import glob
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from uuid import UUID

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.helpers.corpora import chunk_bytes, open_corpus, overwrite, read_all
from whiten_index.corpus.sources import resolve
from whiten_index.errors import CorpusError, StorageError


@pytest.fixture
def tree(tmp_path, write_parquet) -> Path:
    """A folder as writers leave it: nested parts, and bookkeeping that is no data."""
    root = tmp_path / "a corpus"
    for name in (
        "b.parquet", "a.pq", "sub/c.parq", "sub/deep/d.parquet",
        ".hidden.parquet", "_metadata.parquet", "_temporary/0/e.parquet", "sub/.x/f.parquet",
    ):  # fmt: skip
        write_parquet(root / name, {"text": [name]})
    (root / "_SUCCESS").touch()
    (root / "sub" / "notes.txt").write_text("no data")
    return root


VISIBLE = ["a.pq", "b.parquet", "sub/c.parq", "sub/deep/d.parquet"]


def test_a_folder_is_read_without_hidden_and_underscore_files(tree):
    ids, texts, _ = read_all(open_corpus(tree))
    assert texts == VISIBLE
    assert ids == [f"{name}#0:0" for name in VISIBLE]


GLOBS = (
    "*.parquet", "b?.parquet", "[ab]*.parquet", "*/*.parquet", "a*/*.parquet", "**/*.parquet",
    "**/b/*.parquet", "a/**/*.parquet", "a/**/b1.parquet", "**/a1.parquet", "[!a]*.parquet",
    "a/*/*.parquet", "**/b/**/*.parquet",
)  # fmt: skip


@pytest.mark.parametrize("pattern", GLOBS)
def test_a_glob_finds_what_python_globbing_finds(tmp_path, write_parquet, pattern):
    for name in (
        "a1", "b1", "bb", "a/a1", "a/b1", "a/b/b1", "b/a1", "ab/a1", "ab/b/b1", "a/b/c/b1",
        "b/c/d/a1",
    ):  # fmt: skip
        write_parquet(tmp_path / f"{name}.parquet", {"text": [f"{name}.parquet"]})
    expected = glob.glob(pattern, root_dir=tmp_path, recursive=True)  # noqa: PTH207
    assert expected
    assert sorted(read_all(open_corpus(tmp_path / pattern))[1]) == sorted(expected)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing.parquet", "does not exist; check the path"),
        ("nothing/*.parquet", r"no file matches .*\*\.parquet"),
        ("empty", r"holds no Parquet file \(1 files, none ending with \.parquet"),
        ("empty/*.parquet", r"no file matches \*\.parquet"),
    ],
)
def test_sources_without_parquet_are_refused(tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    with pytest.raises(CorpusError, match=message):
        open_corpus(tmp_path / source)


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        # Rows of other types come late.
        ("a.csv", "\ufeffid,text\n" + "7,x\n" * 30_000 + '08,"a, ""b""\n\nc"\n',
         [("08", 'a, "b"\n\nc')]),
        ("a.tsv", 'id\ttext\n1\tsay "hi"\n2\t"open\n', [(1, 'say "hi"'), (2, '"open')]),
        ("a.txt", '\ufeffa, "b\n\n#c\td\r\ne', [('a, "b',), ("",), ("#c\td",), ("e",)]),
        ("a.json", f'[{{"id": "{UUID(int=7)}", "text": "x"}}, {{"text": {{"y": 1}}}}]',
         [(str(UUID(int=7)), "x"), (None, '{"y":1}')]),
        ("a.ndjson", '{"id": 1}\n' * 30_000 + '{"text": "x"}\n', [(None, "x")]),
        ("a.csv", "id,text\n1,a\n2,b, c\n", None),
    ],
)  # fmt: skip
def test_the_line_that_converts_other_files_runs_in_a_shell(tmp_path, name, content, rows):
    folder = tmp_path / """of 'a' "b" $(c) [1]"""
    folder.mkdir()
    (folder / name).write_text(content)
    with pytest.raises(CorpusError, match="names no Parquet files") as refused:
        open_corpus(Path(glob.escape(str(folder)), "*"))
    line = sys.executable + str(refused.value).partition("makes of it: python")[2]
    ended = subprocess.run(line, shell=True, cwd=tmp_path)
    assert ended.returncode == (rows is None)
    for made in tmp_path.glob("*.parquet"):
        written = [tuple(row.values()) for row in pq.read_table(made).to_pylist()]
        assert written[-len(rows) :] == rows


@pytest.mark.parametrize("packed", [True, False])
def test_an_id_of_a_megabyte_is_refused(tmp_path, packed):
    """A dictionary of kilobytes may name it in each of a million rows."""
    ids = pa.array(["x" * 1_000_000] * 3)
    table = pa.table({"id": ids.dictionary_encode() if packed else ids, "text": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"the id 'xxx.* has 1,000,000 bytes, and 16,384"):
        read_all(open_corpus(tmp_path / "a.parquet", id_column="id"))
    # A dictionary keeps what the filter leaves out.
    if packed:
        found = open_corpus(tmp_path / "a.parquet", id_column="id", row_filter="text == 'd'")
        assert not [text for batch in found.batches() for text in batch.texts]


def test_one_long_text_among_lists_of_short_ones_is_read(tmp_path):
    """All values as long as the longest would be 1.5 GB."""
    tags = [[f"tag {(row + n) % 500}" for n in range(5)] for row in range(30_000)]
    tags[7] = ["x" * 10_000]
    table = pa.table({"text": [f"text {row}" for row in range(30_000)], "tags": tags})
    pq.write_table(table, tmp_path / "a.parquet")
    batch = next(open_corpus(tmp_path / "a.parquet", keep=("tags",)).batches())
    assert batch.documents["tags"][7].as_py() == ["x" * 10_000]


def test_folders_without_end_are_refused(tmp_path):
    (tmp_path / Path(*["d"] * 99)).mkdir(parents=True)
    with pytest.raises(CorpusError, match="holds no Parquet file"):
        open_corpus(tmp_path)
    (tmp_path / Path(*["d"] * 1000)).mkdir(parents=True)
    with pytest.raises(CorpusError, match="more than 100 folders deep"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_a_flipped_page_with_checksums_is_named(tmp_path, write_parquet, compression):
    texts = [f"text number {i}" for i in range(2000)]
    for name in ("a", "b"):
        write_parquet(
            tmp_path / f"{name}.parquet",
            {"text": texts},
            compression=compression,
            write_page_checksum=True,
            use_dictionary=False,
        )
    bad = tmp_path / "b.parquet"
    start, stop = chunk_bytes(bad, "text")
    middle = (start + stop) // 2
    overwrite(bad, middle, middle + 1)
    corpus = open_corpus(tmp_path)
    assert corpus.read(corpus.shards[0]).texts == texts
    with pytest.raises(CorpusError, match=r"b\.parquet is damaged .*restore the file"):
        corpus.read(corpus.shards[1])


@pytest.mark.parametrize("column", ["text", "key"])
def test_damage_that_leaves_invalid_utf8_is_named(tmp_path, write_parquet, column):
    columns = {"text": ["plain words"] * 50, "key": [f"key-{i:03}" for i in range(50)]}
    path = write_parquet(
        tmp_path / "a.parquet", columns,
        compression="none", use_dictionary=False, write_statistics=False,
    )  # fmt: skip
    data = path.read_bytes()
    word = {"text": b"words", "key": b"key-031"}[column]
    path.write_bytes(data.replace(word, b"\xff\xfe" + word[2:], 1))
    corpus = open_corpus(path, id_column="key")

    def use() -> None:
        corpus.check_ids()
        for batch in corpus.batches():
            batch.documents.to_pylist()

    with pytest.raises(CorpusError, match=r"a\.parquet"):
        use()


class _Refusing(MemoryFileSystem):  # type: ignore[misc]
    protocol = "refusing"
    find = fsspec.AbstractFileSystem.find

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix("refusing:/"))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if path.endswith("secret"):
            raise PermissionError("403 Forbidden")
        return super().ls(path, detail, **options)


def test_an_address_that_says_too_little_is_refused():
    with pytest.raises(CorpusError, match="use a URI that pyarrow"):
        open_corpus("github://")


@pytest.mark.parametrize(
    "source",
    [
        "zip://a.parquet::file://{}/a.zip", "tar://a.parquet::http://127.0.0.1:9/a.tar",
        "simplecache::file://{}/a.parquet", "zip://a.parquet", "generic://a.parquet", "local:///a.parquet",
        "arrow_hdfs://h/a.parquet",
        "fsspec+zip://a.parquet::file://{}/a.zip", "fsspec+http://127.0.0.1:9/a.parquet",
    ],
)  # fmt: skip
def test_archives_and_chains_of_file_systems_are_refused(tmp_path, source):
    with pytest.raises(CorpusError, match="is in an archive, or behind another file system"):
        open_corpus(source.replace("{}", str(tmp_path)))


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/c.parquet?region=x&endpoint_override=127.0.0.1:9",
        "s3://bucket/c.parquet?endpoint%5Foverride=127.0.0.1:9", "s3://bucket/c.parquet?scheme=http",
        "abfs://c@account/x?enable_tls=false", "abfs://account@example.org/c/x",
        "abfss://c@account.dfs.core.windows.net.example.org/x", "abfs://127.0.0.1:9/c/x",
        "abfs://c@a.dfs.core.windows.net#@example.org/x", "s3://b/x?region=a#&scheme=http",
        "gs://bucket/x?endpoint_override=127.0.0.1:9",
    ],
)  # fmt: skip
def test_an_address_of_a_corpus_names_no_server(address):
    with pytest.raises(
        CorpusError, match="may not say to which server keys are sent; leave it out"
    ):
        open_corpus(address)


def test_a_sign_that_begins_a_fragment_is_one_of_a_name(tmp_path, write_parquet):
    for name in ("C", "C#"):
        write_parquet(tmp_path / name / "a.parquet", {"text": [name]})
    corpus = open_corpus(f"file://{tmp_path}/C#")
    assert [text for batch in corpus.batches() for text in batch.texts] == ["C#"]


@pytest.mark.parametrize(
    "error",
    [
        "When resolving region for bucket 'news': AWS Error NETWORK_CONNECTION",
        "google::cloud::Status(UNAVAILABLE: Retry policy exhausted)",
        "GetProperties failed for 'news'. Azure Error: [] Couldn't resolve host",
    ],
)
def test_an_error_of_a_server_is_one_of_the_system(monkeypatch, error):
    """As while the network is down."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")
    fail = MagicMock(side_effect=OSError(error))
    monkeypatch.setattr("whiten_index.corpus.sources.pafs", MagicMock(wraps=pafs))
    monkeypatch.setattr("whiten_index.corpus.sources.pafs.FileSystem.from_uri", fail)
    with pytest.raises(StorageError, match=r"cannot read s3://news.*; check the address"):
        open_corpus("s3://news/c.parquet")


def test_a_library_in_the_working_folder_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("libhdfs.so").write_bytes(b"code")
    with pytest.raises(CorpusError, match="Arrow would run "):
        open_corpus("hdfs://host/c.parquet")


@pytest.mark.parametrize("address", ["gs://anonymous@bucket/x", "gcs://anonymous@bucket/x"])
def test_a_server_that_does_not_answer_is_given_up(address):
    filesystem, path = resolve(address)
    assert (path, filesystem.type_name) == ("bucket/x", "gcs")
    assert filesystem.__reduce__()[1][0]["retry_time_limit"].total_seconds() == 60


def test_a_folder_that_a_server_refuses_is_not_left_out(tmp_path, write_parquet):
    write_parquet(tmp_path / "a.parquet", {"text": ["a"]})
    fsspec.register_implementation("refusing", _Refusing, clobber=True)
    files = _Refusing()
    names = ("/corpus/a.parquet", "/corpus/b/c.parquet")
    for name in names:
        files.pipe(name, (tmp_path / "a.parquet").read_bytes())
    found = open_corpus("refusing://corpus").files
    assert [file.path for file in found] == list(names)
    files.pipe("/corpus/secret/d.parquet", b"")
    with pytest.raises(StorageError, match=r"cannot read .*403 Forbidden; check the address"):
        open_corpus("refusing://corpus")
