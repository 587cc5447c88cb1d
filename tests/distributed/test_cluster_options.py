"""Options of clusters, and the check that all machines see the same folders."""

import os
import signal
import socket
import sys
from multiprocessing import Process
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from whiten_index import BuildConfig, build_index
from whiten_index.cli import cli
from whiten_index.errors import ClusterError, ConfigError, CorpusError, StorageError
from whiten_index.pipeline.executor_session import _shared_folders


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "dask"}, "--runner 'dask' is unknown; use local, ray"),
        ({"address": "auto"}, "--address belongs to a cluster; add --runner ray"),
        ({"address": "auto", "workers": 2}, "--address and --workers belongs to a cluster"),
        ({"runner": "ray", "address": ""}, "--address is empty; name the head"),
        (
            {"runner": "ray", "workers": 0},
            "--workers takes a value greater than or equal to 1; 0 was given",
        ),
    ],
)
def test_options_that_cannot_be_used_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildConfig(corpus=("c.parquet",), embedding_column="e", store="s", **options)


def test_who_did_the_work_is_no_part_of_what_was_made() -> None:
    config = BuildConfig(
        corpus=("c",), embedding_column="e", store="s", runner="ray", address="auto", workers=3
    )
    same = BuildConfig(corpus=("c",), embedding_column="e", store="s")
    assert config.to_json() == same.to_json()


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_parquet: Any
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    rows = np.eye(4, dtype=np.float32)
    column = pa.FixedSizeListArray.from_arrays(rows.ravel(), 4)
    corpus = write_parquet(tmp_path / "c.parquet", {"e": column})
    command = ["encode", str(corpus), "--embedding-column", "e", "--runner", "ray"]
    done = CliRunner().invoke(cli, [*command, "--store", str(tmp_path / "store")])
    assert done.exit_code == 2
    assert "pip install 'whiten-index[ray]'" in done.output


def config(folder: Path, **options: Any) -> BuildConfig:
    options = {
        "corpus": ("c",),
        "out": str(folder / "out"),
        "store": str(folder / "deep/store"),
    } | options
    return BuildConfig(embedding_column="e", runner="ray", **options)


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    with _shared_folders(config(tmp_path)) as check:
        check()
        (probe,) = (tmp_path / "out").iterdir()
        probe.rename(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match="a disk that all its machines mount at the same"):
            check()


def test_what_a_killed_build_left_in_its_folders_is_removed(tmp_path: Path) -> None:
    child = Process(target=kill_in_session, args=(config(tmp_path),))
    child.start()
    child.join()
    assert list(tmp_path.glob("**/.tmp-*"))
    with _shared_folders(config(tmp_path)):
        pass
    assert not list(tmp_path.glob("**/.tmp-*"))


def kill_in_session(options: BuildConfig) -> None:
    with _shared_folders(options):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_corpus_that_a_worker_cannot_reach(tmp_path: Path) -> None:
    said = r"gone.parquet of the corpus is not there.*ray start has"
    corpus = (f"file://{tmp_path}/gone.parquet",)
    with (
        _shared_folders(config(tmp_path, corpus=corpus)) as check,
        pytest.raises(CorpusError, match=said),
    ):
        check()


@pytest.mark.service
def test_a_head_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whiten_index.distributed.ray_executor._SECONDS_TO_CONNECT", 0.5)
    pq.write_table(pa.table({"e": [[0.0, 1.0]]}), tmp_path / "c.parquet")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"no Ray cluster can be reached at {address}"):
            build_index(config(tmp_path, corpus=(str(tmp_path),), address=address))
