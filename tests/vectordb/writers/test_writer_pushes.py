"""Pushes by every writer: the swap, resumed and killed ones, two at once, names and options."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import succeed
from tests.vectordb import pushed_rows
from tests.vectordb.pushed_rows import Rows
from tests.vectordb.writers.engines import Backend
from whiten_index import (
    BuildConfig,
    PushConfig,
    QueryTransform,
    build_index,
    push_index,
    pushed_version,
)
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.pipeline.update import update_index
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.vectordb.database_writer import DatabaseWriter

ODD_NAME = 'a "quoted" 5% %s na\'me; DROP TABLE docs --'


def test_users_see_the_old_rows_and_metadata_until_the_swap(writer: DatabaseWriter) -> None:
    old = Rows.make()
    new = replace(Rows.make(200, seed=1, k=5), transform="t2", query_digest="q2")
    old.fill(writer)
    writer.begin(new.pushed, new.layout)
    for batch in new.batches():
        writer.append(batch)
        old.assert_held(writer)
    writer.resume(new.layout)
    writer.finish()
    old.assert_held(writer)
    old.assert_clean(writer)
    new.assert_held(writer, pending=True)
    pending = writer.pending()
    assert replace(pending, name="", lease="") == replace(new.pushed, done=200)
    for exact in (True, False):
        found = writer.search(new.vectors[:2], 3, exact=exact, pending=True)
        assert np.abs(found[:, 0] - 1).max() < 1e-5
    writer.swap()
    new.assert_held(writer)
    new.assert_found(writer)
    new.assert_clean(writer)
    after = replace(Rows(new.table[:199], new.layout), version="000002-def", query_digest="q3")
    after.change(writer, new.take([3]), gone=[199])
    after.assert_clean(writer)


def test_what_is_discarded_leaves_what_users_see(writer: DatabaseWriter) -> None:
    old, new = Rows.make(), Rows.make(200, seed=1)
    old.fill(writer)
    writer.begin(new.pushed, new.layout)
    writer.append(new.batches()[0])
    writer.discard()
    assert writer.pending() is None
    old.assert_held(writer)
    # What was begun is replaced by what is begun next.
    writer.begin(new.pushed, new.layout)
    writer.append(new.batches()[0])
    new.fill(writer)
    new.assert_held(writer)


def test_an_interrupted_push_is_resumed(backend: Backend) -> None:
    rows = Rows.make()
    first, second, third = rows.batches(100)
    with backend.open() as writer:
        writer.begin(rows.pushed, rows.layout)
        pushed_rows.append(writer, [first, second])
    for done, rest in ((200, [third]), (300, [])):
        with backend.open() as writer:
            assert writer.published() is None
            pending = writer.pending()
            assert replace(pending, name="", lease="") == replace(rows.pushed, done=done)
            writer.resume(rows.layout)
            pushed_rows.append(writer, rest)
            writer.finish()
            if not rest:
                writer.swap()
                rows.assert_held(writer)
                rows.assert_found(writer)


@pytest.mark.parametrize("name", ["docs", ODD_NAME])
def test_tables_of_several_names(engine: Backend, name: str) -> None:
    rows, last = Rows.make(), Rows.make(40, seed=2)
    rows.push_to(engine.address, "other")
    if name == ODD_NAME and not engine.any_name:
        with pytest.raises(ConfigError, match="name"):
            engine.open(name)
        return
    with engine.open(name) as writer:
        Rows.make(50, seed=1).fill(writer)
        last.fill(writer)
        last.assert_held(writer)
        last.assert_found(writer)
        last.change(writer, last.take([0, 1, 2]), gone=last.ids[:3])
        last.assert_held(writer)
    with engine.open("other") as other:
        rows.assert_held(other)


@pytest.mark.parametrize("name", ["", "a" * 300])
def test_names_that_no_engine_takes(engine: Backend, name: str) -> None:
    with pytest.raises(ConfigError), engine.open(name) as writer:
        Rows.make().fill(writer)


def test_options_that_no_engine_knows(engine: Backend) -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        engine.open(no_such_option="1")


@pytest.mark.parametrize("step", ["resume", "begin", "discard", "fill"])
def test_of_two_pushes_one_alone_goes_on(shared: Backend, step: str) -> None:
    """The one before is refused, or if there are locks the one that comes later."""
    old, mine = Rows.make(200, seed=2), replace(Rows.make(), version="000002-def")
    theirs = mine if step == "resume" else replace(Rows.make(seed=1), version="000003-fed")
    first, *rest = mine.batches(100)

    def take_over(writer: DatabaseWriter) -> None:
        if step == "resume":
            writer.resume(theirs.layout)
        elif step == "begin":
            writer.begin(theirs.pushed, theirs.layout)
        elif step == "fill":
            theirs.fill(writer)
        else:
            writer.discard()
            # If there are locks it is left alone.
            if writer.pending() is not None:
                raise DatabaseError("left alone")

    def assert_shut_out(writer: DatabaseWriter) -> None:
        for call in (lambda: writer.append(rest[0]), lambda: writer.finish(),
                     writer.swap):  # fmt: skip
            with pytest.raises(DatabaseError):
                call()

    with shared.open() as one, shared.open(**shared.impatient) as two:
        old.fill(one)
        one.begin(mine.pushed, mine.layout)
        one.append(first)
        try:
            take_over(two)
        except DatabaseError:
            pushed_rows.end(one, rest)
            mine.assert_held(two)
            return
        assert_shut_out(one)
        if step in ("resume", "begin"):
            pushed_rows.append(two, rest if step == "resume" else theirs.batches(100))
            two.finish()
            assert_shut_out(one)
            two.swap()
        now = old if step == "discard" else theirs
        now.assert_held(two)
        now.assert_clean(two)
        # The first one comes again when the other has ended.
        mine.fill(one)
        mine.assert_held(two)


@pytest.mark.parametrize(
    "wanted", [9, pushed_rows.FINISHING, pushed_rows.SWAPPING, pushed_rows.SWAPPED]
)
def test_the_pushing_process_is_killed(engine: Backend, tmp_path: Path, wanted: int) -> None:
    """Wherever it dies, users see all old rows or all new ones, and the next push ends."""
    old, rows = Rows.make(seed=3), pushed_rows.pushed_by_child()
    old.push_to(engine.address)
    pushed_rows.kill_after(wanted, "push", engine.address, tmp_path / "marker")
    with engine.open() as writer:
        found = writer.published()
        assert found.changing == ""
        if found.version == rows.version:
            # It may have gone on for a while before it was hit.
            rows.assert_held(writer)
            writer.discard()
            assert writer.pending() is None
            return
        assert wanted < pushed_rows.SWAPPED
        old.assert_held(writer)
        pending = writer.pending()
        assert min(wanted * 100, 2000) <= pending.done <= 2000
        writer.resume(rows.layout)
        pushed_rows.end(writer, rows.batches(100)[pending.done // 100 :])
        rows.assert_held(writer)
        rows.assert_clean(writer)


def test_nights_of_an_index_and_queries_that_fit(engine: Backend, tmp_path: Path) -> None:
    corpus, index = tmp_path / "c.parquet", tmp_path / "index"
    config = PushConfig(index=str(index), to=engine.address, table="docs")

    def write(raw: np.ndarray) -> None:
        pq.write_table(pa.table({"id": range(len(raw)), "e": list(raw)}), corpus)

    def push(raw: np.ndarray) -> tuple[str, int, int]:
        report = push_index(config)
        with engine.open() as writer:
            Rows.of(QueryTransform.of(index).reduce(raw)).assert_held(writer)
        return report.mode, report.pushed, report.deleted

    def fits() -> bool:
        status = succeed(
            "push", index, "--to", engine.address, "--table", "docs", "--status", "--json"
        )
        return bool(json.loads(status)["fits"])

    raw = np.random.default_rng(0).standard_normal((150, 10)).astype("f4")
    write(raw)
    options = {"embedding_column": "e", "id_column": "id", "k": 4}
    build_index(BuildConfig(corpus=(str(corpus),), out=str(index), **options))
    assert push(raw) == ("all", 150, 0)
    raw = raw[:-1]
    raw[3] += 1
    write(raw)
    update_index(UpdateConfig(index=str(index), refit="never"))
    assert push(raw) == ("changes", 1, 1)
    assert push(raw) == ("nothing", 0, 0)
    before = QueryTransform.of(index)
    before.require(pushed_version(engine.address, "docs"))
    assert fits()
    raw *= np.float32(0.5) ** np.arange(10)
    write(raw)
    update_index(UpdateConfig(index=str(index), refit="always"))
    with pytest.raises(ConfigError, match="their scores mean nothing"):
        QueryTransform.of(index).require(pushed_version(engine.address, "docs"))
    assert not fits()
    assert push(raw) == ("all", 149, 0)
    assert fits()
    with pytest.raises(ConfigError, match="their scores mean nothing"):
        before.require(pushed_version(engine.address, "docs"))
