"""The corpus: what is planned, found, read, skipped and counted, against plain Python."""

from __future__ import annotations

import glob
import hashlib
import math
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from whiten_index.batch import row_digests
from whiten_index.corpus import (
    CorpusConfig,
    OnBadRow,
    ParquetCorpus,
    RowFilter,
    RowGroup,
    plan_shards,
)
from whiten_index.errors import ConfigError, CorpusError

IN_TMP_PATH = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def open_corpus(*sources, **options) -> ParquetCorpus:
    if "embedding_column" not in options:
        options.setdefault("text_columns", ("text",))
    return ParquetCorpus.open(CorpusConfig(sources=tuple(map(str, sources)), **options))


def read_all(corpus: ParquetCorpus) -> tuple[list, list, Counter]:
    """Return ids, texts and skipped counts of a whole corpus of texts."""
    ids, texts, skipped = [], [], Counter()
    for batch in corpus.batches():
        assert batch.read == len(batch) + sum(batch.skipped.values())
        assert batch.documents.num_rows == len(batch)
        ids += batch.documents.column("id").to_pylist()
        texts += batch.texts
        skipped.update(batch.skipped)
    return ids, texts, skipped


def read_vectors(corpus: ParquetCorpus) -> tuple[list, np.ndarray, Counter]:
    """Return ids, embeddings and skipped counts of a whole corpus of embeddings."""
    batches = list(corpus.batches())
    skipped = Counter()
    for batch in batches:
        assert batch.read == len(batch) + sum(batch.skipped.values())
        assert batch.documents.num_rows == len(batch)
        skipped.update(batch.skipped)
    ids = [value for batch in batches for value in batch.documents.column("id").to_pylist()]
    return ids, np.concatenate([batch.embeddings for batch in batches]), skipped


# --------------------------------------------------------------------------- planning

GROUP = st.builds(
    lambda rows, width: RowGroup(rows, rows * width), st.integers(0, 60), st.integers(0, 300)
)
FOOTERS = st.lists(st.lists(GROUP, max_size=6), max_size=5)
PLAN = {"shard_rows": st.integers(1, 50), "shard_bytes": st.integers(1, 5000)}


def rows_of(shards) -> list[tuple[int, int, int]]:
    return [
        (shard.file, span.row_group, row)
        for shard in shards
        for span in shard.spans
        for row in range(span.start, span.stop)
    ]


def every_row(footers) -> list[tuple[int, int, int]]:
    return [
        (file, group, row)
        for file, groups in enumerate(footers)
        for group, of in enumerate(groups)
        for row in range(of.rows)
    ]


@given(footers=FOOTERS, limit=st.none() | st.integers(1, 400), **PLAN)
def test_a_plan_holds_every_row_once_in_order_up_to_the_limit(
    footers, limit, shard_rows, shard_bytes
):
    plan = plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes, limit=limit)
    assert rows_of(plan) == every_row(footers)[:limit]
    again = plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes, limit=limit)
    assert plan == again


@given(footers=FOOTERS, **PLAN)
def test_shards_respect_rows_and_bytes(footers, shard_rows, shard_bytes):
    for shard in plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes):
        assert 1 <= shard.rows <= shard_rows
        groups = footers[shard.file]
        size = sum(
            (span.stop - span.start) * groups[span.row_group].bytes / groups[span.row_group].rows
            for span in shard.spans
        )
        assert shard.rows == 1 or size <= shard_bytes * (1 + 1e-6)


@given(
    rows=st.lists(st.lists(st.integers(0, 10**6), max_size=5), max_size=4),
    shard_rows=st.integers(10_000, 10**7),
)
def test_narrow_rows_fill_their_shards(rows, shard_rows):
    """Small row groups are joined: a file takes no more shards than its rows need."""
    footers = [[RowGroup(count, count) for count in groups] for groups in rows]
    plan = plan_shards(footers, shard_rows=shard_rows, shard_bytes=1 << 50)
    needed = [math.ceil(sum(groups) / shard_rows) for groups in rows]
    assert [sum(shard.file == file for shard in plan) for file in range(len(rows))] == needed


@given(footers=FOOTERS, limit=st.integers(1, 400), **PLAN)
def test_a_limit_keeps_all_shards_but_the_last(footers, limit, shard_rows, shard_bytes):
    whole = plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes)
    some = plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes, limit=limit)
    assert some[:-1] == whole[: len(some[:-1])]


@given(footers=FOOTERS, other=st.lists(GROUP, max_size=6), **PLAN)
def test_a_change_in_one_file_moves_no_shard_of_another(footers, other, shard_rows, shard_bytes):
    size = {"shard_rows": shard_rows, "shard_bytes": shard_bytes}
    before = [shard.spans for shard in plan_shards(footers, **size)]
    after = plan_shards([other, *footers], **size)
    assert [shard.spans for shard in after if shard.file > 0] == before


def test_wide_rows_make_smaller_shards():
    narrow = plan_shards([[RowGroup(1000, 1000)]], shard_rows=500, shard_bytes=10_000)
    wide = plan_shards([[RowGroup(1000, 1_000_000)]], shard_rows=500, shard_bytes=10_000)
    assert [shard.rows for shard in narrow] == [500, 500]
    assert [shard.rows for shard in wide] == [10] * 100


@pytest.mark.parametrize("name", ["text", "meta.text"])
def test_wide_rows_of_a_file_make_smaller_shards(tmp_path, write_parquet, name):
    letter = "x" * (1 << 20)
    texts = [f"{i}{letter}" for i in range(72)]
    path = write_parquet(
        tmp_path / "a.parquet", {name: texts}, use_dictionary=False, write_statistics=False
    )
    corpus = open_corpus(path, text_columns=(name,))
    assert corpus.rows == 72
    assert len(corpus.shards) > 1


@pytest.mark.parametrize("shard_rows", [0, -1])
def test_a_shard_needs_a_row(shard_rows):
    with pytest.raises(ConfigError, match=f"at least 1 row; --shard-rows {shard_rows}"):
        plan_shards([], shard_rows=shard_rows)


def test_a_limit_is_positive():
    with pytest.raises(ConfigError, match="--limit takes a positive number of rows; 0"):
        plan_shards([], limit=0)


# --------------------------------------------------------------------------- finding files


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


def test_a_file_named_outright_is_read_whatever_its_name(tree):
    assert read_all(open_corpus(tree / "_metadata.parquet"))[1] == ["_metadata.parquet"]


def test_a_file_uri_is_read_as_its_path_is(tree):
    assert read_all(open_corpus(tree.as_uri())) == read_all(open_corpus(tree))
    uri = f"{tree.as_uri()}/sub/*.parq"
    assert read_all(open_corpus(uri)) == read_all(open_corpus(tree / "sub" / "*.parq"))


def test_a_relative_path_and_glob_are_read(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert read_all(open_corpus("sub"))[1] == ["sub/c.parq", "sub/deep/d.parquet"]
    assert read_all(open_corpus("b.*"))[1] == ["b.parquet"]


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


@pytest.mark.parametrize("pattern", ["*", "*.p*", "**/*.parquet", "*/*/*.parquet"])
def test_a_wildcard_matches_no_bookkeeping(tree, pattern):
    """As in a folder and in a shell: hidden and underscore names only when spelled out."""
    texts = read_all(open_corpus(tree / pattern))[1]
    assert not [name for name in texts if re.search(r"(^|/)[._]", name)]


def test_a_glob_can_spell_an_underscore_out(tree):
    assert read_all(open_corpus(tree / "_meta*.parquet"))[1] == ["_metadata.parquet"]


def test_a_name_with_brackets_that_exists_is_no_glob(tmp_path, write_parquet):
    path = write_parquet(tmp_path / "part[1].parquet", {"text": ["x"]})
    assert read_all(open_corpus(path))[0] == ["part[1].parquet#0:0"]


@pytest.mark.parametrize("tail", ["", "/a.parquet", "/*.parquet", "/**/a.parquet"])
def test_an_fsspec_uri_is_read(tail):
    memory = fsspec.filesystem("memory")
    try:
        with memory.open("/bucket/data/a.parquet", "wb") as file:
            pq.write_table(pa.table({"text": ["from memory"]}), file)
        with memory.open("/bucket/data/_SUCCESS", "wb"):
            pass
        corpus = open_corpus(f"memory://bucket/data{tail}")
        assert read_all(corpus)[:2] == (["a.parquet#0:0"], ["from memory"])
    finally:
        memory.rm("/bucket", recursive=True)


def test_sources_keep_their_order_and_same_names_stay_distinct(tmp_path, write_parquet):
    for name in ("z", "y"):
        write_parquet(tmp_path / name / "part.parquet", {"text": [name]})
    ids, texts, _ = read_all(open_corpus(tmp_path / "z", tmp_path / "y"))
    assert texts == ["z", "y"]
    assert len(set(ids)) == 2


def test_same_path_on_two_file_systems_is_two_files(tmp_path, write_parquet):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["disk"]})
    memory = fsspec.filesystem("memory")
    try:
        with memory.open(str(path), "wb") as file:
            pq.write_table(pa.table({"text": ["memory"]}), file)
        ids, texts, _ = read_all(open_corpus(path, f"memory://{path}"))
        assert texts == ["disk", "memory"]
        assert len(set(ids)) == 2
    finally:
        memory.rm(str(path))


@pytest.mark.parametrize("again", ["a.parquet", "file://", "*.parquet", "sub/../a.parquet"])
def test_a_file_named_twice_is_refused(tmp_path, write_parquet, again):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    (tmp_path / "sub").mkdir()
    second = path.as_uri() if again == "file://" else f"{tmp_path}/{again}"
    with pytest.raises(CorpusError, match=r"a\.parquet is named twice"):
        open_corpus(path, second)


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


def test_an_unknown_scheme_is_refused():
    with pytest.raises(CorpusError, match=r"nosuch://a/b\.parquet cannot be opened .*fsspec"):
        open_corpus("nosuch://a/b.parquet")


def test_no_source_is_refused():
    with pytest.raises(CorpusError, match="no corpus was given"):
        open_corpus()


# --------------------------------------------------------------------------- columns


def test_a_missing_column_is_refused_with_those_there_are(tmp_path, write_parquet):
    path = write_parquet(tmp_path / "a.parquet", {"title": ["x"], "body": ["y"]})
    for options in ({}, {"text_columns": ("body",), "keep": ("text",)},
                    {"text_columns": ("body",), "id_column": "text"},
                    {"text_columns": ("body",), "row_filter": "text == 'x'"},
                    {"embedding_column": "text"}):  # fmt: skip
        with pytest.raises(
            CorpusError, match=r"a\.parquet has no column 'text'; its columns are title, body"
        ):
            open_corpus(path, **options)


def test_a_column_missing_in_one_file_names_that_file(tmp_path, write_parquet):
    write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    write_parquet(tmp_path / "b.parquet", {"texts": ["x"]})
    with pytest.raises(CorpusError, match=r"b\.parquet has no column 'text'"):
        open_corpus(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_columns": ("n",)}, "'n' .* int64; .*strings; columns that fit: s, t"),
        ({"text_columns": ("s", "v")}, "'v' .*list.*; columns that fit: s, t"),
        ({"text_columns": ("s",), "id_column": "x"}, "'x' .* double; .*fit: s, t, n"),
        ({"embedding_column": "s"}, "'s' .* string; .*columns that fit: v"),
        ({"embedding_column": "w"}, "'w' .*int64.*; .*columns that fit: v"),
    ],
)
def test_a_column_of_the_wrong_type_is_refused_with_those_that_fit(
    tmp_path, write_parquet, options, message
):
    columns = {"s": ["a"], "t": ["b"], "n": [1], "x": [0.5], "v": [[0.5, 1.0]], "w": [[1, 2]]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(CorpusError, match=message):
        open_corpus(path, **options)


def test_nothing_that_fits_is_said(tmp_path, write_parquet):
    path = write_parquet(tmp_path / "a.parquet", {"text": [1]})
    with pytest.raises(CorpusError, match="no column of it fits"):
        open_corpus(path)


def test_a_column_there_twice_is_refused(tmp_path, write_parquet):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    path = write_parquet(tmp_path / "a.parquet", table)
    with pytest.raises(CorpusError, match="more than one column 'text'"):
        open_corpus(path)


@pytest.mark.parametrize("rows", [[], [0, 0]])
def test_an_empty_corpus_is_refused(tmp_path, write_parquet, rows):
    write_parquet(tmp_path / "a.parquet", {"text": pa.array([], pa.string())})
    with pytest.raises(CorpusError, match="holds no rows; point to a corpus that does"):
        open_corpus(tmp_path)


def test_an_empty_file_among_others_changes_nothing(tmp_path, write_parquet):
    write_parquet(tmp_path / "a.parquet", {"text": pa.array([], pa.string())})
    write_parquet(tmp_path / "b.parquet", {"text": ["x"]})
    assert read_all(open_corpus(tmp_path))[:2] == (["b.parquet#0:0"], ["x"])


def test_either_texts_or_embeddings_are_named():
    with pytest.raises(ConfigError, match=r"--text-column \(one or more\), or --embedding-column"):
        CorpusConfig(sources=("a",))
    with pytest.raises(ConfigError, match="not both"):
        CorpusConfig(sources=("a",), text_columns=("t",), embedding_column="v")


def test_a_kept_column_cannot_shadow_the_id(tmp_path, write_parquet):
    with pytest.raises(ConfigError, match="kept column cannot be called 'id'"):
        CorpusConfig(sources=("a",), text_columns=("t",), keep=("id",))
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"], "id": ["i"]})
    (batch,) = open_corpus(path, id_column="id", keep=("id",)).batches()
    assert batch.documents.to_pydict() == {"id": ["i"]}


def overwrite(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = bytes(value ^ 0xA5 for value in data[start:stop])
    path.write_bytes(data)


def chunk_bytes(path: Path, name: str) -> tuple[int, int]:
    """Return where the first column chunk of a flat column lies in its file."""
    group = pq.read_metadata(path).row_group(0)
    chunk = next(
        group.column(i)
        for i in range(group.num_columns)
        if group.column(i).path_in_schema.split(".")[0] == name
    )
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
    start = min(offset for offset in offsets if offset is not None)
    return start, start + chunk.total_compressed_size


def test_only_the_columns_asked_for_are_read(tmp_path, write_parquet):
    """A column of rubbish beside the wanted ones is never touched."""
    columns = {"big": [f"{i}" * 50 for i in range(500)], "text": ["x"] * 500, "k": range(500)}
    path = write_parquet(tmp_path / "a.parquet", columns)
    overwrite(path, *chunk_bytes(path, "big"))
    (batch,) = open_corpus(path, keep=("k",)).batches()
    assert batch.documents.column_names == ["id", "k"]
    assert batch.texts == ["x"] * 500
    with pytest.raises(CorpusError, match=r"a\.parquet is damaged"):
        read_all(open_corpus(path, keep=("big",)))


# --------------------------------------------------------------------------- damage


@pytest.mark.parametrize("kept", [0, 3, 0.5, -1])
def test_a_truncated_file_among_good_ones_is_named(tmp_path, write_parquet, kept):
    for name in ("a", "b", "c"):
        path = write_parquet(tmp_path / f"{name}.parquet", {"text": [name] * 100})
    bad = tmp_path / "b.parquet"
    data = bad.read_bytes()
    bad.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    assert path.name == "c.parquet"
    with pytest.raises(CorpusError, match=r"b\.parquet is not a readable Parquet file .*restore"):
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


def test_a_file_that_vanishes_is_named(tmp_path, write_parquet):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    corpus = open_corpus(path)
    path.unlink()
    with pytest.raises(CorpusError, match=r"a\.parquet"):
        read_all(corpus)


# --------------------------------------------------------------------------- texts

BLANKS = st.sampled_from([None, "", " ", "\t\n", "\u00a0", "\u3000 "])
PART = BLANKS | st.text("ab é中\n ", max_size=6)


def joined(*parts: str | None) -> str:
    return " ".join(part.strip() for part in parts if part is not None and part.strip())


@IN_TMP_PATH
@given(
    rows=st.lists(st.tuples(PART, PART), min_size=1, max_size=40),
    group=st.integers(1, 12),
    shard_rows=st.integers(1, 15),
    on_bad_row=st.sampled_from([OnBadRow.BLANK, OnBadRow.SKIP]),
)
def test_texts_are_joined_and_blank_rows_counted(
    tmp_path, write_parquet, rows, group, shard_rows, on_bad_row
):
    first, second = (pa.array(column, pa.string()) for column in zip(*rows, strict=True))
    path = write_parquet(tmp_path / "a.parquet", {"a": first, "b": second}, row_group_size=group)
    corpus = open_corpus(
        path, text_columns=("a", "b"), shard_rows=shard_rows, on_bad_row=on_bad_row
    )
    ids, texts, skipped = read_all(corpus)
    wanted = {
        f"a.parquet#{i // group}:{i % group}": text
        for i, row in enumerate(rows)
        if (text := joined(*row))
    }
    assert dict(zip(ids, texts, strict=True)) == wanted
    assert ids == list(wanted)
    blank = len(rows) - len(wanted)
    assert skipped == ({"blank_text": blank} if blank else {})


@pytest.mark.parametrize("group", [None, 7, 1])
def test_row_groups_do_not_change_what_is_read(tmp_path, write_parquet, group):
    texts = [f"text {i}" for i in range(100)]
    path = write_parquet(tmp_path / "a.parquet", {"text": texts, "k": texts}, row_group_size=group)
    for shard_rows in (1, 3, 10, 1000):
        corpus = open_corpus(path, shard_rows=shard_rows, id_column="k")
        assert read_all(corpus) == (texts, texts, Counter())


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_string_type_gives_the_same_texts(tmp_path, write_parquet, kind):
    values = [" one", None, "two ", "", "one"]
    column = pa.array(values, pa.string()).cast(kind)
    path = write_parquet(tmp_path / "a.parquet", {"text": column})
    _, texts, skipped = read_all(open_corpus(path))
    assert texts == ["one", "two", "one"]
    assert skipped == {"blank_text": 2}


def test_a_blank_row_is_an_error_that_names_it_where_asked(tmp_path, write_parquet):
    texts = ["x"] * 5 + [" "] + ["x"] * 2
    path = write_parquet(tmp_path / "a.parquet", {"text": texts}, row_group_size=4)
    corpus = open_corpus(path, on_bad_row=OnBadRow.ERROR)
    with pytest.raises(CorpusError, match=r"row a\.parquet#1:1 .*no text in text; .*skip"):
        read_all(corpus)


def test_an_error_names_the_row_of_the_file_behind_a_filter(tmp_path, write_parquet):
    columns = {"text": ["x", "x", "x", None, "x", None], "n": [0, 1, 0, 0, 1, 1]}
    path = write_parquet(tmp_path / "a.parquet", columns, row_group_size=4)
    corpus = open_corpus(path, on_bad_row=OnBadRow.ERROR, row_filter="n == 1")
    with pytest.raises(CorpusError, match=r"row a\.parquet#1:1 "):
        read_all(corpus)


@pytest.mark.parametrize("row_filter", [None, "n < 0"])
def test_a_shard_that_loses_every_row_is_an_empty_batch(tmp_path, write_parquet, row_filter):
    columns = {"text": [None, "", " "], "n": [1, 2, 3], "k": ["a", "b", "c"]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    corpus = open_corpus(path, id_column="k", keep=("n",), row_filter=row_filter)
    corpus.check_ids()
    (batch,) = corpus.batches()
    assert (len(batch), batch.read, sum(batch.skipped.values())) == (0, 3, 3)
    assert batch.documents.schema == pa.schema({"id": pa.string(), "n": pa.int64()})
    assert batch.digests().shape == (0, 16)


def test_a_limit_reads_the_first_rows(tmp_path, write_parquet):
    for name in ("a", "b"):
        texts = [f"{name}{i}" for i in range(10)]
        write_parquet(tmp_path / f"{name}.parquet", {"text": texts}, row_group_size=3)
    whole = read_all(open_corpus(tmp_path, shard_rows=4))[1]
    for limit in (1, 4, 7, 10, 13, 20, 99):
        corpus = open_corpus(tmp_path, shard_rows=4, limit=limit)
        assert corpus.rows == min(limit, 20)
        assert read_all(corpus)[1] == whole[:limit]


def test_kept_columns_stay_beside_their_rows(tmp_path, write_parquet):
    columns = {
        "text": ["a", None, "c", "d"],
        "year": pa.array([1, 2, None, 4], pa.int16()),
        "tags": [["x"], [], None, ["y", "z"]],
    }
    path = write_parquet(tmp_path / "a.parquet", columns)
    (batch,) = open_corpus(path, keep=("tags", "year", "text")).batches()
    expected = pa.table(columns).select(["tags", "year", "text"]).take([0, 2, 3])
    assert batch.documents.drop_columns(["id"]).to_pydict() == expected.to_pydict()
    assert batch.documents.schema.field("year").type == pa.int16()


def test_digests_are_blake2b_of_the_bytes(tmp_path, write_parquet):
    columns = {"text": ["a", "é", "a"], "v": [[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]}
    path = write_parquet(tmp_path / "a.parquet", columns)

    def truth(rows):
        return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]

    (texts,) = open_corpus(path).batches()
    (vectors,) = open_corpus(path, embedding_column="v").batches()
    found = [row.tobytes() for row in texts.digests()]
    assert found == truth([b"a", "é".encode(), b"a"])
    found = [row.tobytes() for row in vectors.digests()]
    assert found == truth([np.array(row).tobytes() for row in columns["v"]])
    assert row_digests([]).shape == (0, 16)


# --------------------------------------------------------------------------- ids

WORDS = ["10", "20", "30"]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(WORDS), WORDS),
        (pa.array(WORDS, pa.large_string()), WORDS),
        (pa.array(WORDS).dictionary_encode(), WORDS),
        (pa.array([10, 20, 30], pa.int8()), [10, 20, 30]),
        (pa.array([10, -20, 2**62]), [10, -20, 2**62]),
        (pa.array([1, 2, 3], pa.uint64()), [1, 2, 3]),
    ],
)
def test_ids_of_every_type_come_through(tmp_path, write_parquet, column, expected):
    path = write_parquet(tmp_path / "a.parquet", {"text": WORDS, "k": column})
    corpus = open_corpus(path, id_column="k")
    corpus.check_ids()
    assert read_all(corpus)[0] == expected


def test_an_id_too_large_is_refused(tmp_path, write_parquet):
    column = pa.array([1, 2**63], pa.uint64())
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", "b"], "k": column})
    with pytest.raises(CorpusError, match=r"an id does not fit .*below 2\*\*63"):
        read_all(open_corpus(path, id_column="k"))


@pytest.mark.parametrize("integer", [False, True])
def test_ids_there_twice_are_named(tmp_path, write_parquet, integer):
    def ids(values):
        return values if integer else [f"doc-{value}" for value in values]

    write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 4, "k": ids([1, 2, 3, 777])})
    write_parquet(tmp_path / "b.parquet", {"text": ["x"] * 3, "k": ids([5, 777, 6])})
    shown = "777" if integer else "'doc-777'"
    with pytest.raises(CorpusError, match=rf"1 ids of column k .*\(such as {shown}\).*unique"):
        open_corpus(tmp_path, id_column="k", shard_rows=2).check_ids()
    open_corpus(tmp_path, id_column="k", limit=5).check_ids()


@IN_TMP_PATH
@given(ids=st.lists(st.integers(0, 12) | st.none(), min_size=1, max_size=20))
def test_check_ids_agrees_with_counting(tmp_path, write_parquet, ids):
    path = write_parquet(
        tmp_path / "a.parquet",
        {"text": ["x"] * len(ids), "k": pa.array(ids, pa.int64())},
        row_group_size=6,
    )
    corpus = open_corpus(path, id_column="k", shard_rows=4, on_bad_row=OnBadRow.SKIP)
    repeated = sum(n > 1 for value, n in Counter(ids).items() if value is not None)
    if repeated:
        with pytest.raises(CorpusError, match=f"^{repeated} ids of column k occur more than once"):
            corpus.check_ids()
    else:
        corpus.check_ids()


def test_repeated_ids_that_the_filter_leaves_out_do_no_harm(tmp_path, write_parquet):
    columns = {"text": ["x"] * 3, "k": ["a", "a", "b"], "latest": [False, True, True]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    corpus = open_corpus(path, id_column="k", row_filter="latest")
    corpus.check_ids()
    assert read_all(corpus)[0] == ["a", "b"]


def test_null_ids_stop_or_are_skipped_and_counted(tmp_path, write_parquet):
    columns = {"text": ["x", "y", "", "z"], "k": ["a", None, None, "b"]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    for choice in (OnBadRow.BLANK, OnBadRow.ERROR):
        with pytest.raises(CorpusError, match=r"row a\.parquet#0:1 of the corpus has no k; "):
            read_all(open_corpus(path, id_column="k", on_bad_row=choice))
    ids, texts, skipped = read_all(open_corpus(path, id_column="k", on_bad_row=OnBadRow.SKIP))
    assert (ids, texts, skipped) == (["a", "b"], ["x", "z"], {"null_id": 2})


# --------------------------------------------------------------------------- row filters

FILTERED = {
    "lang": ["en", "de", "fr", "en", "it", "de"],
    "year": [2018, 2019, 2020, 2021, 2022, 2020],
    "score": [0.5, -1.0, 2.5, 0.0, 1.5, 3.0],
    "ok": [True, False, True, True, False, False],
}


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize(
    "condition",
    [
        "lang == 'en'", "lang != 'en'", "'en' == lang", "year > 2019", "2020 <= year",
        "2018 < year <= 2021", "2018 < year != 2020 < 2021", "score >= -1.0", "score < -0.5",
        "lang in ['en', 'de']", "lang in ('en', 'de')", "lang in {'en', 'de'}",
        "lang not in ['en']", "year in [2020, 1]", "lang in []", "lang not in []",
        "ok", "not ok", "ok and year > 2019", "ok or year > 2021 or lang == 'de'",
        "not (ok and lang == 'en')", "not ok and not lang == 'it'",
        "lang == 'en' or lang == 'de' and year >= 2020",
        "(lang == 'en' or lang == 'de') and year >= 2020",
        "lang is None", "lang is not None", "score < year", "lang > 'en'",
        "  lang == 'en'  ",
    ],
)  # fmt: skip
def test_a_row_filter_keeps_what_python_would_keep(tmp_path, write_parquet, condition, encoded):
    table = pa.table({**FILTERED, "text": [str(i) for i in range(6)]})
    if encoded:
        table = table.set_column(0, "lang", table.column("lang").dictionary_encode())
    path = write_parquet(tmp_path / "a.parquet", table, row_group_size=4)
    rows = zip(*FILTERED.values(), strict=True)
    wanted = [
        str(i)
        for i, row in enumerate(rows)
        if eval(condition.strip(), {}, dict(zip(FILTERED, row, strict=True)))
    ]
    _, texts, skipped = read_all(open_corpus(path, row_filter=condition))
    assert texts == wanted
    assert skipped["filtered"] == 6 - len(wanted)


COMPARISON = st.builds(
    "{} {} {}".format, st.sampled_from("ab"), st.sampled_from(["==", "!=", "<", ">="]),
    st.integers(-1, 3),
)  # fmt: skip
CONDITION = st.recursive(
    COMPARISON
    | st.builds("{} <= {} < {}".format, st.integers(-1, 3), st.sampled_from("ab"), st.just("b"))
    | st.builds("{} in {}".format, st.sampled_from("ab"), st.lists(st.integers(-1, 3))),
    lambda inner: (
        st.builds("({}) and ({})".format, inner, inner)
        | st.builds("({}) or ({}) and {}".format, inner, inner, COMPARISON)
        | st.builds("not ({})".format, inner)
    ),
    max_leaves=6,
)


@IN_TMP_PATH
@given(condition=CONDITION)
def test_nested_conditions_keep_what_python_would_keep(tmp_path, write_parquet, condition):
    rows = [(a, b) for a in range(-1, 4) for b in range(-1, 4)]
    path = tmp_path / "a.parquet"
    if not path.exists():
        a, b = zip(*rows, strict=True)
        write_parquet(path, {"text": [str(row) for row in rows], "a": a, "b": b})
    wanted = [str((a, b)) for a, b in rows if eval(condition, {}, {"a": a, "b": b})]
    assert read_all(open_corpus(path, row_filter=condition))[1] == wanted


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("a is None", "1"), ("a is not None", "02"), ("a == 1", "0"), ("not a == 1", "2"),
        ("a != 1", "2"), ("a > 0 or b == 'y'", "012"), ("a is None and b == 'y'", "1"),
        ("a in [1, 3]", "0"),
    ],
)  # fmt: skip
def test_a_null_satisfies_no_comparison(tmp_path, write_parquet, condition, wanted):
    columns = {"text": ["0", "1", "2"], "a": [1, None, 2], "b": ["x", "y", "y"]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    assert "".join(read_all(open_corpus(path, row_filter=condition))[1]) == wanted


def test_not_in_and_unequal_agree_about_nulls(tmp_path, write_parquet):
    """``x not in ['a']`` and ``x != 'a'`` are one condition written twice."""
    path = write_parquet(tmp_path / "a.parquet", {"text": ["0", "1", "2"], "x": ["a", None, "b"]})
    unequal = read_all(open_corpus(path, row_filter="x != 'a'"))
    assert read_all(open_corpus(path, row_filter="x not in ['a']")) == unequal


@pytest.mark.parametrize("condition", ["x == None", "x != None"])
def test_a_comparison_with_none_does_not_silently_drop_everything(
    tmp_path, write_parquet, condition
):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["0", "1"], "x": ["a", None]})
    with pytest.raises(ConfigError, match="is None"):
        open_corpus(path, row_filter=condition)


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os')", "__import__('os').system('true')", "lang == __import__('os')",
        "lang in __import__('os')", "open('/etc/passwd')", "(lambda: True)()", "lang.upper() == 1",
        "[x for x in (1, 2)]", "lang[0] == 'e'", "f'{lang}' == 'en'", "lang == 'en' & ok",
        "lang = 'en'", "lang := 'en'", "lang == 'en';", "import os", "lang ==", "'en'", "1", "True",
        "year + 1 == 2", "lang is 'en'", "lang in 'english'", "lang in 5", "lang in ok",
        "ok if ok else ok", "lang == 'en' and", "lang == ['en']x", "\0", "(" * 300, "*",
    ],
)  # fmt: skip
def test_a_row_filter_is_never_code(code):
    with pytest.raises(ConfigError, match=r"row filter .* is not understood"):
        RowFilter.parse(code)


@pytest.mark.parametrize("text", ["not " * 20_000 + "ok", "(" * 150 + "ok" + ")" * 150, "-" * 9999])
def test_an_absurdly_deep_row_filter_is_refused_or_understood(text):
    try:
        assert RowFilter.parse(text).columns == ("ok",)
    except ConfigError as error:
        assert "is not understood" in str(error)  # noqa: PT017 (either outcome is right)


def test_a_row_filter_names_its_columns():
    assert RowFilter.parse("b == 1 and (a in ['c'] or not b > 2)").columns == ("a", "b")


@pytest.mark.parametrize(
    "condition", ["year == 'x'", "lang > 3", "lang", "not lang", "lang in [1]"]
)
def test_a_row_filter_of_another_type_is_refused(tmp_path, write_parquet, condition):
    path = write_parquet(tmp_path / "a.parquet", {"text": list("abcdef"), **FILTERED})
    corpus = open_corpus(path, row_filter=condition, id_column="text")
    message = r"row filter .* does not fit the columns"
    with pytest.raises(CorpusError, match=message):
        read_all(corpus)
    with pytest.raises(CorpusError, match=message):
        corpus.check_ids()


def test_a_row_filter_keeps_the_order_of_many_rows(tmp_path, write_parquet):
    n = 60_000
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"] * n, "n": range(n)})
    corpus = open_corpus(path, id_column="n", row_filter="n != 7 and n != 40000", shard_rows=n)
    for _ in range(3):
        ids = read_all(corpus)[0]
        assert len(ids) == n - 2
        assert all(a < b for a, b in pairwise(ids))


# --------------------------------------------------------------------------- embeddings

FLOATS = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}
LISTS = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "fixed_size_list": lambda kind: pa.list_(kind, 3),
}


def embedding_column(rows: list, kind: pa.DataType) -> pa.Array:
    """Build a list column; float16 items go by numpy, which pyarrow insists on."""
    scalar = np.dtype(kind.value_type.to_pandas_dtype()).type
    items = [
        None if row is None else [None if x is None else scalar(x) for x in row] for row in rows
    ]
    return pa.array(items, kind)


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("lists", LISTS)
def test_embeddings_of_every_type_come_through_exactly(tmp_path, write_parquet, lists, floats):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(50, 3)).astype(floats)
    kind = LISTS[lists](FLOATS[floats])
    path = write_parquet(
        tmp_path / "a.parquet", {"v": embedding_column(list(matrix), kind)}, row_group_size=20
    )
    corpus = open_corpus(path, embedding_column="v", shard_rows=15)
    _, found, skipped = read_vectors(corpus)
    assert corpus.dim == 3
    assert found.dtype == matrix.dtype
    np.testing.assert_array_equal(found, matrix)
    assert not skipped


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("lists", LISTS)
def test_bad_embeddings_are_skipped_and_counted(tmp_path, write_parquet, lists, floats):
    good = [1.0, 2.0, 3.0]
    rows = [None, good, [math.nan, 0.0, 0.0], [0.0, math.inf, 0.0], None, [0.0, None, 1.0], good]
    wanted = Counter(null_embedding=2, not_finite=3)
    if lists != "fixed_size_list":
        rows += [[1.0, 2.0], [], [1.0, 2.0, 3.0, 4.0]]
        wanted += Counter(wrong_width=2, null_embedding=1)
    column = embedding_column(rows, LISTS[lists](FLOATS[floats]))
    path = write_parquet(tmp_path / "a.parquet", {"v": column, "n": range(len(rows))})
    for shard_rows in (1, 3, 100):
        corpus = open_corpus(
            path, embedding_column="v", id_column="n", shard_rows=shard_rows,
            on_bad_row=OnBadRow.SKIP,
        )  # fmt: skip
        ids, found, skipped = read_vectors(corpus)
        assert ids == [1, 6]
        np.testing.assert_array_equal(found, [good, good])
        assert skipped == wanted


@pytest.mark.parametrize(
    ("bad", "choice", "message"),
    [
        ([1.0, math.nan], OnBadRow.BLANK, "has a NaN or an infinity in v"),
        ([1.0, None], OnBadRow.BLANK, "has a NaN or an infinity in v"),
        ([1.0], OnBadRow.BLANK, "has a v whose width is not 2"),
        (None, OnBadRow.ERROR, "has no v"),
        ([], OnBadRow.ERROR, "has no v"),
    ],
)
def test_a_bad_embedding_is_an_error_that_names_the_row(
    tmp_path, write_parquet, bad, choice, message
):
    path = write_parquet(
        tmp_path / "a.parquet", {"v": [[1.0, 2.0]] * 4 + [bad, None]}, row_group_size=3
    )
    with pytest.raises(CorpusError, match=rf"row a\.parquet#1:1 of the corpus {message}.*; mend"):
        read_vectors(open_corpus(path, embedding_column="v", on_bad_row=choice))


def test_another_width_in_another_file_is_refused(tmp_path, write_parquet):
    for name, width in (("a", 2), ("b", 3)):
        column = embedding_column([[1.0] * width], pa.list_(pa.float32(), width))
        write_parquet(tmp_path / f"{name}.parquet", {"v": column})
    with pytest.raises(CorpusError, match=r"b\.parquet#0:0 .*width is not 2"):
        read_vectors(open_corpus(tmp_path, embedding_column="v"))


def test_the_width_is_that_of_the_rows_the_filter_keeps(tmp_path, write_parquet):
    columns = {"v": [[1.0, 2.0], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "by": ["old", "new", "new"]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    corpus = open_corpus(path, embedding_column="v", row_filter="by == 'new'")
    assert corpus.dim == 3
    np.testing.assert_array_equal(read_vectors(corpus)[1], columns["v"][1:])


def test_a_column_of_nulls_is_refused(tmp_path, write_parquet):
    column = pa.array([None, None], pa.list_(pa.float32()))
    path = write_parquet(tmp_path / "a.parquet", {"v": column})
    with pytest.raises(CorpusError, match="every value of v is null"):
        open_corpus(path, embedding_column="v")


VECTOR = st.none() | st.lists(
    st.sampled_from([0.0, 1.5, -2.0, math.nan, math.inf, None]), max_size=3
)


@IN_TMP_PATH
@given(rows=st.lists(VECTOR, max_size=25), group=st.integers(1, 9), shard_rows=st.integers(1, 9))
@example(rows=[[], None, [math.nan] * 2], group=1, shard_rows=1)
def test_counts_of_embeddings_add_up(tmp_path, write_parquet, rows, group, shard_rows):
    rows = [[0.0, 1.0], *rows]
    column = embedding_column(rows, pa.list_(pa.float32()))
    path = write_parquet(tmp_path / "a.parquet", {"v": column}, row_group_size=group)
    ids, found, skipped = read_vectors(
        open_corpus(path, embedding_column="v", shard_rows=shard_rows, on_bad_row=OnBadRow.SKIP)
    )

    def reason(row):
        if not row:
            return "null_embedding"
        if len(row) != 2:
            return "wrong_width"
        fine = all(value is not None and math.isfinite(value) for value in row)
        return "kept" if fine else "not_finite"

    reasons = list(map(reason, rows))
    kept = [i for i, why in enumerate(reasons) if why == "kept"]
    assert ids == [f"a.parquet#{i // group}:{i % group}" for i in kept]
    np.testing.assert_array_equal(found, [rows[i] for i in kept])
    assert skipped == Counter(why for why in reasons if why != "kept")


# --------------------------------------------------------------------------- memory


def test_one_huge_row_group_is_read_in_bounded_memory(tmp_path, write_parquet):
    """80 MB of text in a single row group; the last shard, behind all the others, is read."""
    n, width = 400_000, 200
    block = np.random.default_rng(0).integers(97, 123, size=(n, width), dtype=np.uint8)
    offsets = np.arange(n + 1, dtype=np.int32) * width
    column = pa.StringArray.from_buffers(n, pa.py_buffer(offsets), pa.py_buffer(block))
    path = write_parquet(
        tmp_path / "a.parquet", {"text": column}, row_group_size=n, use_dictionary=False,
        compression="lz4",
    )  # fmt: skip
    code = f"""
import pyarrow as pa, pyarrow.parquet as pq
from whiten_index.corpus import CorpusConfig, ParquetCorpus
corpus = ParquetCorpus.open(CorpusConfig(sources=({str(path)!r},), text_columns=("text",)))
print(len(corpus.shards), corpus.read(corpus.shards[-1]).texts[-1])
print(pa.default_memory_pool().max_memory())
pq.read_table({str(path)!r})
print(pa.default_memory_pool().max_memory())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shards, last, peak, whole = run.stdout.split()
    assert int(shards) > 10
    assert last == block[-1].tobytes().decode()
    assert int(whole) > n * width  # so the measure sees what reading costs
    assert int(peak) < n * width / 4
