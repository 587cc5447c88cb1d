"""From an index to a database: all rows, the changed ones, or none; also after one was cut off."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.vectordb.push_world import DIM, ROWS, K, World
from whiten_index.errors import ArtifactError, GateError
from whiten_index.versions.retention import prune, rollback


def test_all_rows_are_pushed_and_checked(world: World) -> None:
    report = world.push()
    world.assert_same()
    assert (report.mode, report.pushed, report.rows, report.was) == ("all", ROWS, ROWS, None)
    assert report.check == {
        "rows": ROWS, "compared": 100, "queries": 20, "exact_recall": 1.0, "recall": 1.0
    }  # fmt: skip
    assert world.server.connections == 0
    assert report.to_json()["check"]["compared"] == 100
    # What is there is not pushed again, and the index itself is not read.
    again = world.push()
    assert (again.mode, again.pushed, again.was) == ("nothing", 0, report.version)
    for path in world.root.glob("index/versions/*/index.faiss"):
        path.write_bytes(b"damaged")
    assert world.push(full=True).mode == "all"
    world.assert_same()


def test_changed_documents_alone_are_pushed(world: World) -> None:
    first = world.push()
    rng = np.random.default_rng(1)
    world.rows["d3"] = (rng.standard_normal(DIM).astype("f4"), 3)
    world.rows["d4"] = (world.rows["d4"][0], 999)
    world.rows["new"] = (rng.standard_normal(DIM).astype("f4"), -1)
    del world.rows["d7"]
    world.update()
    report = world.push()
    assert (report.mode, report.pushed, report.deleted) == ("changes", 3, 1)
    assert report.was == first.version != report.version
    world.assert_same()
    assert world.push().mode == "nothing"


def test_two_nights_are_made_up_at_once_and_a_rollback_too(world: World) -> None:
    world.push()
    for name in ("d1", "d2"):
        del world.rows[name]
        world.update()
    gone = world.push()
    assert (gone.mode, gone.deleted) == ("changes", 2)
    world.assert_same()
    rollback(world.root / "index")
    world.rows["d2"] = (np.random.default_rng(0).standard_normal((3, DIM)).astype("f4")[2], 2)
    back = world.push()
    assert (back.mode, back.pushed) == ("changes", 1)
    world.assert_same()


@pytest.mark.parametrize("options", [{"k": 4}, {"dtype": "float16"}, {"metric": "ip"}])
def test_another_form_makes_a_new_table(world: World, options: dict[str, Any]) -> None:
    first = world.push()
    if options != {"metric": "ip"}:
        with pytest.raises(GateError, match=r"would break: .* keeps .*--full$"):
            world.push(**options)
        assert world.table.pushed.version == first.version
        options = {**options, "full": True}
    report = world.push(**options)
    assert (report.mode, report.k) == ("all", options.get("k", K))
    assert ("queries must be reduced again" in "".join(report.notes)) == ("k" in options)
    world.assert_same(**options)
    # It is what is there now.
    assert world.push(**{**options, "full": False}).mode == "nothing"


@pytest.mark.parametrize("name", ["abc", "011"])
def test_ids_that_were_texts_in_between_make_a_new_table(world: World, name: str) -> None:
    """No number is one of them: 011 is another document than 11."""
    numbers: dict[Any, Any] = {11 + at: row for at, row in enumerate(world.rows.values())}
    texts = {str(number): row for number, row in numbers.items()}
    shutil.rmtree(world.root / "index")
    world.rows = numbers
    world.build()
    first = world.push()
    world.rows = {**texts, name: texts["12"]}
    world.update()
    world.rows = numbers
    world.update()
    report = world.push()
    assert (report.mode, report.why) == ("all", f"ids were texts since version {first.version}")
    world.assert_same()


def test_many_changes_make_a_new_table(world: World) -> None:
    first = world.push()
    world.change(*range(30))
    assert world.push().mode == "changes"
    world.change(30)
    # Thirty of them by one update, one by another: nobody has all of them in one list.
    world.server.published = None
    rollback(world.root / "index", to=first.version)
    world.push()
    latest = max(path.name for path in (world.root / "index" / "versions").iterdir())
    rollback(world.root / "index", to=latest)
    report = world.push()
    why = f"more than a tenth of the 300 rows changed since version {first.version}"
    assert (report.mode, report.why) == ("all", why)
    world.assert_same()


def test_a_push_that_was_cut_off_goes_on(world: World) -> None:
    world.cut_off(2)
    assert world.server.published is None
    report = world.push()
    assert (report.resumed, report.pushed) == (128, ROWS - 128)
    assert world.server.connections == 0
    world.assert_same()


def test_what_was_cut_off_is_dropped_where_another_version_is_published(world: World) -> None:
    world.push()
    world.cut_off(2, k=4, full=True)
    del world.rows["d9"]
    world.update()
    assert world.push(k=4, full=True).resumed == 0
    world.assert_same(k=4)
    world.cut_off(1, full=True)
    assert world.push(k=4).mode == "nothing"
    assert world.server.pending is None


def test_a_change_that_was_cut_off_is_ended(world: World) -> None:
    world.server.transactions = False
    first = world.push()
    world.change(0, 1, 2, more=1000)
    world.cut_off(1, batch_rows=1)
    assert world.table.pushed.version == first.version
    assert world.table.pushed.changing
    assert world.push().mode == "changes"
    world.assert_same()
    assert world.push().mode == "nothing"


def test_a_change_that_was_cut_off_is_taken_back_after_a_rollback(world: World) -> None:
    world.server.transactions = False
    before = dict(world.rows)
    first = world.push()
    del world.rows["d9"]
    world.change(0, 1, 2, more=1000)
    world.cut_off(1, batch_rows=1)
    # The second push, back to the first version, is cut off too.
    rollback(world.root / "index", to=first.version)
    world.cut_off(1, batch_rows=1)
    world.rows = before
    report = world.push()
    assert (report.mode, report.version) == ("changes", first.version)
    assert "had begun to change" in report.why
    world.assert_same()
    assert world.push().mode == "nothing"


def test_a_change_that_was_cut_off_whose_version_is_gone(world: World) -> None:
    world.server.transactions = False
    first = world.push()
    world.change(1)
    world.cut_off(0)
    rollback(world.root / "index", to=first.version)
    world.rows["d1"] = (world.rows["d1"][0] - 1, 1)
    prune(world.root / "index", keep=1)
    assert [path.name for path in (world.root / "index" / "versions").iterdir()] == [first.version]
    report = world.push()
    assert (report.mode, report.why[:12]) == ("all", "what changed")
    world.assert_same()


def test_a_flipped_bit_in_the_list_of_changes_leaves_no_row_as_it_was(world: World) -> None:
    world.push()
    world.change(1)
    (path,) = world.root.glob("index/versions/*/changes.arrow")
    whole = path.read_bytes()
    assert whole.count(b"d1") == 1
    # Arrow reads it all the same: another document would be changed, and this one never.
    path.write_bytes(whole.replace(b"d1", b"d0"))
    with pa.ipc.open_file(path.read_bytes()) as file:
        assert file.read_all()["id"].to_pylist() == ["d0"]
    with pytest.raises(ArtifactError, match=r"changes\.arrow is damaged: its content .*--full"):
        world.push()
    path.write_bytes(whole)
    assert world.push().mode == "changes"
    world.assert_same()


@pytest.mark.parametrize("cut_off", [False, True])
def test_rows_that_others_took_away_are_filled_anew(world: World, cut_off: bool) -> None:
    """A change that was cut off, done again, would be refused night after night."""
    world.server.transactions = not cut_off
    world.push()
    if cut_off:
        world.change(0, 1, 2, more=1000)
        world.cut_off(1, batch_rows=1)
    world.table.rows.pop(("d200",))
    report = world.push()
    assert (report.mode, report.rows) == ("all", ROWS)
    assert "counts 299 rows and should have 300" in report.why
    world.assert_same()
    assert world.push().mode == "nothing"


def test_a_description_that_does_not_fit_its_version(world: World) -> None:
    """It would be named with each search, and queries that fit would be refused for good."""
    world.push()
    table = world.table
    table.pushed = replace(table.pushed, query_digest="9" * 32)
    assert world.push().why == "its description does not fit its version"
    assert world.table.pushed.query_digest != "9" * 32
    assert world.push().mode == "nothing"
