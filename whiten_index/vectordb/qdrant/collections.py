"""Collections of Qdrant and their aliases, as the life of pushed tables asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qdrant_client import models

from whiten_index.vectordb.qdrant.connection import Told

# Under this key of a collection's metadata stands its mark.
_MARK = "whiten_index"


def metadata_of(mark: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a collection with a mark."""
    return {_MARK: dict(mark)}


@dataclass(frozen=True)
class Collections:
    """All collections of a server; see ``Engine``."""

    client: Any
    told: Told

    def collections(self) -> list[str]:
        """Return the names of all collections, without those of aliases."""
        with self.told("collections could not be listed"):
            return [each.name for each in self.client.get_collections().collections]

    def stands_for(self, alias: str) -> str | None:
        """Return the collection that an alias stands for, None where there is no such alias."""
        with self.told("aliases could not be listed"):
            aliases = self.client.get_aliases().aliases
        return {each.alias_name: str(each.collection_name) for each in aliases}.get(alias)

    def metadata(self, collection: str) -> Mapping[str, Any]:
        """Return the mark of a collection, {} where it has none."""
        with self.told(f"{collection} could not be read"):
            metadata = self.client.get_collection(collection).config.metadata or {}
        found = metadata.get(_MARK)
        return found if isinstance(found, Mapping) else {}

    def write_metadata(self, collection: str, mark: Mapping[str, Any]) -> None:
        """Write the mark of a collection."""
        with self.told(f"{collection} could not be marked"):
            self.client.update_collection(collection, metadata=metadata_of(mark))

    def publish(self, alias: str, collection: str, *, moved: bool) -> None:
        """Let an alias stand for a collection, in one request."""
        steps: list[Any] = []
        if moved:
            gone = models.DeleteAlias(alias_name=alias)
            steps.append(models.DeleteAliasOperation(delete_alias=gone))
        made = models.CreateAlias(collection_name=collection, alias_name=alias)
        steps.append(models.CreateAliasOperation(create_alias=made))
        with self.told("the new collection could not be swapped in"):
            self.client.update_collection_aliases(change_aliases_operations=steps)

    def drop(self, collection: str) -> None:
        """Drop a collection."""
        with self.told(f"{collection} could not be dropped"):
            self.client.delete_collection(collection)
