"""Finished shards of an encoder: whole, made of rows that others hold, or packed with others.

A shard is found by the fingerprint of its texts however it is kept:

- whole: a folder with all its embeddings;
- derived: a folder with the embeddings of rows that no other shard holds, and with *picks*: the
  place of each row, in the folder itself or in one of its *sources*, other folders;
- packed: a stretch of the embeddings of a pack, a folder that joins small or derived shards.

A shard with fewer rows than dimensions keeps no moments, which would be larger than the rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts import manifest
from whiten_index.artifacts.files import exists, sha256_file, writing
from whiten_index.artifacts.storage import Storage
from whiten_index.artifacts.tensors import write_tensors
from whiten_index.errors import ArtifactError, FormatError
from whiten_index.store.dtypes import EmbeddingsType, StoreDtype, as_kept, keeps_moments, type_of
from whiten_index.store.packs import (
    EMBEDDINGS,
    FORMAT_VERSION,
    KIND,
    MOMENTS,
    REMEDY,
    SCHEMA,
    Packs,
    ShardManifest,
    ShardPlace,
    StoredShard,
    ToPack,
    read_shard,
)
from whiten_index.store.row_refs import SELF, EmbeddingRows, RowRefs, RowView, Source, other_sources
from whiten_index.whitening.moments import Moments

# Rows of small shards whose moments are taken together.
_ROWS_TOGETHER = 1024
# How often a shard is looked for again that was moved meanwhile.
_MOVES = 2
T = TypeVar("T")


class _NowhereError(ArtifactError):
    """Rows are missing, or were moved a moment ago."""


class Shards:
    """The shards of one encoder; ``EmbeddingStore`` adds corpora, documents and results."""

    def __init__(self, folder: Path, mirror: Storage, *, verify: bool) -> None:
        self.folder, self.mirror, self.verify = folder, mirror, verify
        self.shards_folder = folder / "shards"
        self.packs = Packs(folder / "packs", mirror)
        # Manifests of folders whose files were hashed.
        self._hashed: dict[str, ShardManifest] = {}

    def find(self, fingerprint: str, *, verify: bool = True) -> StoredShard | None:
        """Return a finished shard, or None where it is missing, unfinished or damaged.

        Args:
            fingerprint: of the shard.
            verify: check the content against its checksums, not only the sizes.

        Raises:
            FormatError: a later release wrote it.
        """
        place = self.locate(fingerprint, verify=verify)
        return None if place is None else place.shard

    def require(self, fingerprint: str, *, verify: bool = True) -> StoredShard:
        """Return a finished shard; see ``find``.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        found = self._latest_place(fingerprint, verify=verify)
        if found is None:
            raise ArtifactError(
                f"shard {fingerprint} of the store {self.mirror.uri or self.folder.parent} cannot "
                f"be read: {self._culprit(fingerprint)} is missing or damaged; {REMEDY}"
            )
        return found.shard

    def holds(self, fingerprint: str) -> bool:
        """Return whether a shard is there, sound or damaged."""
        folder = self.shards_folder / fingerprint
        known = exists(folder) or self.mirror.holds(folder)
        return known or bool(self.packs.find(fingerprint, verify=False))

    def seems_there(self, fingerprint: str) -> bool:
        """Return whether a shard is there, by its sizes, or in a bucket by its name."""
        if self.mirror.uri:
            return self.holds(fingerprint)
        return self.find(fingerprint, verify=False) is not None

    def write(
        self,
        fingerprint: str,
        digests: NDArray[np.uint8],
        embeddings: NDArray[np.floating],
        *,
        dtype: StoreDtype,
        truncated: NDArray[np.bool_] | None = None,
        moments_of: Callable[[str], Moments] | None = None,
    ) -> StoredShard:
        """Keep a shard, whole or not at all; its moments are those of the rows as kept.

        Args:
            fingerprint: of the shard.
            digests: (n, 16) uint8, of the rows it was made from.
            embeddings: (n, d).
            dtype: how to keep them; float16 gives way to float32 where it cannot hold them.
            truncated: (n,) whether a text was cut to the encoder's limit; by default none was.
            moments_of: returns the moments of the rows as kept in a type, for an encoder that
                takes them on its device.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        kept = as_kept(embeddings, dtype)
        cut = np.zeros(len(kept), dtype=np.bool_) if truncated is None else truncated
        shard = StoredShard(
            fingerprint, len(kept), type_of(kept.dtype), int(cut.sum()), kept.nbytes
        )
        # Taken also where they are not kept: they refuse what is not finite, or too large.
        moments = moments_of(str(kept.dtype)) if moments_of else Moments.of(kept)
        tensors = {"embeddings": kept, "digests": digests, "truncated": cut.astype(np.uint8)}
        return self._publish(shard, tensors, moments, None)

    def derive(
        self,
        fingerprint: str,
        digests: NDArray[np.uint8],
        picks: RowRefs,
        own: NDArray[np.floating],
        *,
        truncated: NDArray[np.bool_],
        moments: Moments,
        dtype: EmbeddingsType,
    ) -> StoredShard:
        """Keep a shard most of whose rows others hold; ``own`` (m, d) has the other rows."""
        rows = len(picks.source)
        size = rows * own.shape[1] * np.dtype(dtype).itemsize
        shard = StoredShard(fingerprint, rows, dtype, int(truncated.sum()), size)
        tensors = {
            "embeddings": own,
            "digests": digests,
            "truncated": truncated.astype(np.uint8),
            "source": picks.source,
            "row": picks.row,
        }
        return self._publish(shard, tensors, moments, picks)

    def _publish(
        self,
        shard: StoredShard,
        tensors: Mapping[str, NDArray[Any]],
        moments: Moments,
        picks: RowRefs | None,
    ) -> StoredShard:
        """Keep a shard in a folder, or in a pack where a folder is in the way."""
        name = shard.fingerprint
        self._forget(name)
        # Two processes may find the same damaged shard.
        if (found := self.find(name)) is not None:
            return found
        folder = self.shards_folder / name
        kept = moments if keeps_moments(shard.rows, moments.dim) else None
        holds_rows = self.folder_manifest(name, verify=True) is not None
        if not holds_rows:
            self.mirror.drop(folder)
        if holds_rows or self.packs.find(name, verify=False):
            # The folder is sound and lost its sources: others may pick the rows that it holds. A
            # new pack is also read first by readers that check no checksums.
            self._pack(shard, tensors, kept, picks)
            return shard
        with manifest.new_artifact(folder) as (temporary, fields):
            write_tensors(temporary / EMBEDDINGS, tensors, kind=KIND, version=FORMAT_VERSION)
            if kept is not None:
                kept.save(temporary / MOMENTS)
            fields |= {
                "kind": KIND,
                "format_version": FORMAT_VERSION,
                "sources": [] if picks is None else [list(each) for each in picks.sources],
                "shard": asdict(shard),
            }
        self.mirror.push(folder)
        return shard

    def _pack(
        self,
        shard: StoredShard,
        tensors: Mapping[str, NDArray[Any]],
        moments: Moments | None,
        picks: RowRefs | None,
    ) -> None:
        rows, held_as = tensors["embeddings"], ""
        if picks is not None:
            rows = self.picked(picks, rows)[np.arange(shard.rows)]
        else:
            # Shards that picked from its folder find the same rows here.
            with (
                writing(self.shards_folder),
                tempfile.TemporaryDirectory(dir=self.shards_folder, prefix=".tmp-") as folder,
            ):
                path = Path(folder) / EMBEDDINGS
                write_tensors(path, tensors, kind=KIND, version=FORMAT_VERSION)
                held_as = sha256_file(path)
        digests, truncated = tensors["digests"], tensors["truncated"].astype(bool)
        packed = ToPack(shard.fingerprint, rows, digests, truncated, moments, held_as)
        self.packs.write(self.packs.next_name(), [packed])

    def embeddings(self, fingerprint: str) -> NDArray[np.floating]:
        """Return the embeddings of a shard, (n, d), as kept.

        Raises:
            ArtifactError: they cannot be read, or are not finite.
        """

        def load(place: ShardPlace) -> NDArray[np.floating]:
            rows = self._rows(place)
            return rows[np.arange(len(rows))]

        return self._finite(fingerprint, self._read(fingerprint, load))

    def _finite(self, fingerprint: str, rows: NDArray[np.floating]) -> NDArray[np.floating]:
        if not np.isfinite(rows).all():
            raise ArtifactError(
                f"shard {fingerprint} in {self.shards_folder} holds NaN or infinity; {REMEDY}"
            )
        return rows

    def mapped_embeddings(self, fingerprint: str) -> EmbeddingRows:
        """Return the embeddings of a shard, (n, d), of which only rows that are touched are read.

        Raises:
            ArtifactError: a file is missing or damaged.
        """
        return self._read(fingerprint, self._rows)

    def _rows(self, place: ShardPlace) -> EmbeddingRows:
        picks, own = place.picks(), place.tensor("embeddings")
        return own if picks is None else self.picked(picks, own)

    def picked(self, picks: RowRefs, own: NDArray[np.floating]) -> EmbeddingRows:
        """Return the rows (n, d) that are picked, ``own`` (m, d) from the shard itself."""
        holders = [own if each == SELF else self.held_by(each) for each in picks.sources]
        return RowView(holders, picks.source, picks.row)

    def row_refs(self, fingerprint: str) -> RowRefs:
        """Return the place of each row (n,) of a shard, by the name that others know it by."""

        def load(place: ShardPlace) -> RowRefs:
            own, picks = (fingerprint, place.held_as), place.picks()
            if picks is None:
                rows = np.arange(place.shard.rows, dtype=np.int32)
                return RowRefs((own,), np.zeros_like(rows), rows)
            sources = tuple(own if each == SELF else each for each in picks.sources)
            return RowRefs(sources, picks.source, picks.row)

        return self._read(fingerprint, load)

    def moments(self, fingerprint: str) -> Moments:
        """Return the moments of a shard's embeddings as kept."""
        found = self._moments_or_rows(fingerprint)
        return found if isinstance(found, Moments) else Moments.of(found)

    def total_moments(self, fingerprints: Iterable[str], dim: int) -> Moments:
        """Return the sum of the moments of shards of ``dim`` dimensions."""
        return Moments.total(chain([Moments.empty(dim)], self._parts_of_moments(fingerprints)))

    def _parts_of_moments(self, fingerprints: Iterable[str]) -> Iterator[Moments]:
        """Yield moments that add up; many small shards share one d × d matrix."""
        together: list[NDArray[np.floating]] = []
        for name in fingerprints:
            found = self._moments_or_rows(name)
            if isinstance(found, Moments):
                yield found
                continue
            together.append(found)
            if sum(map(len, together)) >= _ROWS_TOGETHER:
                yield Moments.of(np.concatenate(together))
                together.clear()
        if together:
            yield Moments.of(np.concatenate(together))

    def _moments_or_rows(self, fingerprint: str) -> Moments | NDArray[np.floating]:
        """Return the moments of a shard that keeps them, else its rows, which are few."""

        def load(place: ShardPlace) -> Moments | NDArray[np.floating]:
            if (moments := place.moments()) is not None:
                return moments
            rows = self._rows(place)
            return rows[np.arange(len(rows))]

        found = self._read(fingerprint, load)
        return found if isinstance(found, Moments) else self._finite(fingerprint, found)

    def digests(self, fingerprint: str) -> NDArray[np.uint8]:
        """Return the digests (n, 16) of the texts of a shard."""
        return self._read(fingerprint, lambda place: np.array(place.tensor("digests")))

    def truncated(self, fingerprint: str) -> NDArray[np.bool_]:
        """Return which texts (n,) of a shard were cut to the encoder's limit."""

        def load(place: ShardPlace) -> NDArray[np.bool_]:
            shard = place.shard
            if shard.truncated in (0, shard.rows):
                return np.full(shard.rows, bool(shard.truncated))
            return place.tensor("truncated").astype(bool)

        return self._read(fingerprint, load)

    # Places. A shard may be in several packs and in a folder at once: a process died between
    # writing one and removing another, others pick rows from the folder, or one is damaged and
    # another replaces it. The latest sound pack is read first. Content is hashed once, before
    # anything of it is read.

    def locate(self, name: str, *, verify: bool, held_as: str | None = None) -> ShardPlace | None:
        """Return the place that a shard is read from, None where it is missing or damaged."""
        if member := self.packs.find(name, verify=verify, held_as=held_as):
            return member
        if found := self.in_folder(name, verify=verify, held_as=held_as):
            return found
        # It may have been packed since the packs were looked at.
        self.packs.look_again()
        return self.packs.find(name, verify=verify, held_as=held_as)

    def _forget(self, name: str) -> None:
        """Look at a shard again as if for the first time."""
        self._hashed.pop(name, None)
        self.packs.look_again()

    def _read(self, name: str, read: Callable[[ShardPlace], T]) -> T:
        """Return the result of ``read`` on the place of a shard."""
        for left in reversed(range(_MOVES + 1)):
            # It may be moved into a pack between the look and the reading.
            try:
                return read(self._require_place(name))
            except _NowhereError:
                continue
            except ArtifactError:
                if not left:
                    raise
        raise ArtifactError(
            f"shard {name} cannot be read: {self._culprit(name)} is missing or damaged; {REMEDY}"
        )

    def held_by(self, source: Source) -> NDArray[np.floating]:
        """Return the embeddings (m, d) of a source, mapped."""
        name, held_as = source
        place = self.locate(name, verify=self.verify, held_as=held_as)
        if place is None:
            raise _NowhereError(
                f"shard {name} in {self.shards_folder}, which others pick rows from, is missing or "
                f"damaged; {REMEDY}"
            )
        return place.tensor("embeddings")

    def in_folder(
        self, name: str, *, verify: bool, held_as: str | None = None
    ) -> ShardPlace | None:
        """Return the folder of a shard whose sources are there too, or of rows; see ``locate``."""
        fields = self.folder_manifest(name, verify=verify)
        found = None if fields is None else ShardPlace.in_folder(self.shards_folder / name, fields)
        if found is None or held_as not in (None, found.held_as):
            return None
        return found if held_as is not None or self._has_sources(found, verify=verify) else None

    def folder_manifest(self, name: str, *, verify: bool) -> ShardManifest | None:
        """Return the manifest of a shard's folder, None where the folder is missing or damaged."""
        folder = self.shards_folder / name
        self.mirror.fetch(folder)
        try:
            found = read_shard(folder)
            hash_it = verify and self._hashed.get(name) != found
            manifest.check_files(folder, found, content=hash_it)
        except FormatError:
            raise
        except ArtifactError:
            again = self.mirror.fetch_again(folder)
            return self.folder_manifest(name, verify=verify) if again else None
        if hash_it:
            self._hashed[name] = found
            # An upload may have been cut off.
            self.mirror.keep(folder)
        return found

    def _culprit(self, name: str) -> Path:
        """Return the file or folder, of a shard or its sources, that is damaged or missing."""
        fields = self.folder_manifest(name, verify=True)
        for source, held_as in [] if fields is None else other_sources(fields):
            if self.locate(source, verify=True, held_as=held_as) is None:
                return self._damaged_at(source)
        return self._damaged_at(name)

    def _damaged_at(self, name: str) -> Path:
        folder = self.shards_folder / name
        own = manifest.first_damaged(folder, SCHEMA)
        return own or self.packs.damaged(name) or folder

    def _has_sources(self, place: ShardPlace, *, verify: bool) -> bool:
        return all(
            self.locate(name, verify=verify, held_as=held_as) is not None
            for name, held_as in place.sources
            if (name, held_as) != SELF
        )

    def _latest_place(self, name: str, *, verify: bool) -> ShardPlace | None:
        found = self.locate(name, verify=verify)
        # Another machine may have put it into the bucket since that was listed.
        if found is None and self.mirror.look_again():
            found = self.locate(name, verify=verify)
        return found

    def _require_place(self, name: str) -> ShardPlace:
        if found := self._latest_place(name, verify=self.verify):
            return found
        folder = self.shards_folder / name
        if not exists(folder):
            raise _NowhereError(f"shard {name} is in no place in {self.shards_folder}; {REMEDY}")
        # Reading it again names the damage.
        fields = read_shard(folder)
        manifest.check_files(folder, fields, content=self.verify, remedy=REMEDY)
        return ShardPlace.in_folder(folder, fields)
