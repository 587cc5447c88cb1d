"""Builds by workers of a cluster on this machine equal those without one."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
import pytest

from tests.acceptance.commands import done, run
from tests.acceptance.vectors import OPTIONS, assert_searches, search, some, write_corpus

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a cluster of two machines, which are processes on this one."""
    ray = Path(sys.executable).with_name("ray")
    # A secret of this run, so that nobody else on this machine may give it work.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{probe.getsockname()[1]}"
    log = tmp_path_factory.mktemp("cluster") / "log"
    orders = (
        ("--head", f"--port={address.split(':')[1]}", "--node-ip-address=127.0.0.2",
         "--num-cpus=0", "--include-dashboard=false"),
        (f"--address={address}", "--node-ip-address=127.0.0.3", "--num-cpus=1"),
        (f"--address={address}", "--node-ip-address=127.0.0.4", "--num-cpus=1"),
    )  # fmt: skip
    machines = []
    with log.open("wb") as file:
        for number, order in enumerate(orders):
            machines.append(
                subprocess.Popen(
                    [ray, "start", "--block", "--num-gpus=0", "--disable-usage-stats",
                     "--object-store-memory=80000000", *order],
                    stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                )
            )  # fmt: skip
            deadline = time.monotonic() + 120
            while log.read_text(errors="replace").count("Ray runtime started") <= number:
                assert machines[-1].poll() is None, log.read_text(errors="replace")
                assert time.monotonic() < deadline
                time.sleep(0.1)
    yield address
    for machine in reversed(machines):
        machine.terminate()
    for machine in machines:
        machine.wait(timeout=60)


def read_index(index: Path) -> faiss.Index:
    version = json.loads((index / "CURRENT").read_text())["version"]
    return faiss.read_index(str(index / "versions" / version / "index.faiss"))


def test_a_build_on_a_cluster_equals_one_without(cluster: str, tmp_path: Path) -> None:
    rows, queries = some(600), some(20, "query").rows
    command = ("build", write_corpus(tmp_path / "corpus", rows), *OPTIONS, "--shard-rows", 100)
    ray = ("--runner", "ray", "--address", cluster)
    report = json.loads(done(*command, "--out", tmp_path / "ray", *ray, "--json"))
    assert report["counts"]["encoded"] == 600
    done(*command, "--out", tmp_path / "local")
    assert_searches(tmp_path / "ray", rows, tmp_path)
    there, here = read_index(tmp_path / "ray"), read_index(tmp_path / "local")
    assert there.ntotal == here.ntotal == 600
    scores, found = there.search(queries, 10)
    expected, near_here = here.search(queries, 10)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_array_equal(found, near_here)
    near = search(tmp_path / "local", queries, tmp_path)
    assert search(tmp_path / "ray", queries, tmp_path) == near


def test_one_machine_goes_on_with_what_a_cluster_began(cluster: str, tmp_path: Path) -> None:
    """Nothing is encoded twice, whoever did it first."""
    rows = some(600)
    corpus, store = write_corpus(tmp_path / "corpus", rows), tmp_path / "store"
    columns = ("--embedding-column", "embedding", "--id-column", "id")
    ray = ("--runner", "ray", "--address", cluster)
    done("encode", corpus, *columns, "--store", store, "--shard-rows", 100, *ray)
    command = ("build", corpus, *OPTIONS, "--shard-rows", 100, "--store", store, "--json")
    report = json.loads(done(*command, "--out", tmp_path / "index"))
    assert (report["counts"]["encoded"], report["counts"]["reused"]) == (0, 600)
    assert_searches(tmp_path / "index", rows, tmp_path)
    again = json.loads(done(*command, "--out", tmp_path / "index", *ray))
    assert again["up_to_date"]


def test_no_cluster_at_an_address(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "corpus", some(100)), tmp_path / "index"
    ray = ("--runner", "ray", "--address", "127.0.0.1:1")
    ended = run("build", corpus, *OPTIONS, "--out", out, *ray)
    assert ended.status == 11, ended.err
    assert "127.0.0.1:1" in ended.err
    assert not (out / "CURRENT").exists()
