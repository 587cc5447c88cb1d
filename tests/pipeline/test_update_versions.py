"""What an update publishes and what it refuses, also in nights when corpus or clock are odd."""

import datetime
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.helpers import updates
from tests.helpers.updates import DIM, Place, assert_holds, ids_of, some_rows, version_of
from whiten_index import UpdateConfig, open_index, update_index
from whiten_index.cli.schema_options import read_toml
from whiten_index.errors import ConfigError, CorpusError, GateError, WhiteningError
from whiten_index.versions.retention import list_versions, prune, rollback
from whiten_index.versions.verify import verify_index

indexed, place = updates.indexed, updates.place


def test_a_corpus_that_became_again_what_it_was_is_a_version_of_its_own(place: Place) -> None:
    first, old = version_of(place.out).name, dict(place.files)
    place.change()
    second = place.update(refit="always")
    place.files = old
    place.write()
    report = place.update(refit="always")
    assert report.base == second.version
    assert report.version not in (first, second.version)
    assert all(gate["passed"] for gate in report.gates)
    assert report.gates
    # Its changes are those since the version before, not those that were once made.
    counts, undone = report.changes.to_json(), second.changes.to_json()
    assert (counts["new"], counts["deleted"]) == (undone["deleted"], undone["new"])
    assert ids_of(place.out) == list(place.rows)
    assert rollback(place.out).to == second.version


def test_the_version_of_a_killed_update_passes_the_gates_that_are_asked_now(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.files = {**place.files, "c.parquet": some_rows(range(900, 1000))}
    place.write()
    with monkeypatch.context() as patch:
        patch.setattr("whiten_index.pipeline.update.set_current", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            place.update()
    with pytest.raises(GateError, match=r"--max-growth is 0\.01"):
        place.update(max_growth=0.01)
    # No rollback or prune takes what was refused for a version that was ever published.
    (published,) = (each.name for each in list_versions(place.out) if not each.candidate)
    assert place.update().version is not None
    assert rollback(place.out).to == published
    assert prune(place.out, keep=1).kept == (published,)
    (left,) = (place.out / "versions").iterdir()
    assert left.name == published


def test_rows_of_a_version_that_a_gate_kept_back_are_not_encoded_again(place: Place) -> None:
    place.files = {**place.files, "c.parquet": some_rows(range(900, 1300))}
    place.write()
    with pytest.raises(GateError, match="gate size"):
        place.update()
    # Not the same corpus any more, but most of its rows.
    place.files["c.parquet"] = some_rows([*range(900, 1200), *range(1400, 1405)])
    place.write()
    assert place.update(max_growth=9).encoded.counts.encoded == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refit": "sometimes"}, "sometimes.*auto, always, never"),
        ({"drift_threshold": -1.0}, "--drift-threshold"),
        ({"drift_threshold": float("nan")}, "--drift-threshold"),
        ({"drift_threshold": float("inf")}, "--drift-threshold"),
        ({"drift_threshold": "0.1"}, "--drift-threshold takes a number; '0.1' was given"),
        ({"choose_again": True, "refit": "never"}, "--choose-again.*--refit never"),
        ({"index_device": "tpu"}, "tpu.*auto, cpu, gpu"), ({"canaries": -1}, "--canaries"),
        ({"canaries": 1.5}, "--canaries takes a whole number"),
        ({"canaries": True}, "--canaries takes a whole number"),
        ({"max_shrink": 1.5}, "--max-shrink"), ({"max_bytes": "many"}, "--max-bytes"),
        ({"threads": 0}, "threads"), ({"store": ""}, "an empty path"),
        ({"corpus": ("",)}, "an empty path"), ({"index": ""}, "an empty path"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_be_used(indexed: Place, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        update_index(UpdateConfig(**{"index": str(indexed.out), **options}))


def test_whitening_that_became_impossible(place: Place) -> None:
    row = np.ones(DIM, dtype=np.float32)
    place.files = {"a.parquet": dict.fromkeys(range(300), (row, 1))}
    place.write()
    with pytest.raises((WhiteningError, GateError)):
        place.update()
    assert len(open_index(place.out)) == 300


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
