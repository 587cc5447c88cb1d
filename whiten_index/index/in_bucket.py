"""The versions of an index in a bucket, as far as their manifests and a listing tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.artifacts.limits import load_json
from whiten_index.artifacts.manifest import as_manifest
from whiten_index.errors import ArtifactError
from whiten_index.index.schema import VERSION_SCHEMA
from whiten_index.index.versions import VERSIONS, version_number
from whiten_index.objects import Mirror


@dataclass(frozen=True, slots=True)
class InBucket:
    """A version that has a manifest in the bucket.

    Attributes:
        name: of the version.
        fields: its manifest, empty where that is damaged.
        bytes: of its files.
        sound: empty, or what is damaged.
    """

    name: str
    fields: Mapping[str, Any]
    bytes: int
    sound: str


def versions_in_bucket(root: Path, mirror: Mirror) -> Iterator[InBucket]:
    """Yield the versions; nothing but their manifests is read.

    Args:
        root: the folder of the copies.
        mirror: the bucket.

    Raises:
        StorageError: the bucket does not tell.
    """
    for name in sorted(filter(version_number, mirror.names(root / VERSIONS))):
        data = mirror.manifest(root / VERSIONS / name)
        if data is None:
            continue
        sizes = mirror.sizes(root / VERSIONS / name, data)
        whole = sum(sizes.values()) + len(data)
        path = root / VERSIONS / name
        place = f"{mirror.uri}/{VERSIONS}/{name}"
        try:
            fields = as_manifest(load_json(data), VERSION_SCHEMA, path)
        except (ArtifactError, ValueError, AttributeError):
            yield InBucket(name, {}, whole, f"{place} has a damaged manifest")
            continue
        wanted = {file: entry["bytes"] for file, entry in fields["files"].items()}
        wrong = sorted(file for file, size in wanted.items() if sizes.get(file) != size)
        sound = f"{', '.join(wrong)} of {place} is missing or of another size" if wrong else ""
        if not wrong and mirror.differs(path):
            sound = (
                f"{place} changed since this machine uploaded or downloaded it; whiten-index "
                f"verify {mirror.uri} tells whether it is damaged"
            )
        yield InBucket(name, fields, whole, sound)
