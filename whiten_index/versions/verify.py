"""Indexes and stores verified by their paths, each once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from whiten_index.artifacts.files import require_path
from whiten_index.errors import ArtifactError
from whiten_index.paths import absolute, is_uri
from whiten_index.versions.references import is_index, real_place
from whiten_index.versions.store_scan import encoder_folders
from whiten_index.versions.verify_bucket import verify_bucket
from whiten_index.versions.verify_index import verify_index
from whiten_index.versions.verify_report import VerifyReport
from whiten_index.versions.verify_store import verify_store


def verify_paths(paths: Iterable[Path | str], *, with_stores: bool = True) -> list[VerifyReport]:
    """Verify indexes, with the stores they read, and stores.

    Args:
        paths: folders of indexes or of stores, or URIs of indexes in a bucket.
        with_stores: verify the stores of the indexes too.

    Raises:
        ArtifactError: a path is neither.
        ConfigError: it is too long to be one.
    """
    given = list(map(absolute, paths))
    places = [require_path(place) for place in given if not is_uri(place)]
    for place in places:
        if not is_index(place) and not any(encoder_folders(place)):
            raise ArtifactError(
                f"{place} is neither an index nor a store of embeddings; check the path"
            )
    found = {
        real_place(place): verify_index(place, with_store=with_stores)
        for place in places
        if is_index(place)
    }
    stores = [place for place in places if not is_index(place)]
    if with_stores:
        stores += [Path(store) for report in found.values() for store in report.stores]
    stores = [store for store in stores if any(encoder_folders(store))]
    unique = {real_place(store): store for store in stores}
    there = [verify_bucket(str(uri)) for uri in dict.fromkeys(given) if is_uri(uri)]
    return [*there, *found.values(), *map(verify_store, unique.values())]
