"""Pushes of passages, of integer ids and of text: from an encoded corpus to a database."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import build_texts
from tests.vectordb.memory_writer import MemoryWriter, Server
from whiten_index import PushConfig, UpdateConfig, open_index, push_index, update_index
from whiten_index.vectordb.push import PushReport


class World:
    """A corpus of texts with integer ids, its index of passages and a database."""

    def __init__(self, root: Path, model: Path, words: tuple[str, ...]) -> None:
        self.root, self.model, self.server = root, model, Server()
        rng = np.random.default_rng(0)
        sizes = rng.integers(3, 40, size=60)
        self.texts = {
            10 * number: " ".join(rng.choice(words[:40], size=size))
            for number, size in enumerate(sizes)
        }

    def write(self) -> str:
        path = self.root / "c.parquet"
        table = {"id": pa.array(list(self.texts), pa.int32()), "text": list(self.texts.values())}
        pq.write_table(pa.table(table), path)
        return str(path)

    def build(self, **options: Any) -> None:
        options = {"id_column": "id", "store_dtype": "float32", **options}
        build_texts(self.root / "index", self.write(), self.model, **options)

    def update(self) -> None:
        self.write()
        update_index(UpdateConfig(index=str(self.root / "index"), refit="never", max_shrink=1.0))

    def push(self, **options: Any) -> PushReport:
        given = {"to": "postgresql://me@here/db", "table": "docs", "batch_rows": 32} | options
        return push_index(PushConfig(index=str(self.root / "index"), **given))

    def assert_same(self) -> None:
        """The database has the rows of the index: ids, columns and what the index finds."""
        table = self.server.published
        assert table is not None
        bundle = open_index(self.root / "index").bundle
        documents = [bundle.documents.get(row) for row in range(len(bundle.documents))]
        names = [name for name in table.layout.schema.names if name != "vector"]
        there = [{name: row[name] for name in names} for row in table.rows.values()]
        order = sorted(documents, key=lambda row: [row[name] for name in table.layout.key])
        assert sorted(there, key=lambda row: [row[name] for name in table.layout.key]) == order
        assert {type(row["id"]) for row in there} == {int}


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tiny_words: tuple[str, ...]
) -> World:
    made = World(tmp_path, tiny_model, tiny_words)
    monkeypatch.setattr(
        "whiten_index.vectordb.push.open_writer", lambda *_, **__: MemoryWriter(made.server)
    )
    return made


def test_passages(world: World) -> None:
    world.build(passage_tokens=14, overlap=2)
    first = world.push()
    assert first.rows > len(world.texts)
    assert world.server.published is not None
    assert world.server.published.layout.key == ("id", "passage")
    world.assert_same()
    # One document has fewer passages than before, one more, one is new and one is gone.
    sizes = {name: len(text.split()) for name, text in world.texts.items()}
    longest, shortest = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
    world.texts[longest] = "cat sat"
    world.texts[shortest] = " ".join(["old king", *["walks north"] * 12])
    world.texts[7] = "red bird"
    gone = next(name for name in world.texts if name not in (longest, shortest))
    del world.texts[gone]
    world.update()
    report = world.push()
    assert (report.mode, report.deleted) == ("changes", 1)
    world.assert_same()
    assert report.rows == world.server.published.pushed.rows


def test_the_tenth_is_of_rows(world: World) -> None:
    """A few long documents may be many passages."""
    world.build(passage_tokens=14, overlap=2)
    first = world.push()
    sizes = {name: len(text.split()) for name, text in world.texts.items()}
    longest = sorted(sizes, key=sizes.__getitem__)[-5:]
    for name in longest:
        world.texts[name] = world.texts[name] + " bread wine"
    world.update()
    report = world.push()
    assert len(longest) < 0.1 * first.rows
    assert (report.mode, report.why[:17]) == ("all", "more than a tenth")
    world.assert_same()
