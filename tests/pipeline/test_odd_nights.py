"""Nights on which corpus, clock or job file are not as they should be: nothing is lost."""

import datetime
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import build, random_rows, write_rows
from whiten_index import open_index
from whiten_index.cli.schema_options import read_toml
from whiten_index.errors import ConfigError, WhitenIndexError
from whiten_index.pipeline.update import UpdateReport, update_index
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.versions.retention import list_versions, prune, rollback

CORPUS = 3


class Night:
    """An index of two files, the second of which changed since it was published."""

    def __init__(self, root: Path) -> None:
        self.corpus, self.out = root / "corpus", root / "index"
        self.ids = {"a": np.arange(100), "b": np.arange(100, 200)}
        for name in self.ids:
            self.write(name)
        build(self.out, str(self.corpus), shard_rows=50)
        self.before = self.answers()
        self.version = open_index(self.out).bundle.version
        self.ids["b"] = np.r_[105:200, 300:303]
        self.write("b")

    def write(self, name: str, *, age: float = 100.0) -> Path:
        """Write a file of the rows its ids say, as if that had been some time ago."""
        path = self.corpus / f"{name}.parquet"
        write_rows(path, random_rows(rows=400)[self.ids[name]], id=self.ids[name])
        then = time.time() - age
        os.utime(path, (then, then))
        return path

    def update(self, **options: Any) -> UpdateReport:
        return update_index(UpdateConfig(index=str(self.out), threads=1, **options))

    def answers(self) -> list[Any]:
        """Return the ids of the published rows, and what fixed queries find."""
        bundle = open_index(self.out, verify="full").bundle
        scores, rows = bundle.search(random_rows(5, rows=10), 5)
        return [bundle.documents.ids(range(len(bundle))), rows.tolist(), scores.round(4).tolist()]

    def assert_unharmed(self) -> None:
        assert self.answers() == self.before
        assert open_index(self.out).bundle.version == self.version
        left = [path for path in self.out.rglob("*") if path.name.startswith((".tmp-", ".lock-o"))]
        assert not left

    def assert_refused(self, match: str, *, code: int = CORPUS, **options: Any) -> WhitenIndexError:
        with pytest.raises(WhitenIndexError, match=match) as refused:
            self.update(**options)
        assert refused.value.exit_code == code
        self.assert_unharmed()
        return refused.value

    def assert_done(self, report: UpdateReport) -> None:
        """What is published is the corpus as its files are now."""
        assert open_index(self.out).bundle.version == report.version
        ids = [*self.ids["a"], *self.ids["b"]]
        assert self.answers()[0] == ids
        fresh = self.out.with_name("fresh")
        shutil.rmtree(fresh, ignore_errors=True)
        build(fresh, str(self.corpus), shard_rows=50)
        stored, wanted = (
            [part.digests for part in report_store(out).parts] for out in (self.out, fresh)
        )
        assert stored == wanted


def report_store(out: Path) -> Any:
    from whiten_index.store.records import CorpusRecord

    version = open_index(out).bundle.version
    return CorpusRecord.load(out / "versions" / version / "corpus.json")


@pytest.fixture
def night(tmp_path: Path) -> Night:
    return Night(tmp_path)


@pytest.mark.parametrize("what", ["empty", "gone", "of no rows"])
def test_a_folder_that_is_empty_one_night(night: Night, what: str) -> None:
    aside = night.corpus.with_name("aside")
    night.corpus.rename(aside)
    if what != "gone":
        night.corpus.mkdir()
    if what == "of no rows":
        empty = pq.read_table(aside / "a.parquet").slice(0, 0)
        pq.write_table(empty, night.corpus / "a.parquet")
    said = {"empty": "holds no Parquet file", "gone": "does not exist", "of no rows": "no rows"}
    night.assert_refused(said[what])
    shutil.rmtree(night.corpus, ignore_errors=True)
    aside.rename(night.corpus)
    night.assert_done(night.update())


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


def test_a_clock_that_went_back(night: Night, clock: Callable[[float], None]) -> None:
    clock(-400)
    second = night.update()
    night.assert_done(second)
    first, second_facts = reversed(list_versions(night.out))
    assert second_facts.created < first.created
    # By number and not by time: a later one is later.
    assert [second_facts.name, first.name] == [second.version, night.version]
    assert second_facts.published
    assert rollback(night.out).to == night.version
    assert night.answers() == night.before
    rollback(night.out, to=second.version)
    assert prune(night.out, keep=1).removed == (night.version,)
    night.assert_done(second)
    assert night.update().up_to_date


def test_a_mark_of_windows_editors_at_the_front_of_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbfindex = "x"\r\n')
    assert read_toml(path) == {"index": "x"}
    path.write_bytes('index = "é"'.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not TOML in UTF-8"):
        read_toml(path)
