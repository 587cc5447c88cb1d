"""Builds and encodings that are killed and run again, against undisturbed ones."""

import functools
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.acceptance.commands import Ended, done, run, start
from tests.acceptance.truth import SciFact
from tests.acceptance.vectors import version_folder

ROWS, SHARD = 96, 8
SHARDS = ROWS // SHARD


@pytest.fixture(scope="module")
def texts(scifact: SciFact) -> list[str]:
    return [f"{text[:240]}" for text in scifact.table()["text"].to_pylist()[:ROWS]]


@pytest.fixture(scope="module")
def corpus(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume") / "corpus.parquet"
    pq.write_table(pa.table({"id": [f"d{i}" for i in range(ROWS)], "text": texts}), path)
    return path


@pytest.fixture(scope="module")
def options(corpus: Path) -> tuple[object, ...]:
    """Encode the corpus in many small shards, on one thread."""
    return (
        corpus, "--text-column", "text", "--id-column", "id", "--pooling", "mean",
        "--max-length", 128, "--shard-rows", SHARD, "--threads", 1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(options: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    index = tmp_path_factory.mktemp("undisturbed") / "index"
    done("build", *options, "--whiten", "whitening", "--k", 16, "--out", index)
    return index


def finished_shards(store: Path) -> set[Path]:
    """Return the folders of shards, as the README shows a store: they appear once they are whole.

    A temporary folder begins with a dot.
    """
    found = store.glob("*/segments/*")
    return {path for path in found if not path.name.startswith(".")}


def stop_in_the_middle(
    process: subprocess.Popen[str], store: Path, end: Callable[[], None], *, least: int = 2
) -> tuple[int, str]:
    """End a process once some shards are finished; return how many were, and what it said."""
    try:
        deadline = time.monotonic() + 120
        while len(finished_shards(store)) < least and process.poll() is None:
            assert time.monotonic() < deadline, "no shard was finished"
            time.sleep(0.01)
        end()
        said = process.communicate(timeout=60)[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return len(finished_shards(store)), said


def counts(ended: Ended) -> dict[str, int]:
    assert ended.status == 0, ended.err
    return ended.json["counts"]


def test_an_interrupted_encoding_and_a_killed_build_give_the_undisturbed_index(
    options: tuple[object, ...], undisturbed: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    encoding = ("encode", *options, "--store", index / "store")
    arguments = ("build", *options, "--whiten", "whitening", "--k", 16, "--out", index)
    done("build", *options, "--limit", SHARD, "--whiten", "none", "--out", index)
    found, kept = done("search", index, "--like", "d3"), 1
    for command, number, status in (
        (encoding, signal.SIGINT, 130),
        (arguments, signal.SIGTERM, 130),
        (arguments, signal.SIGKILL, -signal.SIGKILL),
    ):
        process, before = start(*command), kept
        end = functools.partial(process.send_signal, number)
        kept, said = stop_in_the_middle(process, index / "store", end, least=before + 2)
        assert process.returncode == status
        assert before + 2 <= kept < SHARDS
        if status == 130:
            assert "run the same command to go on" in said.splitlines()[-1]
            assert not list(index.rglob("*tmp*"))
        # What was published is searched as before.
        assert done("search", index, "--like", "d3") == found
    counted = counts(run(*arguments, "--json"))
    assert counted["read"] == ROWS
    assert counted["reused"] >= kept * SHARD
    assert counted["encoded"] + counted["reused"] == ROWS
    mine, theirs = version_folder(index), version_folder(undisturbed)
    assert mine.name.partition("-")[2] == theirs.name.partition("-")[2]
    for name in ("index.faiss", "documents.arrow", "whitening.safetensors"):
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name
    assert not list(tmp_path.rglob(".tmp-*"))


def test_an_interrupt_within_a_shard_keeps_what_was_encoded(
    scifact: SciFact, tmp_path: Path
) -> None:
    """The store is then, to the bit, one that nothing disturbed."""
    corpus, stopped, whole = (tmp_path / name for name in ("c.parquet", "stopped", "whole"))
    pq.write_table(scifact.table().slice(0, 100), corpus)
    options = ("--text-column", "text", "--max-length", 128, "--threads", 1)
    encode = ("encode", corpus, *options, "--store")
    # The best size of a batch is not known there, so the first ones are small.
    process = start(*encode, stopped, env={"XDG_CACHE_HOME": str(tmp_path)})
    while not list(stopped.glob("*/runtimes/*")):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    kept = int(re.findall(r"Stopped: kept (\d+) of 100 rows; run the same command", said)[0])
    assert not finished_shards(stopped)
    # gc leaves that, unless it is as old as what nobody takes up again.
    for days, removed in ((7, 0), (0, 1)):
        found = done("gc", stopped, "--dry-run", "--keep-days", days, "--json")
        assert json.loads(found)["parts"] == removed
    counted = counts(run(*encode, stopped, "--json"))
    assert 0 < kept <= counted["reused"] < 100 == counted["reused"] + counted["encoded"]
    assert counts(run(*encode, whole, "--json"))["tokens"] > counted["tokens"] > 0
    segments = [
        {path.relative_to(store): path.read_bytes() for path in store.glob("*/segments/*/*")}
        for store in (stopped, whole)
    ]
    assert segments[0] == segments[1]
    assert not list(stopped.glob("*/unfinished/*"))
