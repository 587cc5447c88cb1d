"""Pushes of the nightly job: after the update, told in the log, and never undoing it."""

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import ends, night
from tests.vectordb.memory_writer import MemoryWriter, Server
from whiten_index import BuildConfig, build_index
from whiten_index.artifacts.lock import only_writer
from whiten_index.cli.nightly_job import NightlyJob, target
from whiten_index.cli.signals import stop_on_signals
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.registry import open_writer
from whiten_index.versions.retention import rollback

SECRET = "hunter2"
CLIENTS = ("psycopg", "qdrant_client", "lancedb", "pymilvus")
ROWS, DIM = 200, 10
FAILED = 10


class World:
    """A corpus, its index, a job file, and databases by the tables that users query."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        self.raw = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype("f4")
        self.servers: dict[str, Server] = {"docs": Server(), "more": Server()}
        self.options = list[dict[str, str]]()

    def build(self) -> None:
        self.write()
        build_index(
            BuildConfig(
                corpus=(str(self.root / "c.parquet"),), out=str(self.root / "index"),
                embedding_column="e", id_column="id", k=6, whiten="whitening",
            )
        )  # fmt: skip

    def connect(self, address: str, name: str, *, options: Mapping[str, str]) -> MemoryWriter:
        self.options.append(dict(options))
        return MemoryWriter(self.servers[name])

    def write(self) -> None:
        ids = pa.array(range(len(self.raw)))
        pq.write_table(pa.table({"id": ids, "e": list(self.raw)}), self.root / "c.parquet")

    def change(self) -> None:
        self.raw[3] += 1
        self.write()

    def row(self, number: int) -> dict[str, Any]:
        """Return a row that users of ``docs`` see."""
        table = self.servers["docs"].published
        assert table is not None
        (row,) = [row for row in table.rows.values() if row["id"] in (number, str(number))]
        return row

    def job(self, *pushes: str, first: str = "") -> Path:
        path = self.root / "job.toml"
        lines = [f"index = {json.dumps(str(self.root / 'index'))}", 'refit = "never"', first]
        path.write_text("\n".join([*lines, *(f"[[push]]\n{each}" for each in pushes)]))
        return path

    def assert_pushed(self, *names: str) -> None:
        """These databases have the published version, with this many rows."""
        current = json.loads((self.root / "index" / "CURRENT").read_text())["version"]
        for name in names:
            table = self.servers[name].published
            assert table is not None
            assert table.pushed.version == current
            assert len(table.rows) == len(self.raw)


DOCS = 'to = "postgresql://me@h/db"\ntable = "docs"'
OF_DOCS = "push postgresql://me@h/db docs"
MORE = 'to = "qdrant://h"\ntable = "more"\nk = 3\noptions = {m = 16, on_disk = true}'


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world without an index, for tests that only read job files."""
    made = World(tmp_path, monkeypatch)
    monkeypatch.setattr("whiten_index.vectordb.push.open_writer", made.connect)
    # Nor may one be needed to read a job, or the digest of its options.
    for client in CLIENTS:
        monkeypatch.setitem(sys.modules, client, None)
    return made


@pytest.fixture
def world(no_index: World) -> World:
    no_index.build()
    return no_index


def test_every_database_follows(world: World) -> None:
    job = world.job(DOCS, MORE, first="keep-versions = 1")
    events = ends(0, "up_to_date", job)
    world.assert_pushed("docs", "more")
    pushed = [event for event in events if event["event"] == "push_finished"]
    assert [event["mode"] for event in pushed] == ["all", "all"]
    assert (pushed[1]["k"], world.options) == (3, [{}, {"m": "16", "on_disk": "true"}])
    world.change()
    events = ends(0, "published", job)
    names = [event["event"] for event in events]
    # Pruned first, what changed would not be known.
    assert names.index("push_finished") < names.index("prune_finished")
    pushed = [event for event in events if event["event"] == "push_finished"]
    assert [(event["mode"], event["pushed"]) for event in pushed] == [("changes", 1)] * 2
    world.assert_pushed("docs", "more")
    _, events = night(job)
    assert [e["mode"] for e in events if e["event"] == "push_finished"] == ["nothing"] * 2


def test_a_push_that_fails_undoes_nothing(world: World) -> None:
    world.servers["docs"].fails_after = 0
    world.change()
    job = world.job(DOCS, MORE, first="keep-versions = 1")
    events = ends(FAILED, "published", job)
    assert (events[-1]["failed"], events[-1]["exit_code"]) == ([OF_DOCS], FAILED)
    (failed,) = [event for event in events if event["event"] == "push_failed"]
    assert (failed["to"], failed["table"]) == ("postgresql://me@h/db", "docs")
    assert (failed["message"], failed["exit_code"]) == ("the connection broke", FAILED)
    # The other one and what comes afterwards are done.
    world.assert_pushed("more")
    assert "gc_finished" in {event["event"] for event in events}
    # The next night makes up for it, though there is nothing to publish.
    world.servers["docs"].fails_after = None
    ends(0, "up_to_date", job)
    world.assert_pushed("docs", "more")


def test_a_database_that_is_behind_needs_the_versions_between(world: World) -> None:
    job = world.job(DOCS, first="keep-versions = 1")
    assert night(job)[0] == 0
    for _ in range(2):
        world.change()
        world.servers["docs"].fails_after = 0
        status, events = night(job)
        assert (status, events[-1]["failed"]) == (FAILED, [OF_DOCS])
        (left_out,) = [event for event in events if event["event"].startswith("prune")]
        assert left_out["event"] == "prune_left_out"
        assert "a database is behind" in left_out["why"]
    world.servers["docs"].fails_after = None
    status, events = night(job)
    (pushed,) = [event for event in events if event["event"] == "push_finished"]
    assert (status, pushed["mode"], pushed["pushed"]) == (0, "changes", 1)
    assert len(list((world.root / "index" / "versions").iterdir())) == 1


def test_a_file_that_cannot_be_written_keeps_no_versions(world: World) -> None:
    path = world.root / "v.parquet"
    job = world.job(f"to = {json.dumps(str(path))}", first="keep-versions = 1")
    job.write_text(job.read_text().replace("v.parquet", "no/v.parquet"))
    status, events = night(job)
    assert (status, events[-1]["failed"]) == (FAILED, [f"push {world.root / 'no/v.parquet'}"])
    assert "prune_finished" in {event["event"] for event in events}


def test_a_check_that_fails_is_no_gate_of_the_update(world: World) -> None:
    world.monkeypatch.setattr(MemoryWriter, "finish", MemoryWriter.finish_short)
    world.change()
    events = ends(FAILED, "published", world.job(DOCS))
    (failed,) = [event for event in events if event["event"] == "push_failed"]
    assert "counts 199 rows" in failed["message"]


def test_what_is_published_is_pushed_where_a_gate_fails(world: World) -> None:
    """A database that a night could not reach is not behind for as long as gates fail."""
    whole, job = world.raw, world.job(DOCS, first="keep-versions = 1\ncompact = true")
    assert night(job)[0] == 0
    world.servers["docs"].fails_after = 0
    world.change()
    assert night(job)[0] == FAILED
    world.servers["docs"].fails_after = None
    world.raw = world.raw[:20]
    world.write()
    status, events = night(job)
    assert (status, events[-1]["event"], events[-1]["exit_code"]) == (9, "gate_failed", 9)
    names = [event["event"] for event in events]
    assert names.index("update_failed") < names.index("push_finished")
    # What the candidate needs to be looked into stays.
    assert not {"prune_finished", "compact_finished", "gc_finished"} & set(names)
    world.raw = whole
    world.assert_pushed("docs")


def test_a_push_that_fails_too_leaves_the_exit_status_to_the_gate(world: World) -> None:
    world.servers["docs"].fails_after = 0
    world.raw = world.raw[:20]
    world.write()
    status, events = night(world.job(DOCS))
    assert (status, events[-1]["event"], events[-1]["failed"]) == (9, "gate_failed", [OF_DOCS])


def test_a_rollback_reaches_the_database_though_its_gate_fails(world: World) -> None:
    job = world.job(DOCS)
    assert night(job)[0] == 0
    world.change()
    assert night(job)[0] == 0
    changed = world.row(3)
    rollback(world.root / "index")
    events = ends(9, "gate_failed", job)
    assert "rolled back" in events[-1]["message"]
    world.assert_pushed("docs")
    assert world.row(3) != changed


def test_what_is_published_is_pushed_whatever_the_update_failed_of(world: World) -> None:
    (world.root / "c.parquet").unlink()
    status, events = night(world.job(DOCS))
    (failed,) = [event for event in events if event["event"] == "update_failed"]
    assert (status, events[-1]["event"]) == (failed["exit_code"], "failed")
    assert events[-1]["message"] == failed["message"]
    world.assert_pushed("docs")


def test_nothing_is_pushed_beside_another_job(world: World) -> None:
    with only_writer(world.root / "index", what="it"):
        status, events = night(world.job(DOCS))
    assert (status, events[-1]["event"]) == (6, "failed")
    assert world.servers["docs"] == Server()


@pytest.mark.parametrize(
    ("rows", "hidden", "full"),
    [(ROWS, False, False), (ROWS, True, True), (20, False, False), (20, False, True)],
)
def test_a_push_that_is_stopped(world: World, rows: int, hidden: bool, full: bool) -> None:
    """The last line says what became of the update, even where the metrics then fail."""
    metrics = world.root / "metrics"
    metrics.mkdir()

    def stopped(*_: object) -> None:
        if full:
            metrics.rmdir()
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            if hidden:
                # As clients of databases do.
                raise DatabaseError("Query interrupted") from None
            raise

    world.monkeypatch.setattr(MemoryWriter, "append", stopped)
    # What a signal leaves behind is of this test alone.
    world.monkeypatch.setattr("whiten_index.cli.signals._State.stopped", False)
    stop_on_signals()
    world.change()
    world.raw = world.raw[:rows]
    world.write()
    first = f"keep-versions = 1\nmetrics = {json.dumps(str(metrics / 'm.prom'))}"
    status, events = night(world.job(DOCS, MORE, first=first))
    last = events[-1]
    assert last["stopped_in"] == OF_DOCS
    assert last.get("failed") == (["metrics"] if full else None)
    assert ("metrics_failed" in [each["event"] for each in events]) == full
    ours = [e["event"] for e in events if e["event"].startswith(("push_", "prune_"))]
    assert ours == ["push_started"]
    if rows < ROWS:
        assert (status, last["event"]) == (9, "gate_failed")
        return
    assert (status, last["event"], last["update"]) == (130, "interrupted", "published")
    assert last["version"] == json.loads((world.root / "index/CURRENT").read_text())["version"]


def test_a_client_that_is_not_installed_stops_no_update(world: World) -> None:
    world.monkeypatch.setattr("whiten_index.vectordb.push.open_writer", open_writer)
    world.change()
    job = world.job(DOCS, MORE, f"to = {json.dumps(str(world.root / 'v.parquet'))}")
    events = ends(FAILED, "published", job)
    failed = [event for event in events if event["event"] == "push_failed"]
    assert [(event["to"], event["exit_code"]) for event in failed] == [
        ("postgresql://me@h/db", FAILED),
        ("qdrant://h", FAILED),
    ]
    assert "pip install 'whiten-index[postgres]'" in failed[0]["message"]
    assert "pip install 'whiten-index[qdrant]'" in failed[1]["message"]
    assert (world.root / "v.parquet").exists()


def test_a_dry_run_looks_for_the_clients(world: World) -> None:
    events = ends(FAILED, "planned", world.job(DOCS, MORE, 'to = "v.parquet"'), "--dry-run")
    failed = [event["to"] for event in events if event["event"] == "push_failed"]
    assert failed == ["postgresql://me@h/db", "qdrant://h"]


def test_a_dry_run_pushes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whiten_index.vectordb.registry.require_client", lambda _: None)
    status, events = night(world.job(DOCS), "--dry-run")
    assert (status, events[-1]["push"]) == (0, ["postgresql://me@h/db docs"])
    assert world.servers["docs"] == Server()


def test_every_line_of_a_push_tells_its_target(world: World) -> None:
    path = world.root / "v.parquet"
    _, events = night(world.job(DOCS, MORE, f"to = {json.dumps(str(path))}"))
    first = [event["event"] for event in events].index("push_started")
    places = [(event.get("to"), event.get("table")) for event in events[first:-1]]
    expected = [("postgresql://me@h/db", "docs"), ("qdrant://h", "more"), (str(path), None)]
    assert list(dict.fromkeys(places)) == expected
    for place in expected:
        names = [e["event"] for e, at in zip(events[first:], places, strict=False) if at == place]
        assert (names[0], names[-1]) == ("push_started", "push_finished")
        assert {"stage_started", "stage_finished"} <= set(names)


@pytest.mark.parametrize("to", ["postgresql://me@h/db", "v.arrow"])
def test_a_refit_is_noted_once_with_its_target(world: World, to: str) -> None:
    to = to if "://" in to else str(world.root / to)
    push = DOCS if "://" in to else f"to = {json.dumps(to)}"
    job = world.job(push)
    _, events = night(job)
    (first,) = [event for event in events if event["event"] == "push_finished"]
    world.raw = world.raw @ np.diag(np.linspace(1, 3, DIM)).astype("f4")
    world.write()
    job.write_text(job.read_text().replace('"never"', '"always"'))
    status, events = night(job)
    (second,) = [event for event in events if event["event"] == "push_finished"]
    assert (status, second["rows"]) == (0, ROWS)
    assert second["query_digest"] != first["query_digest"]
    (note,) = [e for e in events if first["query_digest"] in json.dumps(e)]
    assert (note["event"], note["to"]) == ("note", to)
    assert "open QueryTransform again, and export again" in note["message"]
    assert "notes" not in second


def test_what_is_said_of_where_a_push_is_to(no_index: World) -> None:
    """Two that differ in a socket or a schema alone are told apart in the last line."""
    local = 'to = "postgresql://me@/db?host=/run/one&sslmode=disable"\ntable = "docs"'
    pushes = NightlyJob.read(
        no_index.job(
            local, local.replace("one", "two"), f'{DOCS}\noptions = {{schema = "s"}}',
            'to = "milvus://h"\ntable = "d"\noptions = {db = "b"}', 'to = "v.npy"',
        )
    ).push  # fmt: skip
    assert [target(config) for config in pushes] == [
        "postgresql://me@/db?host=/run/one docs", "postgresql://me@/db?host=/run/two docs",
        "postgresql://me@h/db s.docs", "milvus://h b.d", str(no_index.root / "v.npy"),
    ]  # fmt: skip


def test_a_store_that_was_moved_is_known_where_the_update_failed(world: World) -> None:
    moved = world.root / "moved"
    (world.root / "index" / "store").rename(moved)
    (world.root / "c.parquet").unlink()
    ends(3, "failed", world.job(DOCS, first=f"store = {json.dumps(str(moved))}"))
    world.assert_pushed("docs")


def test_a_file_of_somebody_else_stops_no_update(world: World) -> None:
    """It may have come since the job was written."""
    path = world.root / "v.parquet"
    job = world.job(f"to = {json.dumps(str(path))}", DOCS)
    path.write_bytes(b"mine")
    world.change()
    events = ends(FAILED, "planned", job, "--dry-run")
    (failed, _) = [event for event in events if event["event"] == "push_failed"]
    assert (failed["to"], failed["exit_code"]) == (str(path), FAILED)
    assert "holds something else than rows that a push wrote" in failed["message"]
    events = ends(FAILED, "published", job)
    assert events[-1]["failed"] == [f"push {path}"]
    assert path.read_bytes() == b"mine"
    world.assert_pushed("docs")


@pytest.mark.parametrize(
    ("push", "message"),
    [
        ('table = "docs"', r"push 1: --to is missing"),
        ('to = "postgresql://h/db"', r"push 1: a database needs the name of a table"),
        (f'{DOCS}\nindex = "x"', r"push 1: index is unknown; known are "),
        (f"{DOCS}\nfull = 1", r"push 1: --full takes true or false"),
        (f"{DOCS}\nbatch-rows = 9\nbatch_rows = 8", r"push 1 sets batch_rows twice"),
        (f"{DOCS}\noptions = {{m = [1]}}", r"push 1: --option m takes text, a number"),
        (f"{DOCS}\noptions = {{n = 1}}", r"push 1: --option n is unknown to PostgreSQL; use one"),
        (f"{DOCS}\noptions = {{m = 1}}", r"push 1: --option m: .*or equal to 2; .1. was given"),
        ('to = "v.parquet"\ntable = "d"', r"push 1: .*v.parquet is a file, which takes no --table"),
        ('to = "v.arrow"\noptions = {m = 3}', r"push 1: .* takes no --option"),
        ('to = "http://h:6333"\ntable = "d"', r"push 1: http://h:6333 is the address of no"),
        ("to = [7]", r"push 1: --to takes text"),
        (f'to = "me:{SECRET}@h/db"\ntable = "d"', r"push 1: to \(…\) has a password before the @"),
    ],
)
def test_jobs_that_cannot_be_read(no_index: World, push: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        NightlyJob.read(no_index.job(push))
    assert SECRET not in str(raised.value)


def test_two_pushes_of_one_place(no_index: World) -> None:
    file, vectors = (
        f"to = {json.dumps(str(no_index.root / name))}" for name in ("v.parquet", "v.npy")
    )
    for pushes in ((DOCS, MORE, f"{DOCS}\nk = 3"), (file, MORE, file)):
        with pytest.raises(ConfigError, match="push 3 goes where push 1 does"):
            NightlyJob.read(no_index.job(*pushes))
    apart = (
        DOCS, f'{DOCS}\noptions = {{schema = "other"}}', DOCS.replace('"docs"', '"other"'),
        DOCS.replace("h/db", "g/db"), file, vectors,
    )  # fmt: skip
    assert len(NightlyJob.read(no_index.job(*apart)).push) == 6
