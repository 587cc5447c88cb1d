"""List, roll back, prune, collect, join, check and mend what is on disk."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.acceptance import vectors
from tests.acceptance.commands import done, refused, run, start
from tests.acceptance.vectors import Place, Vectors, build
from tests.helpers.flipped import flip

# Of a version that an update made.
FILES = (
    "manifest.json", "whitening.safetensors", "moments.safetensors", "index.faiss",
    "documents.arrow", "corpus.json", "changes.arrow",
)  # fmt: skip


@dataclass(frozen=True)
class Indexed(Place):
    """An index of three versions, each of other rows, by one transform.

    Attributes:
        nights: the rows of each version, the oldest first.
        names: the versions.
    """

    nights: list[Vectors]
    names: list[str]

    @property
    def store(self) -> Path:
        return self.index / "store"

    def build(self) -> tuple[object, ...]:
        """The command that makes the newest rows an index, from scratch where need be."""
        return ("build", self.corpus, *vectors.OPTIONS, "--out", self.index)

    def assert_night(self, night: int) -> None:
        self.assert_searches(self.nights[night], fitted=self.rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Indexed:
    rows = vectors.some(300)
    nights = [rows, rows[20:] + vectors.some(30, "second"), rows[40:] + vectors.some(60, "third")]
    made = Indexed(tmp_path_factory.mktemp("made") / "work", rows, nights, [])
    for number, night in enumerate(nights):
        made.write(night)
        if number:
            done("update", made.index, "--refit", "never")
        else:
            build(made.corpus, made.index)
        made.names.append(made.published())
    return made


def listed(index: Path) -> dict[str, dict[str, object]]:
    found = json.loads(done("versions", index, "--json"))["versions"]
    return {each["name"]: each for each in found}


def test_versions_are_listed_newest_first(place: Indexed) -> None:
    found = listed(place.index)
    assert list(found) == place.names[::-1]
    assert [each["rows"] for each in found.values()] == [320, 310, 300]
    assert [each["published"] for each in found.values()] == [True, False, False]
    for name, each in found.items():
        sizes = [path.stat().st_size for path in (place.index / "versions" / name).iterdir()]
        assert each["bytes"] == sum(sizes)


def test_a_rollback_publishes_the_version_before(place: Indexed) -> None:
    before = vectors.checksums(place.index / "versions")
    done("rollback", place.index)
    assert place.published() == place.names[1]
    place.assert_night(1)
    assert listed(place.index)[place.names[2]]["withdrawn"]
    done("rollback", place.index)
    place.assert_night(0)
    done("rollback", place.index, "--to", place.names[2])
    place.assert_night(2)
    assert vectors.checksums(place.index / "versions") == before
    refused(2, "rollback", place.index, "--to", "000009-0123456789ab")
    assert place.published() == place.names[2]


def test_prune_keeps_the_newest_versions_and_the_published_one(place: Indexed) -> None:
    done("prune", place.index, "--keep", 2)
    assert {each.name for each in (place.index / "versions").iterdir()} == set(place.names[1:])
    done("rollback", place.index)
    done("prune", place.index, "--keep", 1)
    assert place.published() == place.names[1]
    place.assert_night(1)


def test_gc_removes_what_nothing_needs_and_nothing_else(place: Indexed) -> None:
    """Embeddings that only removed versions had go; all that is searched stays."""
    done("gc", place.store, "--keep-days", 0)
    before = vectors.checksums(place.work)
    removed = json.loads(done("gc", place.store, "--keep-days", 0, "--json"))
    assert removed["bytes"] == 0
    assert vectors.checksums(place.work) == before
    exact = place.search(vectors.some(20, "query").rows, "--rerank", 50)

    # Every row changes, and changes back.
    place.write(place.nights[2].moved(0.5))
    done("update", place.index, "--refit", "never")
    done("rollback", place.index, "--to", place.names[2])
    done("prune", place.index, "--keep", 1)
    names = {each.name for each in (place.index / "versions").iterdir()}
    before = vectors.checksums(place.work)
    # What is recent may be of an encode that was interrupted.
    done("gc", place.store)
    dry = json.loads(done("gc", place.store, "--keep-days", 0, "--dry-run", "--json"))
    assert vectors.checksums(place.work) == before
    report = json.loads(done("gc", place.store, "--keep-days", 0, "--json"))
    after = vectors.checksums(place.work)
    gone = set(before) - set(after)
    assert gone
    assert dry["bytes"] == report["bytes"] > 0
    assert all(name.startswith("index/store/") for name in gone)
    assert {name: before[name] for name in after} == after
    assert {each.name for each in (place.index / "versions").iterdir()} == names
    place.assert_night(2)
    assert place.search(vectors.some(20, "query").rows, "--rerank", 50) == exact
    done("verify", place.index)


@pytest.mark.parametrize("folder", ["versions", "index"])
def test_gc_stops_where_it_cannot_list_a_folder(place: Indexed, folder: str) -> None:
    """A file in the place of what says which rows are needed."""
    other = place.work / "other"
    done("build", "--store", place.store, "--whiten", "pca", "--k", 4, "--out", other)
    hidden = other / folder if folder == "versions" else other
    hidden.rename(place.work / "away")
    hidden.write_text("")
    before = vectors.checksums(place.work)
    ended = run("gc", place.store, "--keep-days", 0)
    assert ended.status in (5, 7), (ended.status, ended.err)
    assert str(hidden) in ended.err
    assert vectors.checksums(place.work) == before
    hidden.unlink()
    (place.work / "away").rename(hidden)
    done("gc", place.store, "--keep-days", 0)


def test_compact_joins_files_and_changes_no_answer(place: Indexed) -> None:
    queries = vectors.some(20, "query").rows
    plain = place.search(queries)
    exact = place.search(queries, "--rerank", 50)
    before = vectors.checksums(place.store)
    done("compact", place.store)
    assert len(vectors.checksums(place.store)) < len(before)
    done("verify", place.index)
    assert place.search(queries) == plain
    assert place.search(queries, "--rerank", 50) == exact
    # Whatever is made from the store afterwards is the same too.
    report = json.loads(done("update", place.index, "--refit", "always", "--json"))
    assert report["counts"]["encoded"] == 0
    place.assert_searches(place.nights[2])


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_and_mended(place: Indexed, name: str) -> None:
    done("verify", place.index)
    flip(place.version / name)
    ended = run("verify", place.index, "--json")
    assert ended.status == 5
    assert not ended.json["sound"]
    assert name in json.dumps(ended.json)
    for command in (("search", place.index, "--like", "d100"), ("update", place.index)):
        assert refused(5, *command)
    done(*place.build())
    done("search", place.index, "--like", "d100")
    found = {hits[0][0] for hits in place.search(place.nights[2].rows[:50])}
    assert found == set(place.nights[2].ids[:50])
    done("update", place.index)


def test_a_flipped_bit_in_what_says_which_version_counts_is_found(place: Indexed) -> None:
    flip(place.index / "CURRENT")
    assert run("verify", place.index).status == 5
    refused(5, "search", place.index, "--like", "d100")
    done("rollback", place.index, "--to", place.names[2])
    done("verify", place.index)
    place.assert_night(2)


def test_a_flipped_bit_in_any_file_of_the_store_is_found_and_mended(place: Indexed) -> None:
    done("prune", place.index, "--keep", 1)
    done("gc", place.store, "--keep-days", 0)
    before = vectors.checksums(place.store)
    for name in before:
        path = place.store / name
        if not (content := path.read_bytes()):
            continue
        flip(path)
        ended = run("verify", place.store, "--json")
        assert ended.status == 5, name
        assert path.name in json.dumps(ended.json) or path.parent.name in json.dumps(ended.json)
        path.write_bytes(content)
    done("verify", place.store)
    damaged = [name for name in before if name.endswith("embeddings.safetensors")]
    for name in damaged:
        flip(place.store / name)
    queries = vectors.some(20, "query")
    queries.write(place.work / "queries.parquet")
    asked = ("--queries", place.work / "queries.parquet", *vectors.COLUMNS, "--rerank", 50)
    refused(5, "search", place.index, *asked, "--run", place.work / "refused.parquet")
    done(*place.build())
    # What was damaged, was made anew and nothing needs any more.
    done("gc", place.store, "--keep-days", 0)
    done("verify", place.index)
    place.assert_searches(place.nights[2])
    done("search", place.index, *asked, "--run", place.work / "again.parquet")


@contextmanager
def stopped_build(work: Path) -> Iterator[tuple[Path, tuple[object, ...]]]:
    """Yield the index that a process is building, which stands still, and its command."""
    rows = vectors.some(8_000, "many", dim=32)
    command = ("build", rows.write(work / "many.parquet"), *vectors.OPTIONS, "--shard-rows", 50)
    index = work / "many"
    process = start(*command, "--out", index)
    try:
        deadline = time.monotonic() + 120
        while vectors.count_files(index / "store") < 10:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        assert process.poll() is None, "done too soon"
        yield index, (*command, "--out", index)
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=240) == 0
    finally:
        process.kill()
        process.communicate()


def test_two_commands_at_once_on_one_folder(tmp_path: Path) -> None:
    """The second ends at once and names the process of the first, which goes on."""
    with stopped_build(tmp_path) as (index, command):
        assert str(index) in refused(6, *command)
        assert not (index / "CURRENT").exists()
    assert len(vectors.search(index, vectors.some(5, "query", dim=32).rows, tmp_path)) == 5
    assert json.loads(done(*command, "--json"))["up_to_date"]
