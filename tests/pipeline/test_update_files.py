"""What an update reads: files that changed, wherever they, the index and its store are."""

import os
import time
from typing import Any

import pytest

from tests.helpers import updates
from tests.helpers.flipped import flip
from tests.helpers.updates import Place, assert_holds, ids_of, some_rows, version_of
from whiten_index import UpdateConfig, update_index
from whiten_index.errors import ArtifactError
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
