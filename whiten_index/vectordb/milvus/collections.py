"""Collections of Milvus and their aliases, as the life of pushed tables asks for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The property of a collection that has its mark.
_MARK = "whiten_index"


def properties_of(mark: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties of a collection with a mark."""
    return {_MARK: json.dumps(dict(mark))}


@dataclass(frozen=True)
class Collections:
    """All collections of a database of Milvus; see ``Engine``.

    Attributes:
        milvus: a ``Connection``.
    """

    milvus: Any

    def collections(self) -> list[str]:
        """Return the names of all collections, without those of aliases."""
        return list(self.milvus.list_collections())

    def stands_for(self, alias: str) -> str | None:
        """Return the collection that an alias stands for, None where there is no such alias."""
        if alias not in self.milvus.list_aliases()["aliases"]:
            return None
        return str(self.milvus.describe_alias(alias)["collection_name"])

    def metadata(self, collection: str) -> Mapping[str, Any]:
        """Return the mark of a collection, {} where it has none."""
        properties = self.milvus.describe_collection(collection).get("properties") or {}
        try:
            found = json.loads(properties[_MARK])
        except (KeyError, TypeError, ValueError):
            return {}
        return found if isinstance(found, Mapping) else {}

    def write_metadata(self, collection: str, mark: Mapping[str, Any]) -> None:
        """Write the mark of a collection."""
        # A server of 2.3.5 keeps what was written before, and after a restart has lost the last.
        for _ in range(1 if self.milvus.has_2_4 else 2):
            self.milvus.alter_collection_properties(collection, properties_of(mark))

    def publish(self, alias: str, collection: str, *, moved: bool) -> None:
        """Let an alias stand for a collection."""
        (self.milvus.alter_alias if moved else self.milvus.create_alias)(collection, alias)

    def drop(self, collection: str) -> None:
        """Drop a collection; a server drops none that an alias stands for."""
        self.milvus.drop_collection(collection)
