"""Files and folders of engines without a server: links, files of others, other processes."""

import os
import re
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.bad_input import process
from tests.vectordb.pushed_rows import Rows, contents
from tests.vectordb.writers.engines import FILES, Backend
from whiten_index import PushConfig, push_index
from whiten_index.errors import ArtifactError, ConfigError, DatabaseError
from whiten_index.vectordb.registry import open_writer


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", [b"mine" * 300, b"PAR1" * 300, b"SQLite format 3\0" * 9])
def test_a_file_of_another_format(tmp_path: Path, name: str, text: bytes) -> None:
    file = tmp_path / "docs.db"
    file.write_bytes(text)
    for make in (True, False):
        with pytest.raises(DatabaseError, match="name another file: this one has another format"):
            open_writer(f"{name}://{file}", "docs", make=make)
    assert file.read_bytes() == text


@pytest.mark.parametrize(("name", "end"), [
    ("duckdb", ".wal"), ("duckdb", ".wal.checkpoint"), ("duckdb", ".wal.recovery"),
    ("sqlite", "-wal"), ("sqlite", "-shm"), ("sqlite", "-journal"),
])  # fmt: skip
@pytest.mark.parametrize("linked", [False, True])
def test_nothing_is_written_where_a_link_leads(
    tmp_path: Path, name: str, end: str, linked: bool
) -> None:
    """The engine has its log beside the file to which a link of its name leads."""
    mine, real = tmp_path / "mine", tmp_path / "folder" / "docs.db"
    file, log = (tmp_path / "docs.db" if linked else real), real.with_name(real.name + end)
    mine.write_text("mine")
    real.parent.mkdir()
    if linked:
        file.symlink_to(real)
        with pytest.raises(ConfigError, match=r"docs\.db is a link, through which"):
            open_writer(f"{name}://{file}", "docs")
    Rows.make(20).push_to(f"{name}://{real}")
    for make, put in product((True, False), (log.symlink_to, log.hardlink_to)):
        put(mine)
        with pytest.raises(ConfigError, match=f"docs.db{end} is a link, through which"):
            open_writer(f"{name}://{file}", "docs", make=make)
        log.unlink()
    assert mine.read_text() == "mine"
    Rows.make(20).assert_held_at(f"{name}://{file}")


@pytest.mark.parametrize("scheme", ["duckdb", "sqlite", "lancedb", "qdrant"])
def test_a_push_of_no_index_makes_nothing(tmp_path: Path, scheme: str) -> None:
    config = PushConfig(index=str(tmp_path / "no"), to=f"{scheme}://{tmp_path}/new", table="docs")
    with pytest.raises(ArtifactError, match="no does not exist; check the path"):
        push_index(config)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def own_folder(embedded: Backend) -> Path:
    """The folder of an engine that fills it; it is not there yet."""
    if embedded.folder.exists():
        pytest.skip("it has a file")
    embedded.folder.mkdir()
    return embedded.folder


def test_reading_makes_nothing(embedded: Backend, tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"is not there, or .*; look at the path"):
        open_writer(embedded.address, "docs", make=False)
    assert [each.name for each in tmp_path.rglob("*")] == ["embedded"]
    rows = Rows.make(50)
    rows.push_to(embedded.address)
    before = contents(embedded.folder)
    assert before
    with open_writer(embedded.address, "docs", make=False) as writer:
        rows.assert_clean(writer)
    with open_writer(embedded.address, "others", make=False) as writer:
        assert writer.published() is None
    assert contents(embedded.folder) == before


@pytest.mark.parametrize("there", ["corpus.parquet", "meta.txt"])
def test_a_folder_of_other_files_is_left_alone(
    embedded: Backend, own_folder: Path, there: str
) -> None:
    (own_folder / there).write_text("mine")
    with pytest.raises(ConfigError, match=f"other files than those of .*, such as '{there}'"):
        embedded.open()
    assert [each.name for each in own_folder.iterdir()] == [there]


def test_a_folder_with_a_link_is_refused(
    embedded: Backend, own_folder: Path, tmp_path: Path
) -> None:
    """LanceDB fills and drops a table wherever a link of its name leads, others files."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "photo").write_text("mine")
    rows = Rows.make(20)
    rows.push_to(embedded.address)
    there = next(filter(Path.is_dir, own_folder.iterdir()))
    for link, target in (
        (own_folder / "docs__pending.lance", mine), (there / "data2", mine),
        (there / "manifest.json.prev", mine / "photo"), (own_folder / "lock", mine / "missing"),
    ):  # fmt: skip
        link.symlink_to(target)
        for make in (True, False):
            with pytest.raises(ConfigError, match=f"{link.name} is a link, through which the eng"):
                open_writer(embedded.address, "docs", make=make)
        link.unlink()
    assert [each.name for each in mine.iterdir()] == ["photo"]
    with embedded.open() as writer:
        rows.assert_held(writer)


def test_hidden_files_and_ones_of_the_system_do_not_matter(
    embedded: Backend, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as ``lost+found``, which the system lets nobody else read."""
    for name in (".DS_Store", "lost+found"):
        (own_folder / name).mkdir()
    listed = os.scandir

    def scandir(folder: Path) -> object:
        if Path(folder).name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    rows = Rows.make(20)
    with embedded.open() as writer:
        rows.fill(writer)
        rows.assert_held(writer)


def test_a_second_process_is_refused_or_sees_the_same(embedded: Backend) -> None:
    """The engine is free again once the writer is closed, and nothing is written to stderr."""
    code = (
        "from whiten_index.vectordb.registry import open_writer\n"
        f"with open_writer({embedded.address!r}, 'docs') as writer: print(writer.count())\n"
    )
    with embedded.open() as writer:
        Rows.make(50).fill(writer)
        with process(code=code) as child:
            out, err = child.communicate(timeout=60)
    if child.returncode:
        assert re.search("(one process|takes one) at a time", err)
    else:
        assert out.split() == ["50"]
    with process(code=code) as child:
        out, err = child.communicate(timeout=60)
    assert (out.split(), err) == (["50"], "")
