"""Finished shards on disk: whole, made of rows that others hold, or packed with others.

A shard is found by the fingerprint of its texts however it is kept:

- whole: a folder with all its embeddings;
- derived: a folder with the embeddings of rows that no other shard holds, and with *picks* that
  say where each row lies: in the folder itself or in one of its *sources*, other folders;
- packed: a stretch of the embeddings of a pack, a folder that small or derived shards were
  joined in.

One of fewer rows than they have coordinates keeps no moments, which would be larger than the rows:
they are taken of the rows when they are asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts import manifest
from whiten_index.artifacts.files import sha256_file, writing
from whiten_index.artifacts.storage import LOCAL, Storage
from whiten_index.artifacts.tensors import write_tensors
from whiten_index.errors import ArtifactError
from whiten_index.store.digest_index import DigestIndex, Lookup
from whiten_index.store.dtypes import EmbeddingsType, StoreDtype, as_kept, keeps_moments, type_of
from whiten_index.store.packs import Packs, ToPack
from whiten_index.store.records import REMEDY
from whiten_index.store.row_refs import SELF, Change, EmbeddingRows, RowRefs, RowView, Source
from whiten_index.store.shard_resolver import (
    EMBEDDINGS,
    FORMAT_VERSION,
    KIND,
    MOMENTS,
    InFolder,
    Place,
    ShardResolver,
    StoredShard,
    shard_at,
)
from whiten_index.whitening.moments import Moments

# Format of the file of embeddings. It does not depend on moments being kept, so that the same rows
# have the same digest.
_WHOLE_VERSION, _DERIVED_VERSION = 1, 2
# Rows of small shards that moments are taken of at once.
_ROWS_TOGETHER = 1024


class Shards:
    """The shards of one encoder in a store."""

    def __init__(
        self, folder: Path, packs: Packs, mirror: Storage = LOCAL, *, verify: bool = True
    ) -> None:
        self.folder, self.packs, self.mirror = folder, packs, mirror
        self.resolver = ShardResolver(folder, packs, mirror, verify=verify)

    def find(self, fingerprint: str, *, verify: bool = True) -> StoredShard | None:
        """Return a finished shard, or None where it is missing, unfinished or damaged.

        What is read of it afterwards is read from the place that was looked at.
        """
        place = self.resolver.find(fingerprint, verify=verify)
        return None if place is None else shard_at(place)

    def require_there(self, fingerprint: str) -> None:
        """Make sure that a shard is there, sound or not."""
        if not self.resolver.is_there(fingerprint):
            raise ArtifactError(f"shard {fingerprint} is not in {self.folder}; {REMEDY}")

    def write(
        self,
        fingerprint: str,
        digests: NDArray[np.uint8],
        embeddings: NDArray[np.floating],
        *,
        dtype: StoreDtype,
        truncated: NDArray[np.bool_],
        moments_of: Callable[[str], Moments] | None = None,
    ) -> StoredShard:
        """Keep a whole shard; see ``EmbeddingStore.write``."""
        kept = as_kept(embeddings, dtype)
        shard = StoredShard(
            fingerprint, len(kept), type_of(kept.dtype), int(truncated.sum()), kept.nbytes
        )
        # Taken also where they are not kept: they refuse what is not finite, or too large.
        moments = moments_of(str(kept.dtype)) if moments_of else Moments.of(kept)
        tensors = {"embeddings": kept, "digests": digests, "truncated": _flags(truncated)}
        facts = {"format_version": _WHOLE_VERSION, "sources": []}
        return self._publish(shard, tensors, moments, facts, lambda: kept)

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
        """Keep a shard most of whose rows others hold, whole or not at all."""
        rows = len(picks.source)
        size = rows * own.shape[1] * np.dtype(dtype).itemsize
        shard = StoredShard(fingerprint, rows, dtype, int(truncated.sum()), size)
        tensors = {
            "embeddings": own,
            "digests": digests,
            "truncated": _flags(truncated),
            "source": picks.source,
            "row": picks.row,
        }
        facts = {
            "format_version": _DERIVED_VERSION,
            "sources": [list(each) for each in picks.sources],
        }
        return self._publish(
            shard, tensors, moments, facts, lambda: self.picked(picks, own)[np.arange(rows)]
        )

    def _publish(
        self,
        shard: StoredShard,
        tensors: Mapping[str, NDArray[Any]],
        moments: Moments,
        facts: Mapping[str, Any],
        rows: Callable[[], NDArray[np.floating]],
    ) -> StoredShard:
        """Keep a shard in a folder of its own, or in a pack where it may not be in one."""
        name = shard.fingerprint
        self.resolver.forget(name)
        # Two processes may find the same damaged shard.
        if (found := self.find(name)) is not None:
            return found
        folder, version = self.folder / name, int(facts["format_version"])
        kept = moments if keeps_moments(shard.rows, moments.dim) else None
        holds_rows = self.resolver.fields(name, verify=True) is not None
        if not holds_rows:
            self.mirror.drop(folder)
        if holds_rows or self.packs.find(name, verify=False):
            # The folder, sound itself, lost what it picks from: others may pick the rows it holds.
            # And what is written last is to be read first also by who checks no checksums.
            self._pack(shard, tensors, kept, rows())
            return shard

        def fill(temporary: Path) -> dict[str, Any]:
            write_tensors(temporary / EMBEDDINGS, tensors, kind=KIND, version=version)
            if kept is not None:
                kept.save(temporary / MOMENTS)
            format_version = FORMAT_VERSION if kept is None else version
            about = {**facts, "format_version": format_version}
            return {"kind": KIND, **about, "shard": asdict(shard)}

        manifest.publish_folder(folder, fill)
        self.mirror.push(folder)
        return shard

    def _pack(
        self,
        shard: StoredShard,
        tensors: Mapping[str, NDArray[Any]],
        moments: Moments | None,
        rows: NDArray[np.floating],
    ) -> None:
        digests, truncated = tensors["digests"], tensors["truncated"].astype(bool)
        # What picked from it while it was whole in a folder finds the same rows again.
        held_as = self._held_as(tensors) if "source" not in tensors else ""
        packed = ToPack(shard.fingerprint, rows, digests, truncated, moments, held_as)
        self.packs.write(self.packs.next_name(), [packed])

    def _held_as(self, tensors: Mapping[str, NDArray[Any]]) -> str:
        """Return what the rows of a whole shard would be known by, were it in a folder."""
        with (
            writing(self.folder),
            tempfile.TemporaryDirectory(dir=self.folder, prefix=".tmp-") as folder,
        ):
            path = Path(folder) / EMBEDDINGS
            write_tensors(path, tensors, kind=KIND, version=_WHOLE_VERSION)
            return sha256_file(path)

    def embeddings(self, fingerprint: str) -> NDArray[np.floating]:
        """Return the embeddings of a shard, (n, d), as kept, all finite."""

        def load(place: Place) -> NDArray[np.floating]:
            rows = self._rows(place)
            return rows[np.arange(len(rows))]

        return self._finite(fingerprint, self.resolver.read(fingerprint, load))

    def _finite(self, fingerprint: str, rows: NDArray[np.floating]) -> NDArray[np.floating]:
        if not np.isfinite(rows).all():
            raise ArtifactError(
                f"shard {fingerprint} in {self.folder} holds NaN or infinity; {REMEDY}"
            )
        return rows

    def mapped(self, fingerprint: str) -> EmbeddingRows:
        """Return the embeddings of a shard, (n, d), of which only rows asked for are read."""
        return self.resolver.read(fingerprint, self._rows)

    def picked(self, picks: RowRefs, own: NDArray[np.floating]) -> EmbeddingRows:
        """Return the rows (n, d) that are picked, ``own`` (m, d) being those held by none other."""
        holders = [own if each == SELF else self.resolver.held_by(each) for each in picks.sources]
        return RowView(holders, picks.source, picks.row)

    def picks(self, fingerprint: str) -> RowRefs | None:
        """Return where the rows of a derived shard lie, None where a shard holds all of them."""

        def load(place: Place) -> RowRefs | None:
            return place.picks() if isinstance(place, InFolder) else None

        return self.resolver.read(fingerprint, load)

    def moments(self, fingerprint: str) -> Moments:
        """Return the moments of a shard's embeddings as kept."""
        found = self._moments_or_rows(fingerprint)
        return found if isinstance(found, Moments) else Moments.of(found)

    def parts_of_moments(self, fingerprints: Iterable[str]) -> Iterator[Moments]:
        """Yield what the moments of shards add up from.

        Those of shards that keep none are taken together of the rows of several: each has fewer
        rows than d, and what costs is to make and to add d × d numbers.
        """
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

        def load(place: Place) -> Moments | NDArray[np.floating]:
            if not place.keeps_moments:
                rows = self._rows(place)
                return rows[np.arange(len(rows))]
            if isinstance(place, InFolder):
                return Moments.load(place.path / MOMENTS)
            return self.packs.moments(place)

        found = self.resolver.read(fingerprint, load)
        return found if isinstance(found, Moments) else self._finite(fingerprint, found)

    def digests(self, fingerprint: str) -> NDArray[np.uint8]:
        """Return the digests (n, 16) of the texts of a shard."""
        return self.resolver.read(fingerprint, lambda place: self._tensor(place, "digests"))

    def truncated(self, fingerprint: str) -> NDArray[np.bool_]:
        """Return which texts (n,) of a shard were cut to the encoder's limit."""

        def load(place: Place) -> NDArray[np.bool_]:
            shard = shard_at(place)
            if shard.truncated in (0, shard.rows):
                return np.full(shard.rows, bool(shard.truncated))
            return self._tensor(place, "truncated").astype(bool)

        return self.resolver.read(fingerprint, load)

    def known_rows(self, fingerprints: Iterable[str], *, dtypes: Collection[str]) -> DigestIndex:
        """Return what looks up the rows of shards by their digests."""
        names = dict.fromkeys(fingerprints)
        self.mirror.fetch_all(self.folder / name for name in names)
        shards = ((name, self.find(name)) for name in names)
        sound = [name for name, shard in shards if shard is not None and shard.dtype in dtypes]
        return DigestIndex((name, self.digests(name)) for name in sound)

    def picks_of(self, known: DigestIndex, found: Lookup) -> RowRefs:
        """Return where rows (n,) lie that were looked up; those not known are the shard's own.

        Sources are those that a row is picked from, and no others: each must stay for the shard.
        """
        sources: dict[Source, int] = {} if found.known.all() else {SELF: 0}
        source = np.zeros(len(found.shard), dtype=np.int32)
        row = np.zeros(len(found.shard), dtype=np.int32)
        row[~found.known] = np.arange(np.count_nonzero(~found.known))
        for number in np.unique(found.shard[found.known]):
            inside = found.shard == number
            there, wanted = self._all_picks(known.shards[number]), found.row[inside]
            used, which = np.unique(there.source[wanted], return_inverse=True)
            numbers = [sources.setdefault(there.sources[each], len(sources)) for each in used]
            source[inside] = np.array(numbers, dtype=np.int32)[which]
            row[inside] = there.row[wanted]
        return RowRefs(tuple(sources), source, row)

    def change(self, fingerprint: str, picks: RowRefs) -> Change:
        """Return which rows were in a shard and are not among those picked, and the reverse.

        A row that is there several times counts as often.
        """
        return Change.between(self._all_picks(fingerprint), picks)

    def _all_picks(self, fingerprint: str) -> RowRefs:
        """Return where each row (n,) of a shard lies, as others are to know it."""

        def load(place: Place) -> RowRefs:
            own, picks = (fingerprint, place.held_as), None
            if isinstance(place, InFolder):
                picks = place.picks()
            if picks is None:
                rows = np.arange(shard_at(place).rows, dtype=np.int32)
                return RowRefs((own,), np.zeros_like(rows), rows)
            sources = tuple(own if each == SELF else each for each in picks.sources)
            return RowRefs(sources, picks.source, picks.row)

        return self.resolver.read(fingerprint, load)

    def _rows(self, place: Place) -> EmbeddingRows:
        if not isinstance(place, InFolder):
            return self.packs.embeddings(place)
        picks, own = place.picks(), place.tensor("embeddings")
        return own if picks is None else self.picked(picks, own)

    def _tensor(self, place: Place, name: str) -> NDArray[Any]:
        if isinstance(place, InFolder):
            return np.array(place.tensor(name))
        return self.packs.tensor(place, name)


def _flags(truncated: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return truncated.astype(np.uint8)
