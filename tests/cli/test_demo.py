"""The demo finds docstrings on this machine, indexes them, and says how to see more."""

import gzip
import os
import shutil
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import fails, succeed
from whiten_index import open_index
from whiten_index.cli.demo import docstrings


def test_docstrings_are_of_public_names_and_come_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The packages of this machine may be many. They are below the standard library.
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for module in Path(gzip.__file__).parent.glob("[c-g]*.py"):
        shutil.copy(module, tmp_path)
    (packages / "installed.py").write_text(f'def shown():\n    """{"A package. " * 9}"""\n')
    places = {"stdlib": str(tmp_path), "purelib": str(packages)}
    monkeypatch.setattr(sysconfig, "get_path", places.get)
    found = docstrings(100_000)
    names = [row["name"] for row in found]
    assert 300 < len(names) == len(set(names))
    assert docstrings(200) == found[:200]
    own = {row["name"]: row["text"] for row in found}
    assert own["installed.shown"].startswith("A package. A package.")
    assert not any("site-packages" in name for name in names)
    assert own["gzip.open"].startswith(gzip.open.__doc__.strip()[:40])
    assert not any(part.startswith("_") for name in names for part in name.split(".")[-1:])


@pytest.mark.parametrize("place", ["s3://bucket/demo", "folder"])
def test_the_demo_needs_a_folder_and_writes_into_no_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "docstrings.parquet")
    reader = os.open(tmp_path / "folder" / "docstrings.parquet", os.O_RDONLY | os.O_NONBLOCK)
    fails(2, "Error:", "demo", place, "--rows", 1000)
    os.close(reader)


@pytest.mark.parametrize("name", ["docstrings.parquet", "index"])
def test_the_demo_leaves_what_is_not_its_own(tmp_path: Path, name: str) -> None:
    own = tmp_path / name
    own.write_bytes(b"PAR1")
    if name == "docstrings.parquet":
        pq.write_table(pa.table({"name": ["a"], "text": ["b"]}), own)
    before = own.read_bytes()
    fails(2, "is left as it is; name another", "demo", tmp_path, "--rows", 1000)
    assert own.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.slow
def test_the_demo_publishes_an_index(tmp_path: Path) -> None:
    printed = succeed("demo", tmp_path / "d", "--rows", 1000)
    assert f"whiten-index serve {tmp_path / 'd' / 'index'}" in printed
    assert len(open_index(tmp_path / "d" / "index")) == 1_000
    # A demo is made again where one is.
    succeed("demo", tmp_path / "d", "--rows", 1100)
