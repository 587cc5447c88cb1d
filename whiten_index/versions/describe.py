"""What is in a published index, from its manifest and whitening alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.storage import Place
from whiten_index.versions.published import WHITENING, Version, read_version, with_published
from whiten_index.whitening.spectrum import variance_kept
from whiten_index.whitening.transform import Whitening

_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024)


def describe_index(root: Path | str, *, verify: str = "full") -> dict[str, Any]:
    """Return the published version's manifest with its ``spectrum``.

    ``spectrum`` lists, for round widths up to the rank, for k and for the rank, the eigenvalue
    there and the share of variance that the directions up to it hold.

    Raises:
        ArtifactError: nothing is published there, or it is damaged.
    """
    version, whitening = _opened(root, verify=verify)
    rank = max(whitening.rank, 1)
    widths = {k for k in _WIDTHS if k <= rank} | {min(whitening.k, rank), rank}
    spectrum = [
        {
            "k": k,
            "eigenvalue": float(whitening.eigenvalues[k - 1]),
            "variance_kept": variance_kept(whitening.eigenvalues, k),
        }
        for k in sorted(widths)
    ]
    return {**version.fields, "path": str(version.folder), "spectrum": spectrum}


def _opened(place: Place, *, verify: str) -> tuple[Version, Whitening]:
    """Return the published version, all of it checked, and its transform."""

    def read(version: Version) -> tuple[Version, Whitening]:
        return version, Whitening.load(version.check().file(WHITENING))

    root, mirror = place_of(place)
    return with_published(root, read, mirror, verify=verify)


def eigenvalues_of(description: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return all the eigenvalues (d,), falling, of an index described by ``describe_index``."""
    return Whitening.load(read_version(Path(description["path"])).file(WHITENING)).eigenvalues
