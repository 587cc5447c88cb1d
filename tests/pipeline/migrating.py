"""An index, its store and a corpus, to be migrated to another embedding model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers import tiny_models
from whiten_index import (
    BuildConfig,
    MigrateConfig,
    build_index,
    list_versions,
    migrate_index,
    open_index,
)
from whiten_index.progress import Progress

ROWS = 3_000
NEW = "the new king of the small river"
_WORDS = ("the", "cat", "sat", "on", "mat", "dog", "ran", "to", "small", "river", "sang", "king",
          "queen", "walks", "writes", "book", "cold", "given", "passage", "query")  # fmt: skip


@dataclass(frozen=True)
class Migration:
    """A folder with an index and its store.

    Attributes:
        folder: of the index and the store.
        built: a folder with a model, and the corpus unless ``folder`` has its own.
    """

    folder: Path
    built: Path

    @property
    def index(self) -> Path:
        return self.folder / "index"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def corpus(self) -> Path:
        own = self.folder / "c.parquet"
        return own if own.exists() else self.built / "c.parquet"

    def prepare(self) -> None:
        """Write a model and the corpus, and index it."""
        rng = np.random.default_rng(0)
        tiny_models.bert(self.built / "model")
        texts = [
            " ".join(rng.choice(_WORDS, size=rng.integers(3, 9))) + f" {row}" for row in range(ROWS)
        ]
        table = {"id": [f"d{row}" for row in range(ROWS)], "text": texts}
        pq.write_table(pa.table(table), self.built / "c.parquet")
        self.build()

    def table(self) -> pa.Table:
        """Return the corpus as it was first."""
        return pq.read_table(self.built / "c.parquet")

    def texts(self) -> list[str]:
        return self.table()["text"].to_pylist()

    def write(self, table: pa.Table, *new: str) -> None:
        """Write the folder's own corpus: rows, and new texts whose ids are the same."""
        more = pa.table({"id": pa.array(new, pa.string()), "text": pa.array(new, pa.string())})
        pq.write_table(pa.concat_tables([table, more]), self.folder / "c.parquet")

    def build(self, **options: Any) -> None:
        """Index the corpus by the old model."""
        given: dict[str, Any] = {
            "corpus": self.corpus, "text_columns": "text", "id_column": "id",
            "model": self.built / "model", "pooling": "mean", "whiten": "pca", "k": 16,
            "device": "cpu", "factory": "Flat", "out": self.index,
            "store": self.store, "store_dtype": "float32",
        }  # fmt: skip
        build_index(BuildConfig(**_plain({**given, **options})))

    def build_own(self) -> Path:
        """Index the folder's own corpus, which a test may change; return the index."""
        self.write(self.table())
        self.build(out=self.folder / "other")
        return self.folder / "other"

    def less(self, rows: int) -> str:
        """Write a corpus of the first rows; return its path."""
        path = str(self.folder / "less.parquet")
        pq.write_table(self.table().slice(0, rows), path)
        return path

    def run(self, *, progress: Progress | None = None, **options: Any) -> Any:
        """Migrate to the same model by its first layer, which differs and can be foretold."""
        given: dict[str, Any] = {"index": self.index, "model": self.built / "model"}
        given |= {"pooling": "mean", "layers": (1,), "device": "cpu", "store": self.store}
        return migrate_index(MigrateConfig(**_plain({**given, **options})), progress=progress)

    def bridged(self) -> list[Path]:
        """Return the folders of the rows of bridged versions."""
        return sorted(self.store.glob("bridged-*"))

    def versions(self) -> list[str]:
        return [each.name for each in list_versions(self.index)]

    def published(self) -> str:
        (name,) = (each.name for each in list_versions(self.index) if each.published)
        return name

    def neighbours(self, index: Path, texts: list[str]) -> list[set[str]]:
        found = open_index(index).search(texts)
        return [{str(hit.id) for hit in hits} for hits in found]

    def assert_as_built(self, index: Path, texts: list[str]) -> None:
        """The index finds what one finds that is built afresh by the new model."""
        self.build(out=self.folder / "fresh", store=None, layers=(1,))
        found = self.neighbours(self.folder / "fresh", texts)
        assert self.neighbours(index, texts) == found


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(each) if isinstance(each, Path) else each for name, each in options.items()}
