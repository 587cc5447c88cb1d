"""Nights on which corpus, clock or job file are not as they should be: nothing is lost."""

import datetime
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.helpers import updates
from tests.helpers.updates import Place, assert_holds, ids_of, version_of
from whiten_index.cli.schema_options import read_toml
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.versions.retention import list_versions, prune, rollback
from whiten_index.versions.verify import verify_index

indexed, place = updates.indexed, updates.place


@pytest.mark.parametrize("what", ["empty", "gone", "of no rows"])
def test_a_folder_that_is_empty_one_night(place: Place, what: str) -> None:
    before, aside = version_of(place.out), place.root / "aside"
    place.change()
    place.corpus.rename(aside)
    if what != "gone":
        place.corpus.mkdir()
    if what == "of no rows":
        empty = pq.read_table(aside / "a.parquet").slice(0, 0)
        pq.write_table(empty, place.corpus / "a.parquet")
    said = {"empty": "holds no Parquet file", "gone": "does not exist", "of no rows": "no rows"}
    with pytest.raises(CorpusError, match=said[what]):
        place.update()
    assert version_of(place.out) == before
    assert verify_index(place.out).sound
    assert not list(place.out.rglob(".tmp-*"))
    shutil.rmtree(place.corpus, ignore_errors=True)
    aside.rename(place.corpus)
    place.update()
    assert_holds(place)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Put all of Python's clocks but the monotonic ones so many days ahead, or back."""

    def put(days: float) -> None:
        seconds, nanoseconds, now = time.time, time.time_ns, datetime.datetime.now
        shift = datetime.timedelta(days=days)

        class Shifted(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
                return now(tz) + shift

        monkeypatch.setattr(time, "time", lambda: seconds() + shift.total_seconds())
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(days * 86400 * 10**9))
        monkeypatch.setattr(datetime, "datetime", Shifted)

    return put


def test_a_clock_that_went_back(place: Place, clock: Callable[[float], None]) -> None:
    before, ids = version_of(place.out).name, ids_of(place.out)
    place.change()
    clock(-400)
    second = place.update()
    assert_holds(place)
    first, second_facts = reversed(list_versions(place.out))
    assert second_facts.created < first.created
    # By number and not by time: a later one is later.
    assert [second_facts.name, first.name] == [second.version, before]
    assert second_facts.published
    assert rollback(place.out).to == before
    assert ids_of(place.out) == ids
    rollback(place.out, to=second.version)
    assert prune(place.out, keep=1).removed == (before,)
    assert_holds(place)
    assert place.update().up_to_date


def test_a_mark_of_windows_editors_at_the_front_of_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbfindex = "x"\r\n')
    assert read_toml(path) == {"index": "x"}
    path.write_bytes('index = "é"'.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not TOML in UTF-8"):
        read_toml(path)
