"""A file of the corpus that is written while a command reads it: refused, or wholly old or new.

The file that takes its place has the same size, time and footer, as ``rsync -t``, ``cp -p`` and
``tar`` may leave it. It comes after any number of calls into pyarrow's reader of Parquet.
"""

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import random_rows
from tests.helpers.corpora import read_all
from whiten_index import BuildConfig, build_index, encode_corpus, open_index
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.errors import CorpusError
from whiten_index.pipeline.update import update_index
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.training.train import read_sentences

ROWS = 160
# Shares of the calls: the first ones read footers, the last ones rows.
MOMENTS = (0.0, 0.6, 0.85, 1.0)
WHEN = 1_700_000_000 * 10**9
PLAIN = {"compression": "none", "use_dictionary": False, "write_statistics": False}
WATCHED = f"{os.sep}pyarrow{os.sep}parquet"
Swap = Callable[[Path, bytes], None]


def content(kind: str, seed: int, *, start: int = ROWS) -> bytes:
    """Return a Parquet file of several row groups, with a size that no seed changes."""
    rows = random_rows(seed, rows=ROWS, dim=8)
    if kind == "text":
        words = ["apple", "bread", "crane", "drake", "eagle", "flame", "grape", "house"]
        texts = [" ".join(words[i] for i in np.argsort(row)) for row in rows]
        columns: dict[str, Any] = {"text": texts}
    else:
        columns = {"embedding": list(rows)}
    sink = pa.BufferOutputStream()
    table = pa.table({"id": np.arange(start, start + ROWS), **columns})
    pq.write_table(table, sink, row_group_size=45, **PLAIN)
    return bytes(sink.getvalue())


def rename(path: Path, data: bytes) -> None:
    other = path.with_name("_coming")
    other.write_bytes(data)
    os.utime(other, ns=(WHEN, WHEN))
    other.replace(path)


def overwrite(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(WHEN, WHEN))


SWAPS: dict[str, Swap] = {"renamed": rename, "in place": overwrite}


@dataclass
class Clock:
    """Counts calls into pyarrow's reader of Parquet, and does something at one of them."""

    at: int = -1
    what: Callable[[], None] = lambda: None
    calls: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event != "call" or WATCHED not in frame.f_code.co_filename:
            return
        with self._lock:
            self.calls += 1
            due = self.calls == self.at
        if due:
            self.what()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


@dataclass
class World:
    """A folder with a corpus of two files and an index of it, as some night found them."""

    root: Path
    options: dict[str, Any]

    @property
    def file(self) -> Path:
        return self.root / "corpus" / "b.parquet"

    def build(self) -> None:
        build_index(
            BuildConfig(
                corpus=(str(self.root / "corpus"),), out=str(self.root / "index"), id_column="id",
                k=6, whiten="whitening", shard_rows=50, threads=1, **self.options,
            )
        )  # fmt: skip

    def run(self, command: str) -> None:
        if command == "build":
            self.build()
        elif command == "update":
            update_index(UpdateConfig(index=str(self.root / "index"), threads=1))
        else:
            store = str(self.root / "store")
            given = {"id_column": "id", "shard_rows": 50, "threads": 1, **self.options}
            encode_corpus(BuildConfig(corpus=(str(self.root / "corpus"),), store=store, **given))
            build_index(
                BuildConfig(store=store, out=str(self.root / "index"), k=6, whiten="whitening")
            )

    def answers(self) -> list[Any]:
        queries = random_rows(7, rows=5, dim=8 if "embedding_column" in self.options else 32)
        found = open_index(self.root / "index").search_embeddings(queries, top_k=2 * ROWS)
        return [sorted((hit.id, round(hit.score, 4)) for hit in each) for each in found]

    def reset(self, data: bytes) -> None:
        """Go back to the first night, but for the content of the file."""
        shutil.rmtree(self.root)
        shutil.copytree(self.root.with_name("saved"), self.root)
        rename(self.file, data)


@dataclass
class Case:
    """A command, the two contents of the file, and what each of them should come to."""

    command: str
    world: World
    old: bytes
    new: bytes
    calls: int = 0
    before: list[Any] = field(default_factory=list)
    allowed: list[Any] = field(default_factory=list)


@pytest.fixture(scope="module", params=["build", "update", "encode", "text build"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Any
) -> Case:
    root, kind = tmp_path_factory.mktemp("base"), "embedding"
    command, options = request.param, {"embedding_column": "embedding"}
    if command.startswith("text"):
        kind, command = "text", command.split()[1]
        options = {"text_columns": ("text",), "model": str(tiny_model), "device": "cpu"}
    world = World(root / "world", options)
    (world.root / "corpus").mkdir(parents=True)
    (world.root / "corpus" / "a.parquet").write_bytes(content(kind, 0, start=0))
    rename(world.file, content(kind, 1))
    world.build()
    shutil.copytree(world.root, root / "saved")
    made = Case(command, world, content(kind, 2), content(kind, 3), before=world.answers())
    assert len(made.old) == len(made.new)
    for data in (made.old, made.new):
        clock = Clock()
        world.reset(data)
        with clock.running():
            world.run(command)
        made.allowed.append(world.answers())
        made.calls = clock.calls
    assert made.allowed[0] != made.allowed[1] != made.before
    return made


@pytest.mark.parametrize("how", SWAPS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_file_that_changes_at_any_moment_is_never_published_as_a_mixture(
    case: Case, moment: float, how: str
) -> None:
    world = case.world
    world.reset(case.old)
    at = 1 + int(moment * (case.calls - 1))
    clock = Clock(at, lambda: SWAPS[how](world.file, case.new))
    refused = None
    try:
        with clock.running():
            world.run(case.command)
    except CorpusError as error:
        refused = error
    if refused is None:
        assert world.answers() in case.allowed
        return
    assert refused.exit_code == 3
    assert "changed while it was read; run the same command again" in str(refused)
    assert world.answers() == case.before
    world.run(case.command)
    assert world.answers() == case.allowed[1]


def test_another_file_while_one_is_opened_is_never_read(tmp_path, monkeypatch):
    """A link leads to other files for that moment: each looks unchanged before and after."""
    for name, start in (("old", 0), ("new", 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.parquet").write_bytes(content("embedding", 1, start=start))

    def lead(name: str) -> None:
        (tmp_path / "link").symlink_to(name)
        (tmp_path / "link").replace(tmp_path / "corpus")

    class Moved(pafs.LocalFileSystem):
        def open_input_file(self, path: str) -> pa.NativeFile:
            lead("new")
            opened = super().open_input_file(path)
            lead("old")
            return opened

    lead("old")
    monkeypatch.setattr(pafs, "LocalFileSystem", Moved)
    named = {"embedding_column": "embedding", "id_column": "id"}
    corpus = ParquetCorpus.open(CorpusConfig(sources=(str(tmp_path / "corpus"),), **named))
    assert list(corpus.ids()) == list(range(ROWS))


@pytest.mark.parametrize("read", [lambda corpus: read_sentences(corpus, batch_size=2), read_all])
def test_texts_of_files_that_were_never_there_together_are_refused(tmp_path, monkeypatch, read):
    for name in ("a", "b"):
        (tmp_path / f"{name}.parquet").write_bytes(content("text", 1))
    config = CorpusConfig(sources=(str(tmp_path),), text_columns=("text",))
    corpus, read_shard = ParquetCorpus.open(config), ParquetCorpus.read

    def late(self: ParquetCorpus, shard: Any) -> Any:
        if shard.file == 1:
            rename(tmp_path / "a.parquet", content("text", 2))
        return read_shard(self, shard)

    monkeypatch.setattr(ParquetCorpus, "read", late)
    with pytest.raises(CorpusError, match="changed while it was read"):
        read(corpus)
