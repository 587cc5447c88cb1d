"""What an update reads: files that changed, wherever they are, and what cannot be followed."""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.helpers import updates
from tests.helpers.flipped import flip
from tests.helpers.updates import Place, assert_holds, ids_of, some_rows, table_of, tree, version_of
from whiten_index import UpdateConfig, update_index
from whiten_index.errors import ArtifactError, CorpusError, StorageError
from whiten_index.pipeline.plan import plan_update
from whiten_index.progress import Progress

indexed, place = updates.indexed, updates.place


def skipped(place: Place, **options: Any) -> int:
    """Return how many files an update does not read, the dry run saying the same."""
    foretold = plan_update(UpdateConfig(index=str(place.out), threads=1, **options))
    found = place.update(**options).to_json()
    assert found["files"] == foretold["files"]
    assert found["rows"] == foretold["rows"]
    assert found["up_to_date"] == foretold["up_to_date"]
    assert foretold["to_encode"] == found["counts"]["encoded"]
    assert found["counts"]["kept_files"] == found["files"]["skipped"]
    read, total = found["counts"]["read"], found["counts"]["reused"] + found["counts"]["encoded"]
    assert read == total + sum(found["counts"]["skipped"].values())
    return int(found["files"]["skipped"])


def test_files_that_are_as_they_were_are_not_read(place: Place) -> None:
    assert skipped(place) == 2
    place.files = {**place.files, "b.parquet": some_rows(range(150, 290))}
    place.write()
    assert skipped(place) == 1
    assert ids_of(place.out) == list(place.rows)
    assert skipped(place) == 2
    assert skipped(place, read_all=True) == 0


def test_a_file_written_just_now_is_read_again(place: Place) -> None:
    """It may be written once more under the same time."""
    place.files = {**place.files, "b.parquet": some_rows(range(150, 290))}
    place.write(age=0)
    assert skipped(place) == 1
    # By now more than two seconds might have passed on a slow machine, had the clock not stood.
    os.utime(place.corpus / "b.parquet", (time.time(), time.time()))
    assert skipped(place) == 1
    after = version_of(place.out)
    rows = dict(list(some_rows(range(150, 290), seed=3).items()))
    place.files = {**place.files, "b.parquet": rows}
    path = place.write_file("b.parquet", rows)
    os.utime(path, (time.time(), time.time()))
    assert skipped(place) == 1
    assert version_of(place.out) != after
    assert_holds(place)


@pytest.mark.parametrize("how", ["another footer", "in place", "renamed"])
def test_other_content_of_the_same_size_and_time_is_seen(place: Place, how: str) -> None:
    """Writers set times, as rsync and tar do, and keep footers; no program sets the ctime."""
    path = place.corpus / "a.parquet"
    before, data = path.stat(), path.read_bytes()
    rows = dict(place.files["a.parquet"])
    row = rows[3][0] * (100 if how == "another footer" else 1)
    row[:2] = row[1], row[0]
    rows[3] = row, rows[3][1]
    place.files = {**place.files, "a.parquet": rows}
    if how == "renamed":
        path.rename(place.root / "aside")
    place.write()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert path.read_bytes() != data
    assert skipped(place) == 1
    assert_holds(place)


@pytest.mark.parametrize("name", ["whitening.safetensors", "moments.safetensors", "index.faiss"])
def test_a_file_damaged_while_an_update_runs_is_not_carried_on(place: Place, name: str) -> None:
    before = (place.out / "CURRENT").read_text()
    file = version_of(place.out) / name

    class Damages(Progress):
        def start(self, stage: str, total: int) -> None:
            if stage == "encode":
                flip(file, -8)

    place.change()
    place.write()
    config = UpdateConfig(index=str(place.out), threads=1)
    with pytest.raises(ArtifactError, match=rf"{name} is damaged: .*checksum"):
        update_index(config, progress=Damages())
    assert (place.out / "CURRENT").read_text() == before


def plan(place: Place, **options: Any) -> Any:
    return plan_update(UpdateConfig(index=str(place.out), threads=1, **options))


def test_another_store_is_refused_before_anything_is_written_there(
    place: Place, tmp_path: Path
) -> None:
    other = Place(tmp_path / "other", {"a.parquet": some_rows(range(500, 600))})
    other.write()
    other.build()
    there = other.out / "store"
    before = tree(there)
    match = r"named with --store, lacks \d+ of the \d+ rows"
    for changed in (False, True):
        if changed:
            place.change()
        with pytest.raises(ArtifactError, match=match):
            place.update(store=str(there))
        with pytest.raises(ArtifactError, match=match):
            plan(place, store=str(there))
    assert tree(there) == before
    assert not place.update().up_to_date


def links(corpus: Path) -> dict[str, Callable[[], Any]]:
    target = corpus.parent / "away.parquet"
    return {
        "b.parquet leads nowhere": lambda: [
            (corpus / "b.parquet").rename(target),
            (corpus / "b.parquet").symlink_to(target),
            target.unlink(),
        ],
        "loop.parquet leads nowhere": lambda: (corpus / "loop.parquet").symlink_to("loop.parquet"),
        "more leads nowhere": lambda: (corpus / "more").symlink_to("/nonexistent"),
        "again leads to a folder above it": lambda: (corpus / "again").symlink_to("."),
        "p.parquet is neither a file nor a folder": lambda: os.mkfifo(corpus / "p.parquet"),
    }


@pytest.mark.parametrize("what", list(links(Path())))
def test_what_cannot_be_followed_is_not_taken_for_deleted(place: Place, what: str) -> None:
    links(place.corpus)[what]()
    published = (place.out / "CURRENT").read_bytes()
    for named in (place.corpus, f"{place.corpus}/**/*", f"{place.corpus}/*"):
        if str(named).endswith("/*") and what.startswith("again") and "**" not in str(named):
            continue  # One level has an end.
        with pytest.raises(CorpusError, match=re.escape(what)):
            place.update(named, max_shrink=1.0)
    assert (place.out / "CURRENT").read_bytes() == published


def test_links_that_lead_somewhere_are_followed_and_bookkeeping_is_not(place: Place) -> None:
    (place.corpus / "b.parquet").rename(place.root / "away.parquet")
    (place.corpus / "b.parquet").symlink_to(place.root / "away.parquet")
    (place.root / "folder").mkdir()
    pq.write_table(table_of(some_rows(range(900, 910))), place.root / "folder" / "c.parquet")
    (place.corpus / "more").symlink_to(place.root / "folder")
    (place.corpus / "_last").symlink_to("/nonexistent")
    (place.corpus / ".hidden.parquet").symlink_to("/nonexistent")
    assert place.update().changes.to_json()["new"] == 10
    # A pattern that does not ask for it passes by.
    (place.corpus / "x.txt").symlink_to("/nonexistent")
    assert place.update(f"{place.corpus}/*.parquet", f"{place.corpus}/more/c*").up_to_date


def test_a_folder_that_cannot_be_listed_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shut, real = place.corpus / "shut", os.scandir
    shut.mkdir()

    def scandir(path: Any) -> Any:
        if Path(path) == shut:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    # Tests may run as a user whom no permission keeps out.
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StorageError, match=f"cannot list {shut}: permission is denied"):
        place.update()


def test_a_file_of_the_same_name_size_and_time_elsewhere_is_read(tmp_path: Path) -> None:
    place = Place.new(tmp_path)
    name = "a.parquet"
    here, there = place.corpus / name, place.root / "moved" / name
    rows = dict(place.files[name])
    first, second, *_ = rows
    rows[first], rows[second] = rows[second], rows[first]
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table_of(place.files[name]), here, **plain)
    when = time.time_ns() - 10**12
    os.utime(here, ns=(when, when))
    place.build()
    shutil.copytree(place.corpus, there.parent)
    pq.write_table(table_of(rows), there, **plain)
    os.utime(there, ns=(when, when))
    # Otherwise another difference would distinguish them.
    assert there.stat().st_size == here.stat().st_size
    assert pq.read_metadata(there).equals(pq.read_metadata(here))
    report = place.update(place.root / "moved")
    assert report.changes.to_json()["changed"] == 2
    assert report.encoded.counts.encoded == 0
    place.files = {**place.files, name: rows}
    assert_holds(place)
    assert place.update().to_json()["files"] == {"read": 0, "skipped": 2}
