"""Embeddings of texts kept in a folder by the texts' digests: each run adds what it lacked."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import list_folder, writing
from whiten_index.artifacts.tensors import content_digest, read_sealed, write_sealed
from whiten_index.errors import ArtifactError

_KIND, _VERSION = "texts", 1
_BYTES = 16


def text_digests(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Return the digests of n texts, (n, 16)."""
    found = b"".join(hashlib.blake2b(t.encode(), digest_size=_BYTES).digest() for t in texts)
    return np.frombuffer(found, np.uint8).reshape(len(texts), _BYTES)


class KeptTexts:
    """The texts of one encoder that are kept in a folder; damaged files are passed over."""

    def __init__(self, folder: Path) -> None:
        """Read what is kept; a folder that is not there holds nothing."""
        self._folder = folder
        self._blocks: list[NDArray[np.floating]] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        for path in list_folder(folder, "*.safetensors"):
            with contextlib.suppress(ArtifactError):
                self._hold(*_read(path))

    def find(self, texts: Sequence[str]) -> tuple[NDArray[np.bool_], list[NDArray[np.floating]]]:
        """Return which of n texts are kept, (n,), and the embeddings (d,) of those in order."""
        places = [self._places.get(digest.tobytes()) for digest in text_digests(texts)]
        rows = [self._blocks[place[0]][place[1]] for place in places if place is not None]
        return np.array([place is not None for place in places], bool), rows

    def add(self, texts: Sequence[str], embeddings: NDArray[np.float32]) -> None:
        """Keep the embeddings (n, d) of n texts that are not kept, whole or not at all.

        Raises:
            StorageError: the folder cannot be written, or the disk is full.
        """
        digests = text_digests(texts)
        tensors: dict[str, NDArray[Any]] = {"digests": digests, "embeddings": embeddings}
        path = self._folder / f"{content_digest(tensors, {})[:32]}.safetensors"
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                write_sealed(temporary, tensors, kind=_KIND, version=_VERSION)
        self._hold(digests, embeddings)

    def _hold(self, digests: NDArray[np.uint8], embeddings: NDArray[np.floating]) -> None:
        block = len(self._blocks)
        self._blocks.append(embeddings)
        for row, digest in enumerate(digests):
            self._places[digest.tobytes()] = block, row


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.floating]]:
    shapes = {"digests": "nb", "embeddings": "nd"}
    found, _ = read_sealed(path, kind=_KIND, version=_VERSION, shapes=shapes)
    if found["digests"].shape[1] != _BYTES:
        raise ArtifactError(f"{path} is damaged; remove it, and its texts are encoded again")
    return found["digests"], found["embeddings"]
