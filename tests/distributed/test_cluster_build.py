"""A build on a cluster equals one on this machine, whatever dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.helpers.bad_input import process, run, succeed
from tests.helpers.corpora import write_judged
from whiten_index import BuildConfig
from whiten_index.errors import ClusterError
from whiten_index.evaluation.judgements import parquet_corpus
from whiten_index.pipeline.build import build_index
from whiten_index.pipeline.encode import encode_corpus
from whiten_index.pipeline.update import update_index
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.whitening.moments import Moments

pytestmark = pytest.mark.service
ROWS, DIM, SHARD_ROWS = 6_000, 24, 250
COLUMN = {"embedding_column": "e", "id_column": "id", "shard_rows": SHARD_ROWS, "whiten": "pca"}


@pytest.fixture(scope="module")
def column(tmp_path_factory, write_parquet):
    """A corpus of embeddings in two files, its rows at different scales."""
    folder = tmp_path_factory.mktemp("column")
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((ROWS, DIM)).astype(np.float32) * np.linspace(3, 0.2, DIM)
    for number, part in enumerate(np.split(rows.astype(np.float32), [ROWS // 3])):
        first = number * ROWS // 3
        ids = [f"row {first + row}" for row in range(len(part))]
        array = pa.FixedSizeListArray.from_arrays(part.ravel(), DIM)
        write_parquet(folder / f"{number}.parquet", {"id": ids, "e": array}, row_group_size=500)
    return folder


def build(corpus, out, address=None, **options):
    if address is not None:
        options |= {"runner": "ray", "address": address}
    config = BuildConfig(corpus=(str(corpus),), out=str(out), **{**COLUMN, **options})
    return build_index(config)


def shards_of(store):
    return {path.parent.name for path in Path(store).glob("*/segments/[!.]*/manifest.json")}


def version_of(report):
    return Path(report.out) / "versions" / report.version


def require_same(one, other):
    """Compare two builds: shards, ids, moments, whitening, and the index to the byte."""
    assert one.encoded.record.fingerprint == other.encoded.record.fingerprint
    mine, theirs = (Moments.load(version_of(each) / "moments.safetensors") for each in (one, other))
    assert mine.count == theirs.count
    np.testing.assert_array_equal(mine.mean, theirs.mean)
    np.testing.assert_array_equal(mine.scatter, theirs.scatter)
    assert one.manifest["identity"] == other.manifest["identity"]
    files = ("index.faiss", "documents.arrow", "whitening.safetensors")
    for name in files:
        assert (version_of(one) / name).read_bytes() == (version_of(other) / name).read_bytes()
    assert sorted(path.name for path in version_of(one).iterdir()) == sorted(
        path.name for path in version_of(other).iterdir()
    )


@pytest.mark.parametrize("factory", ["IVF16,SQ8", "HNSW8"])
def test_a_build_on_a_cluster_is_that_of_one_machine_to_the_byte(
    two_nodes, column, tmp_path, monkeypatch, factory
):
    """Also in places relative to where it was started; workers join no graph (HNSW)."""
    monkeypatch.chdir(tmp_path)
    options = {"factory": factory, "k": 12}
    here = build(column, tmp_path / "here", **options)
    there = build(column, "there", two_nodes.address, store="kept", **options)
    assert version_of(there).is_relative_to(tmp_path / "there")
    require_same(here, there)
    assert shards_of(tmp_path / "kept") == shards_of(tmp_path / "here" / "store")
    assert there.to_json()["runner"] == {"deaths": 0, "failures": 0}
    assert here.to_json()["runner"] is None
    assert not list(tmp_path.rglob(".tmp-*"))
    # It is the same build, and found to be.
    again = build(column, "there", store="kept", **options)
    assert again.up_to_date
    assert again.encoded.counts.reused == ROWS


def test_a_choice_and_a_budget_on_a_cluster(two_nodes, tmp_path, write_parquet):
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((3_000, DIM)).astype(np.float32)
    columns = {"e": pa.FixedSizeListArray.from_arrays(rows.ravel(), DIM)}
    write_parquet(tmp_path / "c.parquet", columns)
    options = {
        "id_column": None, "whiten": "auto", "factory": "IVF8,SQ8",
        "normalize_input": True, "memory_budget": "64MiB",
    }  # fmt: skip
    here, there = (
        build(tmp_path / "c.parquet", tmp_path / name, address, **options)
        for name, address in (("here", None), ("there", two_nodes.address))
    )
    require_same(here, there)
    assert here.manifest["choice"] == there.manifest["choice"]


def test_texts_are_encoded_by_workers(two_nodes, tiny_model, tmp_path, write_parquet):
    texts = [f"the {'red' if n % 3 else 'blue'} cat sat on mat {n % 50}" for n in range(300)]
    write_parquet(tmp_path / "c.parquet", {"text": texts})
    options = {
        "embedding_column": None, "id_column": None, "text_columns": ("text",), "shard_rows": 40,
        "model": str(tiny_model), "device": "cpu", "k": 8, "factory": "Flat",
    }  # fmt: skip
    here = build(tmp_path / "c.parquet", tmp_path / "here", **options)
    given = tmp_path / "there", two_nodes.address
    there = build(tmp_path / "c.parquet", *given, workers=1, **options)
    assert here.encoded.record.fingerprint == there.encoded.record.fingerprint
    for part in here.encoded.record.distinct_parts:
        mine, theirs = (
            each.encoded.store.embeddings(part)[:].astype(np.float64) for each in (here, there)
        )
        lengths = np.linalg.norm(mine, axis=1) * np.linalg.norm(theirs, axis=1)
        assert ((mine * theirs).sum(axis=1) / lengths).min() >= 0.99999
    assert there.encoded.counts.encoded == 300


# What another run changes, and digests of it.
_OF_A_RUN = {"seconds", "stage_rows", "time", "latency_ms", "throughput", "build", "digest"}
SWEEP = ("--transforms", "auto,pca", "--codecs", "fp32", "--indexes", "flat")


def lasting(found):
    """Return what is measured, but for times."""
    if isinstance(found, list):
        return [lasting(each) for each in found]
    if not isinstance(found, dict):
        return found
    return {name: lasting(each) for name, each in found.items() if name not in _OF_A_RUN}


@pytest.mark.parametrize("command", ["retrieval", "sweep"])
def test_figures_of_a_corpus_encoded_on_a_cluster_are_those_of_one_machine(
    two_nodes, tiny_model, tiny_words, tmp_path, command
):
    beir = write_judged(tmp_path / "one", tiny_words, grades=(2, 1))
    corpus = parquet_corpus(beir / "corpus.jsonl", tmp_path)
    model = ("--model", tiny_model, "--device", "cpu", "--threads", 1, "--k", 8)
    both = []
    for runner in ("local", "ray"):
        out = tmp_path / runner
        words = ["eval", "retrieval", beir, *model, "--k", 4, "--store", out]
        if command == "sweep":
            words = ["sweep", corpus, "--text-column", "text", *model, *SWEEP, "--out", out]
        on = ("--address", two_nodes.address, "--workers", 1) if runner == "ray" else ()
        said = json.loads(succeed(*words, "--runner", runner, *on, "--json"))
        assert "encode/load encoder" in said["seconds"]
        lines = (out / "results.jsonl").read_text().splitlines() if command == "sweep" else []
        both.append(list(map(json.loads, lines)) or said)
    assert lasting(both[1]) == lasting(both[0])


def test_a_shard_that_fails_is_reported_and_the_rest_is_done(
    two_nodes, column, tmp_path, write_parquet
):
    rows = np.ones((SHARD_ROWS * 4, DIM), dtype=np.float32) * np.arange(SHARD_ROWS * 4)[:, None]
    rows[SHARD_ROWS + 7, 3] = np.nan
    array = pa.FixedSizeListArray.from_arrays(rows.ravel(), DIM)
    path = tmp_path / "c.parquet"
    write_parquet(path, {"id": [str(n) for n in range(len(rows))], "e": array}, row_group_size=500)
    out = tmp_path / "out"
    status, said, err = run(
        "build", path, "--out", out, "--embedding-column", "e", "--id-column", "id",
        "--shard-rows", SHARD_ROWS, "--whiten", "pca",
        "--runner", "ray", "--address", two_nodes.address, "--json",
    )  # fmt: skip
    assert status == 12
    assert "1 shard failed (" in err
    (item,) = json.loads(said)["failed"]
    assert "c.parquet, row group 0 row 250 to row group 0 row 499" in item["name"]
    assert "NaN" in item["why"]
    assert len(shards_of(out / "store")) == 3
    assert not (out / "CURRENT").exists()
    # With bad rows skipped, only that shard is read into the store.
    report = build(path, out, two_nodes.address, on_bad_row="skip")
    assert report.encoded.counts.reused == SHARD_ROWS * 3
    assert report.encoded.counts.skipped == {"not_finite": 1}


def test_an_update_on_a_cluster_is_that_of_one_machine(two_nodes, column, tmp_path):
    corpus = shutil.copytree(column, tmp_path / "corpus")
    second = (corpus / "1.parquet").rename(tmp_path / "1.parquet")
    outs = [build(corpus, tmp_path / name, factory="IVF16,SQ8", k=12).out for name in "ab"]
    second.rename(corpus / "1.parquet")
    runners = [{}, {"runner": "ray", "address": two_nodes.address}]
    one, other = (
        update_index(UpdateConfig(index=str(out), refit="always", max_growth=4, **runner))
        for out, runner in zip(outs, runners, strict=True)
    )
    assert other.encoded.executor.remote
    assert one.encoded.record.fingerprint == other.encoded.record.fingerprint
    for name in ("index.faiss", "documents.arrow", "whitening.safetensors"):
        assert (version_of(one) / name).read_bytes() == (version_of(other) / name).read_bytes()


def test_a_cluster_that_is_started_here_has_a_token_of_its_own(column, tmp_path):
    """In a process as a user's, whose environment says nothing of Ray."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    } | {"HOME": str(home)}
    command = [
        "encode", str(column), "--store", str(tmp_path / "store"), "--embedding-column", "e",
        "--id-column", "id", "--runner", "ray", "--address", "local", "--json",
    ]  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", "from whiten_index.cli import main; main()", *command],
        capture_output=True, text=True, check=False, env=environment, timeout=150,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["counts"]["encoded"] > 0
    # One that is left there counts for every other cluster.
    assert not list(home.rglob("auth_token"))


def test_no_cluster_at_an_address(column, tmp_path):
    child = process(
        "build", column, "--embedding-column", "e", "--out", tmp_path / "out",
        "--runner", "ray", "--address", "127.0.0.1:1",
    )  # fmt: skip
    said = child.communicate()[1]
    assert (child.returncode, "127.0.0.1:1" in said) == (11, True), said
    assert not (tmp_path / "out" / "CURRENT").exists()


class Killer(threading.Thread):
    """Does something as soon as a store has so many shards."""

    def __init__(self, store, deeds):
        super().__init__(daemon=True)
        self.store, self.deeds, self.seen = store, deeds, []

    def run(self):
        for count, deed in self.deeds:
            while len(found := shards_of(self.store)) < count:
                time.sleep(0.005)
            self.seen.append({name: stamp(self.store, name) for name in found})
            deed()


def stamp(store, name):
    ((manifest),) = Path(store).glob(f"*/segments/{name}/manifest.json")
    return manifest.stat().st_mtime_ns, manifest.stat().st_ino


def workers_of(node):
    """Return the processes of a machine that do a build's work."""
    from benchmarks.local_cluster import descendants

    found = []
    for pid in descendants(node.process.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if command.startswith("ray::_Worker"):
            found.append(pid)
    return found


def test_a_worker_and_then_a_machine_die_and_nothing_shows(mortal, column, tmp_path):
    """Nothing finished is made again."""
    here = build(column, tmp_path / "here", factory="IVF16,SQ8", k=12)
    out = tmp_path / "there"

    def kill_worker():
        node = next(each for each in mortal.nodes.values() if workers_of(each))
        os.kill(workers_of(node)[0], signal.SIGKILL)

    def kill_machine():
        mortal.nodes.pop(next(iter(mortal.nodes))).kill()

    killer = Killer(out / "store", [(6, kill_worker), (12, kill_machine)])
    killer.start()
    there = build(column, out, mortal.address, factory="IVF16,SQ8", k=12)
    killer.join(30)
    require_same(here, there)
    assert len(killer.seen) == 2
    for seen in killer.seen:
        for name, before in seen.items():
            assert stamp(out / "store", name) == before
    counts = there.encoded.counts
    assert (counts.read, counts.encoded + counts.reused) == (ROWS, ROWS)
    assert there.to_json()["runner"]["deaths"] >= 1


def test_the_driver_dies_and_the_build_goes_on_with_fewer_machines_or_none(
    mortal, column, tmp_path
):
    out = tmp_path / "out"
    here = build(column, tmp_path / "here", factory="SQ8", k=12)
    command = [
        "build", str(column), "--out", str(out),
        "--embedding-column", "e", "--id-column", "id", "--shard-rows", str(SHARD_ROWS),
        "--whiten", "pca", "--factory", "SQ8", "--k", "12", "--runner", "ray",
        "--address", mortal.address,
    ]  # fmt: skip
    driver = subprocess.Popen(
        [sys.executable, "-c", "from whiten_index.cli import main; main()", *command],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while len(shards_of(out / "store")) < 4:
        time.sleep(0.005)
    driver.kill()
    driver.wait()
    time.sleep(1.0)
    before = {name: stamp(out / "store", name) for name in shards_of(out / "store")}
    assert len(before) < ROWS // SHARD_ROWS
    mortal.nodes.popitem()[1].kill()
    # The half that is there is not made again: not by a smaller cluster, nor by this machine.
    config = BuildConfig(
        corpus=(str(column / "0.parquet"),), store=str(out / "store"), runner="ray",
        address=mortal.address, **COLUMN,
    )  # fmt: skip
    encode_corpus(config)
    there = build(column, out, factory="SQ8", k=12)
    require_same(here, there)
    for name, stamped in before.items():
        assert stamp(out / "store", name) == stamped


def test_the_cluster_is_lost(mortal, column, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def lost():
        monkeypatch.setattr("whiten_index.distributed.ray_executor._SECONDS_WITHOUT_WORKER", 5.0)
        while mortal.nodes:
            mortal.nodes.popitem()[1].kill()

    killer = Killer(out / "store", [(3, lost)])
    killer.start()
    with pytest.raises(
        ClusterError, match=r"no worker could be started .* Finished shards are kept"
    ):
        build(column, out, mortal.address)
    assert len(shards_of(out / "store")) >= 3
