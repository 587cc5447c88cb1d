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

from tests.helpers.bad_input import process
from whiten_index import BuildConfig
from whiten_index.errors import ClusterError, PartialFailureError
from whiten_index.pipeline.build import build_index
from whiten_index.pipeline.encode import encode_corpus
from whiten_index.pipeline.update import update_index
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.whitening.moments import Moments

pytestmark = pytest.mark.service
ROWS, DIM, SHARD_ROWS = 6_000, 24, 250
COLUMN = {"embedding_column": "e", "id_column": "id", "shard_rows": SHARD_ROWS, "whiten": "pca"}
FACTORIES = ["IVF16,SQ8", "IVF16,PQ6x4fs", "HNSW8"]


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


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_build_on_a_cluster_is_that_of_one_machine_to_the_byte(
    three_nodes, column, tmp_path, factory
):
    options = {"factory": factory, "k": 12}
    here = build(column, tmp_path / "here", **options)
    there = build(column, tmp_path / "there", three_nodes.address, **options)
    require_same(here, there)
    assert there.to_json()["runner"] == {"deaths": 0, "failures": 0}
    assert here.to_json()["runner"] is None
    assert not list((tmp_path / "there").rglob(".tmp-*"))
    # It is the same build, and found to be.
    again = build(column, tmp_path / "there", **options)
    assert again.up_to_date
    assert again.encoded.counts.reused == ROWS


def test_a_choice_and_a_budget_on_a_cluster(three_nodes, tmp_path, write_parquet):
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
        for name, address in (("here", None), ("there", three_nodes.address))
    )
    require_same(here, there)
    assert here.manifest["choice"] == there.manifest["choice"]


def test_texts_are_encoded_by_workers(three_nodes, tiny_model, tmp_path, write_parquet):
    texts = [f"the {'red' if n % 3 else 'blue'} cat sat on mat {n % 50}" for n in range(300)]
    write_parquet(tmp_path / "c.parquet", {"text": texts})
    options = {
        "embedding_column": None, "id_column": None, "text_columns": ("text",), "shard_rows": 40,
        "model": str(tiny_model), "device": "cpu", "k": 8, "factory": "Flat",
    }  # fmt: skip
    here = build(tmp_path / "c.parquet", tmp_path / "here", **options)
    there = build(tmp_path / "c.parquet", tmp_path / "there", three_nodes.address, **options)
    assert here.encoded.record.fingerprint == there.encoded.record.fingerprint
    for part in here.encoded.record.distinct_parts:
        mine, theirs = (
            each.encoded.store.embeddings(part)[:].astype(np.float64) for each in (here, there)
        )
        lengths = np.linalg.norm(mine, axis=1) * np.linalg.norm(theirs, axis=1)
        assert ((mine * theirs).sum(axis=1) / lengths).min() >= 0.99999
    assert there.encoded.counts.encoded == 300


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


def survives(made, corpus, tmp_path, here):
    """Build while a worker and then a machine are killed; nothing finished is made again."""
    out = tmp_path / "there"

    def kill_worker():
        node = next(each for each in made.nodes.values() if workers_of(each))
        os.kill(workers_of(node)[0], signal.SIGKILL)

    def kill_machine():
        made.nodes.pop(next(iter(made.nodes))).kill()

    killer = Killer(out / "store", [(6, kill_worker), (12, kill_machine)])
    killer.start()
    there = build(corpus, out, made.address, factory="IVF16,SQ8", k=12)
    killer.join(30)
    require_same(here, there)
    assert len(killer.seen) == 2
    for seen in killer.seen:
        for name, before in seen.items():
            assert stamp(out / "store", name) == before
    counts = there.encoded.counts
    assert (counts.read, counts.encoded + counts.reused) == (ROWS, ROWS)
    assert there.to_json()["runner"]["deaths"] >= 1
    return there


def test_a_worker_and_then_a_machine_die_and_nothing_shows(make_cluster, column, tmp_path):
    here = build(column, tmp_path / "here", factory="IVF16,SQ8", k=12)
    survives(make_cluster(nodes=3), column, tmp_path, here)


def test_the_driver_dies_and_the_build_goes_on_with_fewer_machines_or_none(
    make_cluster, column, tmp_path
):
    made, out = make_cluster(nodes=2), tmp_path / "out"
    here = build(column, tmp_path / "here", factory="SQ8", k=12)
    command = [
        "build", str(column), "--out", str(out),
        "--embedding-column", "e", "--id-column", "id", "--shard-rows", str(SHARD_ROWS),
        "--whiten", "pca", "--factory", "SQ8", "--k", "12", "--runner", "ray",
        "--address", made.address,
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
    made.nodes.pop("node0").kill()
    # The half that is there is not made again: not by a smaller cluster, nor by this machine.
    config = BuildConfig(
        corpus=(str(column / "0.parquet"),), store=str(out / "store"), runner="ray",
        address=made.address, **COLUMN,
    )  # fmt: skip
    encode_corpus(config)
    there = build(column, out, factory="SQ8", k=12)
    require_same(here, there)
    for name, stamped in before.items():
        assert stamp(out / "store", name) == stamped


def test_a_shard_that_fails_is_reported_and_the_rest_is_done(
    three_nodes, column, tmp_path, write_parquet
):
    rows = np.ones((SHARD_ROWS * 4, DIM), dtype=np.float32) * np.arange(SHARD_ROWS * 4)[:, None]
    rows[SHARD_ROWS + 7, 3] = np.nan
    array = pa.FixedSizeListArray.from_arrays(rows.ravel(), DIM)
    path = tmp_path / "c.parquet"
    write_parquet(path, {"id": [str(n) for n in range(len(rows))], "e": array}, row_group_size=500)
    out = tmp_path / "out"
    with pytest.raises(PartialFailureError, match=r"1 shard failed \(") as raised:
        build(path, out, three_nodes.address)
    assert raised.value.exit_code == 12
    ((item),) = raised.value.items
    assert "c.parquet, row group 0 row 250 to row group 0 row 499" in item["name"]
    assert "NaN" in item["why"]
    assert len(shards_of(out / "store")) == 3
    assert not (out / "CURRENT").exists()
    # With bad rows skipped, only that shard is read into the store.
    report = build(path, out, three_nodes.address, on_bad_row="skip")
    assert report.encoded.counts.reused == SHARD_ROWS * 3
    assert report.encoded.counts.skipped == {"not_finite": 1}


@pytest.mark.parametrize("refit", ["never", "always"])
def test_an_update_on_a_cluster_is_that_of_one_machine(three_nodes, column, tmp_path, refit):
    corpus = shutil.copytree(column, tmp_path / "corpus")
    second = (corpus / "1.parquet").rename(tmp_path / "1.parquet")
    outs = [build(corpus, tmp_path / name, factory="IVF16,SQ8", k=12).out for name in "ab"]
    second.rename(corpus / "1.parquet")
    runners = [{}, {"runner": "ray", "address": three_nodes.address}]
    one, other = (
        update_index(UpdateConfig(index=str(out), refit=refit, max_growth=4, **runner))
        for out, runner in zip(outs, runners, strict=True)
    )
    assert other.encoded.executor.remote
    assert one.encoded.record.fingerprint == other.encoded.record.fingerprint
    for name in ("index.faiss", "documents.arrow", "whitening.safetensors"):
        assert (version_of(one) / name).read_bytes() == (version_of(other) / name).read_bytes()


def test_the_command_line_reports_shards_that_failed(three_nodes, tmp_path, write_parquet):
    rows = np.full((4, DIM), np.nan, dtype=np.float32)
    array = pa.FixedSizeListArray.from_arrays(rows.ravel(), DIM)
    write_parquet(tmp_path / "c.parquet", {"e": array})
    child = process(
        "encode", tmp_path / "c.parquet", "--store", tmp_path / "store", "--embedding-column", "e",
        "--runner", "ray", "--address", three_nodes.address, "--json",
    )  # fmt: skip
    out, err = child.communicate()
    assert child.returncode == 12, err
    assert "1 shard failed" in err
    report = json.loads(out)
    assert "row group 0 row 0" in report["failed"][0]["name"]


def test_the_cluster_is_lost(make_cluster, column, tmp_path, monkeypatch):
    made = make_cluster(nodes=1)
    out = tmp_path / "out"

    def lost():
        monkeypatch.setattr("whiten_index.distributed.ray_executor._SECONDS_WITHOUT_WORKER", 5.0)
        made.nodes["node0"].kill()

    killer = Killer(out / "store", [(3, lost)])
    killer.start()
    with pytest.raises(
        ClusterError, match=r"no worker could be started .* Finished shards are kept"
    ):
        build(column, out, made.address)
    assert len(shards_of(out / "store")) >= 3


def test_places_relative_to_where_the_build_was_started(three_nodes, column, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = build(column, "out", three_nodes.address, factory="IVF16,SQ8", k=12, store="kept")
    here = build(column, tmp_path / "here", factory="IVF16,SQ8", k=12)
    assert version_of(there).is_relative_to(tmp_path / "out")
    require_same(here, there)
    assert shards_of(tmp_path / "kept") == shards_of(tmp_path / "here" / "store")


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
