"""What is said of a cluster on the command line and in a job; no cluster is needed for it."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from whiten_index import BuildConfig
from whiten_index.cli import cli
from whiten_index.errors import ConfigError, CorpusError, StorageError
from whiten_index.workers import _require_shared, _shared


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "dask"}, "--runner 'dask' is unknown; use local, ray"),
        ({"address": "auto"}, "--address belongs to a cluster; add --runner ray"),
        ({"address": "auto", "workers": 2}, "--address and --workers belongs to a cluster"),
        ({"runner": "ray", "address": ""}, "--address is empty; name the head"),
        ({"runner": "ray", "workers": 0}, "--workers takes 1 or more; 0 was given"),
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
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "ray" or name.startswith("ray."):
            raise ImportError(name)
        return real(name, *arguments, **options)

    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    rows = np.eye(4, dtype=np.float32)
    column = pa.FixedSizeListArray.from_arrays(rows.ravel(), 4)
    corpus = write_parquet(tmp_path / "c.parquet", {"e": column})
    command = ["encode", str(corpus), "--embedding-column", "e", "--runner", "ray"]
    done = CliRunner().invoke(cli, [*command, "--store", str(tmp_path / "store")])
    assert done.exit_code == 2
    assert "pip install 'whiten-index[ray]'" in done.output


def test_a_job_file_names_a_cluster(tmp_path: Path, write_parquet: Any) -> None:
    rows = np.eye(4, dtype=np.float32)
    column = pa.FixedSizeListArray.from_arrays(rows.ravel(), 4)
    corpus = write_parquet(tmp_path / "c.parquet", {"e": column})
    job = tmp_path / "job.toml"
    job.write_text(
        f"corpus = {json.dumps(str(corpus))}\nembedding-column = 'e'\nworkers = 2\n"
        f"store = {json.dumps(str(tmp_path / 'store'))}\n"
    )
    done = CliRunner().invoke(cli, ["encode", "--config", str(job)])
    assert done.exit_code == 2
    assert "--workers belongs to a cluster" in done.output


def test_folders_that_are_shared_are_found_to_be_and_nothing_is_left(tmp_path: Path) -> None:
    folders = [tmp_path / "out", tmp_path / "deep" / "store"]
    with _shared(folders) as check:
        check()
    assert all(list(folder.iterdir()) == [] for folder in folders)


def test_a_folder_that_is_another_one_there_is_told(tmp_path: Path) -> None:
    with _shared([tmp_path / "store"]) as check:
        (probe,) = (tmp_path / "store").iterdir()
        probe.write_text("of another build")
        with pytest.raises(StorageError, match="is not the folder that the build was started"):
            check()
        probe.unlink()
        with pytest.raises(StorageError, match="a disk that all its machines mount at the same"):
            check()
    with pytest.raises(StorageError):
        _require_shared((tmp_path / "nowhere" / "probe",), "token")


def test_a_corpus_at_a_uri_that_a_worker_cannot_reach_is_told(tmp_path: Path) -> None:
    (tmp_path / "c.parquet").write_bytes(b"")
    with _shared(
        [], remote=(f"file://{tmp_path}/c.parquet", f"file://{tmp_path}/*.parquet")
    ) as check:
        check()
    said = r"gone.parquet of the corpus is not there.*ray start has"
    with (
        _shared([], remote=(f"file://{tmp_path}/gone.parquet",)) as check,
        pytest.raises(CorpusError, match=said),
    ):
        check()
