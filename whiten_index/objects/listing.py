"""What is known of the objects below a prefix, by the folders that they are in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.objects.bucket import Stat

_NONE: Stat = (0, "")
_OF_ARTIFACT = f"/{MANIFEST}"


class Listing:
    """Keys with their sizes and e-tags; an artifact is known by its folder, which has a manifest.

    Looking for one of a hundred thousand shards that is not there takes a look-up or two.
    """

    def __init__(self, objects: Mapping[str, Stat]) -> None:
        self._sizes = dict(objects)
        # By folders that were asked for.
        self._names: dict[str, set[str]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def is_artifact(self, key: str) -> bool:
        """Tell whether a folder has a manifest."""
        return f"{key}{_OF_ARTIFACT}" in self._sizes

    def size(self, key: str) -> int:
        """Return the bytes of an object, 0 where there is none."""
        return self._sizes.get(key, _NONE)[0]

    def stats(self, keys: Iterable[str]) -> dict[str, Stat]:
        """Return the sizes and e-tags of objects, of those that are there."""
        return {key: self._sizes[key] for key in keys if key in self._sizes}

    def add(self, key: str, stat: Stat) -> None:
        """Take note of an object."""
        self._sizes[key] = stat
        for folder, name in _places(key):
            if folder in self._names:
                self._names[folder].add(name)

    def discard(self, key: str) -> bool:
        """Forget an object; tell whether it was known."""
        known = self._sizes.pop(key, None) is not None
        for folder, name in _places(key):
            if folder in self._names:
                self._names[folder].discard(name)
        return known

    def names(self, folder: str) -> set[str]:
        """Return the names of the artifacts and files right in a folder."""
        if folder not in self._names:
            # Copied, as another thread may add to it.
            places = (place for key in list(self._sizes) for place in _places(key))
            self._names[folder] = {name for parent, name in places if parent == folder}
        return set(self._names[folder])

    def below(self, folder: str) -> dict[str, int]:
        """Return the bytes of all objects below a folder, by their keys there."""
        prefix = f"{folder}/"
        found = list(self._sizes.items())
        return {key[len(prefix) :]: stat[0] for key, stat in found if key.startswith(prefix)}


def _places(key: str) -> list[tuple[str, str]]:
    """Return the folder and the name of a file, and those of an artifact by its manifest."""
    found = [_split(key)]
    if key.endswith(_OF_ARTIFACT):
        found.append(_split(key.removesuffix(_OF_ARTIFACT)))
    return found


def _split(key: str) -> tuple[str, str]:
    folder, _, name = key.rpartition("/")
    return folder, name
