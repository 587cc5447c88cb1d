"""The index of a collection of Milvus, and the collection in memory, where it is searched."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pymilvus import MilvusClient

from whiten_index.errors import ConfigError
from whiten_index.vectordb.database_writer import VECTOR, Layout, VectorDtype
from whiten_index.vectordb.milvus.options import IndexOptions


class Building:
    """Builds the index that options ask for, and loads collections."""

    def __init__(self, milvus: Any, options: IndexOptions) -> None:
        self._milvus, self._options = milvus, options
        self._loaded: set[str] = set()

    def require_able(self, layout: Layout) -> None:
        """Refuse at the start what would fail at the end.

        Raises:
            ConfigError: Milvus Lite, or a server before 2.4, keeps no float16; or Milvus Lite
                cannot build the index.
        """
        if not self._milvus.lite:
            if layout.dtype is VectorDtype.FLOAT16 and not self._milvus.has_2_4:
                # It takes such rows, finds wrong ones, and never ends building an index.
                raise ConfigError(
                    f"{self._milvus.engine} keeps no float16, which Milvus has from 2.4; leave "
                    "--dtype out, or push to a later one"
                )
            return
        if layout.dtype is VectorDtype.FLOAT16:
            raise ConfigError(
                "Milvus Lite keeps no float16; leave --dtype out, or push to a Milvus server"
            )
        if self._options.kind in ("HNSW", "IVF_FLAT") and find_spec("faiss") is None:
            raise ConfigError(
                f"Milvus Lite builds {self._options.kind} with faiss, which is not installed; run "
                "pip install faiss-cpu, or give --option index=flat"
            )

    def kind(self, collection: str) -> str:
        """Return the kind of the index of a collection, "" where it has none."""
        return str(self._there(collection).get("index_type", ""))

    def build(self, collection: str, metric: str, rows: int) -> None:
        """Build the index that the options ask for, unless it is there."""
        build = self._options.building(rows)
        if there := self._there(collection):
            if there["index_type"] == self._options.kind and all(
                str(there.get(each, value)) == str(value) for each, value in build.items()
            ):
                return
            self._milvus.release_collection(collection)
            for index in self._milvus.list_indexes(collection, field_name=VECTOR):
                self._milvus.drop_index(collection, index)
            self._loaded.discard(collection)
        params = MilvusClient.prepare_index_params()
        params.add_index(
            field_name=VECTOR, index_type=self._options.kind, index_name=VECTOR, metric_type=metric,
            # The client sends each parameter by itself; Milvus Lite sees them only as one object.
            params={"params": build} if self._milvus.lite else build,
        )  # fmt: skip
        self._milvus.create_index(collection, params)

    def load(self, collection: str) -> None:
        """Load a collection, which a server does only with an index."""
        self._milvus.load_collection(collection)
        self._loaded.add(collection)

    def is_loaded(self, collection: str) -> bool:
        """Tell whether this connection loaded a collection."""
        return collection in self._loaded

    def _there(self, collection: str) -> dict[str, Any]:
        """Return what Milvus tells of the index of a collection, {} where it has none."""
        names = self._milvus.list_indexes(collection, field_name=VECTOR)
        found = dict(self._milvus.describe_index(collection, names[0])) if names else {}
        return found | (found.get("params") or {})
