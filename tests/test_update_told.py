"""What an update tells whoever reads it: of ids, of refusals, of rows, and of what was mended."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import faiss
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bad_input_helpers import assert_one_error, run
from tests.update_helpers import Place, some_rows, version_of
from whiten_index.cli import terminal
from whiten_index.store import EmbeddingStore

GATE = 9


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    faiss.omp_set_num_threads(1)


@pytest.fixture
def unnamed(tmp_path: Path) -> Place:
    """A corpus without an id column, and its index."""
    place = Place.new(tmp_path, rows=200, id_column=None, keep=())
    place.build()
    return place


def changes_of(out: Path) -> dict[str, int]:
    """Return kind -> how many ids the file names."""
    with pa.ipc.open_file(version_of(out) / "changes.arrow") as file:
        kinds = file.read_all()["kind"].to_pylist()
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def put(place: Place, name: str, rows: dict[Any, Any]) -> None:
    place.files = {**place.files, name: rows}
    place.write()


def edited(place: Place) -> None:
    rows = dict(place.files["a.parquet"])
    put(place, "a.parquet", {**rows, 50: some_rows([50], seed=7)[50]})


def put_first(place: Place) -> None:
    put(place, "a.parquet", {**some_rows([900]), **place.files["a.parquet"]})


def one_more(place: Place) -> None:
    put(place, "a.parquet", {**place.files["a.parquet"], **some_rows([900])})


@pytest.mark.parametrize(
    ("change", "content", "ids"),
    [
        (edited, "1 new, 0 changed", {"changed": 1}),
        (put_first, "1 new, 0 changed", {"changed": 100, "new": 1}),
    ],
)
def test_ids_that_are_rows_of_files_are_counted_beside_the_content(
    unnamed: Place, change: Any, content: str, ids: dict[str, int]
) -> None:
    change(unnamed)
    shown = (
        f"without an id column ids are file and row, so that changes.arrow names "
        f"{sum(ids.values())} ids ({ids.get('new', 0)} new, {ids['changed']} changed, "
        "0 with other kept columns, 0 deleted)"
    )
    status, stdout, _ = run("update", "--index", unnamed.out, "--dry-run")
    assert (status, stdout.count(shown)) == (0, 1), stdout
    plan = json.loads(run("update", "--index", unnamed.out, "--dry-run", "--json")[1])
    status, stdout, _ = run("update", "--index", unnamed.out)
    assert (status, stdout.count(shown)) == (0, 1), stdout
    assert f"  {content}, " in stdout
    # The truth is the file.
    assert changes_of(unnamed.out) == ids
    manifest = json.loads((version_of(unnamed.out) / "manifest.json").read_text())
    found = manifest["update"]["ids"]
    assert found == plan["ids"]
    assert (found["named"], found["why"]) == (sum(ids.values()), shown.partition(",")[0])
    kinds = dict.fromkeys(("new", "changed", "document", "deleted"), 0)
    assert {kind: found[kind] for kind in kinds} == kinds | ids
    assert shown in run("inspect", unnamed.out)[1]


def test_what_upkeep_counts_has_one_name_and_its_number(unnamed: Place) -> None:
    place, store = unnamed, unnamed.out / "store"
    status, stdout, _ = run("verify", place.out)
    assert status == 0
    assert f"index {place.out}: sound (1 CURRENT, 1 version; " in stdout
    # 200 rows in shards of 40, so three and three.
    counted = "1 manifest, 1 corpus, 1 registered index, 6 shards, 6 files of ids and columns"
    assert f"store {store}: sound ({counted}; " in stdout
    reports = json.loads(run("verify", store, "--json")[1])["reports"]
    assert reports[0]["checked"]["row_files"] == 6
    assert "rows" not in reports[0]["checked"]
    edited(place)
    assert run("update", "--index", place.out)[0] == 0
    assert "1 version removed, " in run("prune", place.out, "--keep", 1)[1]
    stdout = run("compact", store)[1]
    assert " joined in 1 pack, " in stdout
    assert ", 1 pack, " in run("verify", store)[1]


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_lines_tell_of_ids_too(unnamed: Place, form: str) -> None:
    put_first(unnamed)
    _, stdout, _ = run("update", "--index", unnamed.out, "--log", form)
    *_, note, last = stdout.splitlines()
    assert "event=note" in note or json.loads(note)["event"] == "note"
    assert "changes.arrow names 101 ids (1 new, 100 changed" in note
    assert ("ids.named=101 " in last) if form == "text" else json.loads(last)["ids"]["new"] == 1


def test_nothing_is_said_of_ids_that_are_the_rows_counted(unnamed: Place, tmp_path: Path) -> None:
    one_more(unnamed)
    status, stdout, _ = run("update", "--index", unnamed.out, "--json")
    assert (status, json.loads(stdout)["ids"]) == (0, None)
    named = Place.new(tmp_path / "named", rows=200)
    named.build()
    put_first(named)
    status, stdout, _ = run("update", "--index", named.out)
    assert status == 0
    assert "changes.arrow" not in stdout


def test_ids_of_another_type_than_before_are_told(tmp_path: Path) -> None:
    place = Place.new(tmp_path, rows=200)
    place.build()
    for name in place.files:
        path = place.corpus / name
        table = pq.read_table(path)
        pq.write_table(table.set_column(0, "id", table["id"].cast(pa.string())), path)
    for options in (("--dry-run",), (), ()):
        status, stdout, stderr = run("update", "--index", place.out, *options)
        assert status == 0
        assert "0 new, 0 changed, 0 with other kept columns, 0 deleted, 200 as they were" in stdout
        if options or "published" in stdout:
            assert "note: the ids are string and were int64: they are compared by their" in stderr
    # Once they are strings, there is nothing to say.
    assert stderr == ""


# What is refused


def test_what_a_gate_would_keep_back_ends_a_dry_run_as_it_ends_the_update(unnamed: Place) -> None:
    put(unnamed, "b.parquet", some_rows([1]))
    said = "101 rows after 200 would be kept back by a gate"
    status, stdout, stderr = run("update", "--index", unnamed.out, "--dry-run", "--json")
    assert status == GATE
    assert json.loads(stdout)["refused"].startswith(said)
    assert_one_error(stderr, match=f"nothing would be published: {said}")
    status, stdout, stderr = run("update", "--index", unnamed.out, "--dry-run")
    assert status == GATE
    assert "plan (nothing was written)" in stdout
    assert_one_error(stderr, match=said)
    status, stdout, _ = run("update", "--index", unnamed.out, "--dry-run", "--log", "json")
    last = json.loads(stdout.splitlines()[-1])
    assert (status, last["event"], last["refused"][: len(said)]) == (GATE, "planned", said)
    status, stdout, stderr = run("update", "--index", unnamed.out, "--json")
    found = json.loads(stdout)
    assert (status, found.keys()) == (GATE, {"refused", "candidate", "gates"})
    assert_one_error(stderr, match="gate size")
    assert "gate size" in found["refused"]
    for options in ((), ("--dry-run",)):
        allowed = run("update", "--index", unnamed.out, "--max-shrink", 0.9, *options)
        assert (allowed[0], allowed[2]) == (0, "")


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
def test_a_corpus_that_was_rolled_back_is_refused_in_one_object(
    unnamed: Place, options: tuple[str, ...]
) -> None:
    one_more(unnamed)
    assert run("update", "--index", unnamed.out)[0] == 0
    assert run("rollback", unnamed.out)[0] == 0
    status, stdout, stderr = run("update", "--index", unnamed.out, "--json", *options)
    assert status == GATE
    assert json.loads(stdout).keys() == {"refused"}
    assert json.loads(stdout)["refused"] in stderr
    assert_one_error(stderr, match="was rolled back")


def test_the_help_tells_of_refusals() -> None:
    assert "--dry-run ends with 9" in " ".join(run("update", "--help")[1].split())


# Rows


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
def test_ids_there_twice_are_told_with_their_files_and_what_an_update_can_do(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    place = Place.new(tmp_path, rows=200)
    place.build()
    put(place, "b.parquet", {**place.files["b.parquet"], 7: some_rows([7])[7]})
    status, _, stderr = run("update", "--index", place.out, *options)
    assert status == 3
    assert_one_error(
        stderr, match=r"\(such as 7\), in a\.parquet, b\.parquet; make them unique, or"
    )
    assert "--id-column" not in stderr


def test_what_was_mended_is_told_though_nothing_is_published(unnamed: Place) -> None:
    shard = sorted((unnamed.out / "store").glob("*/shards/*/embeddings.safetensors"))[0]
    stored_in = EmbeddingStore.open(unnamed.out / "store")
    stored = stored_in.require(shard.parent.name)
    shard.write_bytes(shard.read_bytes()[:-20])
    rows = stored.rows
    stdout = run("update", "--index", unnamed.out, "--dry-run")[1]
    assert f"up to date, {rows} rows that the store has lost to encode" in stdout
    assert re.search(r"all else, as it took before +\S+ s", stdout)
    assert "transform" not in stdout
    plan = json.loads(run("update", "--index", unnamed.out, "--dry-run", "--json")[1])
    index, store = plan["bytes"].values()
    assert (index, plan["to_encode"]) == (0, rows)
    assert stored.bytes < store < 4 * stored.bytes
    assert re.search(rf"bytes in {stored_in.folder} +\d", stdout)
    stdout = run("update", "--index", unnamed.out)[1]
    said = f"is up to date, {rows} rows that the store had lost encoded anew and 1 damaged shard"
    assert said in stdout
    assert "is up to date, nothing to do" in run("update", "--index", unnamed.out)[1]


def test_texts_that_rows_share_are_counted_as_such() -> None:
    counts = {"read": 900, "encoded": 900, "reused": 0, "truncated": 0, "skipped": {}}
    shown = dict(terminal.count_rows({**counts, "duplicates": 105}))
    assert (shown["encoded"], shown["  different texts"]) == ("900", "795")
    shown = dict(terminal.count_rows({**counts, "duplicates": 105, "passages": 2000}))
    assert shown["  passages that repeat a text"] == "105"
    assert len(terminal.count_rows({**counts, "duplicates": 0})) == 5
