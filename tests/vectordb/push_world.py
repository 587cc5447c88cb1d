"""A corpus, its index and a database in memory, for tests of a push."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import build
from tests.vectordb.memory_writer import MemoryWriter, Server, Table
from whiten_index import PushConfig, UpdateConfig, Whitening, push_index, update_index
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.push import PushReport

ROWS, DIM, K = 300, 16, 8
# The writer of this address is replaced.
HERE = "postgresql://me@here/db"


class World:
    """A corpus, its index and a database."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.server, self.monkeypatch = root, Server(), monkeypatch
        self.opened = list[dict[str, str]]()
        rng = np.random.default_rng(0)
        self.rows = {f"d{i}": (rng.standard_normal(DIM).astype("f4"), i) for i in range(ROWS)}
        monkeypatch.setattr("whiten_index.vectordb.push.open_writer", self._connect)

    def _connect(
        self, address: str, name: str, *, options: dict[str, str], make: bool = True
    ) -> MemoryWriter:
        assert (address, name) == (HERE, "docs")
        self.opened.append(dict(options))
        return MemoryWriter(self.server)

    def write(self) -> None:
        table = pa.table(
            {
                "id": list(self.rows),
                "e": pa.array(
                    [row.tolist() for row, _ in self.rows.values()], pa.list_(pa.float32())
                ),
                "n": [number for _, number in self.rows.values()],
            }
        )
        pq.write_table(table, self.root / "corpus.parquet")

    def build(self, **options: Any) -> None:
        self.write()
        given = {"embedding_column": "e", "keep": ("n",), "k": K} | options
        build(self.root / "index", str(self.root / "corpus.parquet"), **given)

    def update(self, **options: Any) -> None:
        self.write()
        given = {"refit": "never"} | options
        update_index(UpdateConfig(index=str(self.root / "index"), **given))

    def push(self, **options: Any) -> PushReport:
        given = {"to": HERE, "table": "docs", "batch_rows": 64} | options
        return push_index(PushConfig(index=str(self.root / "index"), **given))

    def change(self, *numbers: int, more: int = 0) -> None:
        """Give documents other vectors, and columns of ``more``, and update the index."""
        for number in numbers:
            row, column = self.rows[f"d{number}"]
            self.rows[f"d{number}"] = (row + 1, column + more)
        self.update()

    @property
    def table(self) -> Table:
        """The published table."""
        assert self.server.published is not None
        return self.server.published

    def cut_off(self, after: int, **options: Any) -> None:
        """Push to a server that fails after so many batches."""
        self.server.fails_after = after
        with pytest.raises(DatabaseError):
            self.push(**options)
        self.server.fails_after = None

    def assert_same(self, **options: Any) -> None:
        """The database holds the documents there are, with the vectors of a fresh push."""
        table = self.table
        assert table.pushed.changing == ""
        assert table.pushed.done == table.pushed.rows == len(table.rows)
        found = dict(sorted((row["id"], row) for row in table.rows.values()))
        assert {name: row["n"] for name, row in found.items()} == {
            name: number for name, (_, number) in sorted(self.rows.items())
        }
        folder = self.root / "index" / "versions" / table.pushed.version
        whitening = Whitening.load(folder / "whitening.safetensors")
        if "k" in options:
            whitening = whitening.truncate(options["k"])
        raw = np.array([self.rows[name][0] for name in found])
        made = whitening.apply(raw)
        made /= np.linalg.norm(made, axis=1, keepdims=True)
        vectors = np.array([row["vector"] for row in found.values()])
        assert np.abs(vectors - made).max() < 1e-6
