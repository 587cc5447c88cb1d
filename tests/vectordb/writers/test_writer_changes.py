"""Changes of a pushed table by every writer: failed, killed, two at once, nightly."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.vectordb import pushed_rows
from tests.vectordb.pushed_rows import CHANGED, DELETING, GONE, Rows, changed_by_child, some_changes
from tests.vectordb.writers.engines import FILES, Backend
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter


def test_changed_rows(writer: DatabaseWriter) -> None:
    old = Rows.make(n=pa.array(range(300)))
    old.fill(writer)
    other = Rows.make(seed=1, n=pa.array(range(1000, 1300)))
    names = [*range(10), *range(500, 510)]
    changed = Rows.of(
        other.vectors[:20], ids=pa.array(names), n=other.table["n"].combine_chunks()[:20]
    )
    kept = pa.Table.from_batches([old.take(range(25, 300))])
    after = replace(Rows(pa.concat_tables([changed.table, kept]), old.layout), version="000002-def")
    for _ in range(2):
        # Twice is once.
        with writer.changing(after.pushed, old.layout) as changing:
            changing.delete([*range(10, 25), 12345])
            changing.upsert(changed.take(range(20)))
            # Seen within.
            assert writer.count() == 295
        after.assert_held(writer)
    after.assert_found(writer)
    after.assert_clean(writer)
    assert writer.pending() is None


@pytest.mark.parametrize("rolled_back", [False, True])
def test_changes_that_fail(writer: DatabaseWriter, backend: Backend, rolled_back: bool) -> None:
    """Metadata say which versions rows may be of, until changes end; these end the same."""
    old, after, put = some_changes()
    old.fill(writer)

    def fail(to: Rows, rows: pa.RecordBatch) -> list[str]:
        def change() -> None:
            with writer.changing(to.pushed, to.layout) as changing:
                changing.upsert(rows)
                raise RuntimeError("on purpose")

        with pytest.raises(RuntimeError, match="on purpose"):
            change()
        found = writer.published()
        assert found.version == old.version
        return found.changing.split()

    expected = [] if backend.transactions else [after.version]
    assert fail(after, put) == expected
    if backend.transactions:
        old.assert_held(writer)
        old.assert_found(writer, exact=False, least=0.9)
    if rolled_back:
        assert set(fail(old, old.take([0]))) >= set(expected)
    end = old if rolled_back else after
    if rolled_back:
        end.change(writer, old.take([*range(5), 7]))
    else:
        end.change(writer, put, gone=[7])
    end.assert_held(writer)
    end.assert_clean(writer)


def test_of_two_changes_one_alone_ends(shared: Backend) -> None:
    old, after, put = some_changes()
    other = replace(after, version="000003-fed")
    with shared.open() as one, shared.open(**shared.impatient) as two:
        old.fill(one)
        assert one.published() == two.published()
        with (  # noqa: PT012 - which of them is refused, and when, depends on the engine
            pytest.raises(DatabaseError),
            one.changing(after.pushed, old.layout) as mine,
        ):
            mine.upsert(put)
            two.published()
            other.change(two, put, gone=[7])
            mine.upsert(Rows.make(seed=5).take([100]))
        found = two.published()
        ended = {each.version: each for each in (old, other)}[found.version]
        ended.assert_held(two)
        ended.assert_clean(two)


def test_what_another_push_replaced_is_not_changed(shared: Backend) -> None:
    old, after, put = some_changes()
    other = replace(Rows.make(200, seed=3), version="000003-fed")
    with shared.open() as one, shared.open() as two:
        old.fill(one)
        assert one.published() is not None
        other.fill(two)
        with pytest.raises(DatabaseError, match="another push"):
            after.change(one, put)
        other.assert_held(two)
        other.assert_clean(two)


@pytest.mark.parametrize(("wanted", "back"), [(9, 0), (DELETING, 1), (CHANGED, 0)])
def test_the_changing_process_is_killed(
    engine: Backend, tmp_path: Path, wanted: int, back: bool
) -> None:
    """Wherever it dies, the rows are of the version that metadata say, or of either."""
    old, rows = Rows.make(2000, seed=8), changed_by_child()
    old.push_to(engine.address)
    pushed_rows.kill_after(wanted, "change", engine.address, tmp_path / "marker")
    with engine.open() as writer:
        found = writer.published()
        if found.changing:
            assert wanted < CHANGED
            assert (found.version, found.changing) == (old.version, rows.version)
        else:
            {each.version: each for each in (old, rows)}[found.version].assert_held(writer)
        rows = old if back else rows
        rows.change(writer, *rows.batches(1000), gone=range(2000, 2100) if back else GONE)
        rows.assert_held(writer)
        rows.assert_clean(writer)


@pytest.mark.parametrize(
    ("embedded", "nights", "options"),
    [
        *((name, 8, {}) for name in FILES),
        # It removes what is old after some nights.
        pytest.param(
            "lancedb", 12, {"keep_days": "0", "index": "ivf_flat"}, marks=pytest.mark.service
        ),
    ],
    indirect=["embedded"],
)
def test_nightly_changes_do_not_grow_it_for_ever(
    embedded: Backend, nights: int, options: dict[str, str]
) -> None:
    rows, sizes, indexes = Rows.make(2000, k=32), list[int](), list[int]()
    for night in range(1 + nights):
        with embedded.open(**options) as writer:
            if night == 0:
                rows.fill(writer, batch=2000)
            else:
                picked = np.random.default_rng(night).choice(2000, 1000, replace=False)
                vectors = rows.vectors.copy()
                vectors[picked] = Rows.make(1000, k=32, seed=night).vectors
                rows = replace(Rows.of(vectors), version=str(night))
                rows.change(writer, rows.take(picked))
            indexes.append(writer.sizes()["index"])
        files = [path for path in embedded.folder.rglob("*") if path.is_file()]
        sizes.append(sum(path.stat().st_size for path in files))
    # If all that was changed were kept, it would be five times as much.
    assert max(sizes) < 4 * sizes[0]
    assert sizes[-1] < 1.1 * max(sizes[:4])
    assert indexes[-1] <= 1.1 * indexes[0]
    with embedded.open() as writer:
        rows.assert_held(writer)
        rows.assert_found(writer)
