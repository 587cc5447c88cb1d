"""The nights of a team: an index in a bucket, encoded on a cluster, pushed to PostgreSQL."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_cluster_build import workers_of
from tests.helpers.bad_input import process
from tests.objects.helpers import ROWS, build, keys, put_corpus
from tests.vectordb.postgres.helpers import connected
from whiten_index import list_versions, open_index

pytestmark = [pytest.mark.service, pytest.mark.slow]
PAGE = Path(__file__).parents[2] / "docs" / "nightly.md"


class Team:
    """The same corpus, its index in a bucket beside one in a folder, and a job for each."""

    def __init__(self, s3: Any, bucket: str, folder: Path, address: str, database: str) -> None:
        self.s3, self.bucket, self.folder, self.database = s3, bucket, folder, database
        self.indexes = {"team": f"s3://{bucket}/index", "alone": str(folder / "index")}
        self.grow(5)
        (shown,) = re.findall(r"(?ms)^```toml\n(.*?)^```", PAGE.read_text("utf-8"))
        for name, index in self.indexes.items():
            build(f"s3://{bucket}/corpus/", out=index, factory="IVF4,SQ8")
            job = "max-growth = 9\n" + shown
            for before, after in (
                ("s3://news/index", index), ("postgresql://news@db/news", database),
                ('table = "docs"', f'table = "{name}"'), ("news.prom", f"{name}.prom"),
                ("head:6379", address), ("keep-versions = 7", "keep-versions = 2"),
            ):  # fmt: skip
                assert before in job
                job = job.replace(before, after)
            if name == "alone":
                job = re.sub("(?m)^(runner|address) = .*", "", job)
            (folder / f"{name}.toml").write_text(job)

    def grow(self, shards: int) -> None:
        put_corpus(self.s3, self.bucket, "corpus/c.parquet", shards=shards)

    def segments(self) -> int:
        found = keys(self.s3, self.bucket, "index/store/")
        return sum("/segments/" in key and key.endswith("/manifest.json") for key in found)

    def night(
        self, name: str, deed: Callable[[Any], None] | None = None
    ) -> tuple[int, list[dict[str, Any]]]:
        """Run a job, and do something when a few segments of it are in the bucket."""
        before = self.segments()
        job = process("nightly", self.folder / f"{name}.toml")
        while deed is not None and self.segments() < before + 3:
            assert job.poll() is None, job.communicate()
            time.sleep(0.01)
        if deed is not None:
            deed(job)
        out, err = job.communicate()
        events = [json.loads(line) for line in out.splitlines()]
        assert deed is not None or job.returncode == 0, (out, err)
        return job.returncode, events

    def published(self, name: str) -> tuple[Any, ...]:
        """The rows that users of the database see, and the files that a search reads."""
        with connected(self.database) as connection:
            rows = connection.execute(f"SELECT id, vector FROM {name} ORDER BY id").fetchall()
        opened = open_index(self.indexes[name])
        folder = Path(opened.bundle.folder)
        files = ("index.faiss", "documents.arrow", "whitening.safetensors")
        return rows, [(folder / each).read_bytes() for each in files]


def test_a_worker_and_then_the_job_are_killed(
    cluster: Any, s3: Any, bucket: str, tmp_path: Path, address: str
) -> None:
    team = Team(s3, bucket, tmp_path, cluster.address, address)

    def kill_a_worker(_: Any) -> None:
        busy = [pid for node in cluster.nodes.values() for pid in workers_of(node)]
        os.kill(busy[0], signal.SIGKILL)

    team.grow(45)
    status, events = team.night("team", kill_a_worker)
    assert (status, events[-1]["event"]) == (0, "published"), events
    assert events[-1]["runner"]["deaths"] >= 1
    team.night("alone")
    assert team.published("team") == team.published("alone")

    team.grow(85)
    before = team.segments()
    status, events = team.night("team", lambda job: job.kill())
    assert status == -signal.SIGKILL
    assert team.segments() < before + 40
    status, events = team.night("team")
    names = [event["event"] for event in events]
    assert names[-1] == "published"
    assert {"push_finished", "prune_finished", "gc_finished"} <= set(names)
    assert events[-1]["counts"]["reused"] >= (45 + 3) * ROWS
    team.night("alone")
    assert team.published("team") == team.published("alone")
    assert len(list_versions(team.indexes["team"])) == 2
    assert 'outcome="published"} 1' in (tmp_path / "team.prom").read_text()
