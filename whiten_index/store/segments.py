"""Segments of a store: immutable folders of embeddings, found by the digests of their texts."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts import manifest
from whiten_index.artifacts.cached_storage import BucketStorage, at_once, stamp
from whiten_index.artifacts.files import exists
from whiten_index.artifacts.manifest import Count, Described, Digest, Positive, Schema
from whiten_index.artifacts.prefetch import blocks
from whiten_index.artifacts.storage import Place, Storage
from whiten_index.artifacts.tensors import map_tensor, write_tensors
from whiten_index.corpus.batches import DIGEST_BYTES
from whiten_index.errors import ArtifactError
from whiten_index.store.digest_index import DigestIndex, Lookup
from whiten_index.store.dtypes import EmbeddingsType, StoreDtype, as_kept, keeps_moments
from whiten_index.store.records import REMEDY
from whiten_index.whitening.moments import Moments

EMBEDDINGS, MOMENTS = "embeddings.safetensors", "moments.safetensors"
_NAME = re.compile(r"[0-9a-f]{32}")
# Three of the sixteen digits of float64.
_DIGITS_TO_LOSE = 1e3
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Segment:
    """A finished segment."""

    name: Digest  # of its digests; see ``digests_name``
    rows: Positive  # n
    dtype: EmbeddingsType
    truncated: Count  # texts that were longer than the encoder's limit
    bytes: Count  # size of the embeddings


class SegmentManifest(Described):
    """Manifest of a segment."""

    segment: Segment


SCHEMA = Schema("segment", 1, SegmentManifest)


def read_segment(folder: Path) -> SegmentManifest:
    """Read the manifest of a segment."""
    fields = manifest.read_manifest(folder, SCHEMA)
    if fields["segment"].name != folder.name or EMBEDDINGS not in fields["files"]:
        raise ArtifactError(
            f"{folder / manifest.MANIFEST} is damaged: it is of another segment; {REMEDY}"
        )
    return fields


def digests_name(digests: NDArray[np.uint8]) -> str:
    """Return the name of rows with these digests (n, 16), in this order."""
    return hashlib.blake2b(np.ascontiguousarray(digests).data, digest_size=16).hexdigest()


def keyed(digests: NDArray[np.uint8], dtype: StoreDtype) -> NDArray[np.uint8]:
    """Return the digests (n, 16) of texts as those of rows that are kept in a type."""
    key = hashlib.blake2b(dtype.value.encode(), digest_size=digests.shape[1]).digest()
    return digests ^ np.frombuffer(key, dtype=np.uint8)


class RowView:
    """Rows (n, d) of several arrays, in any order."""

    def __init__(self, arrays: Sequence[NDArray[np.floating]], places: Lookup) -> None:
        """Take the arrays (m_i, d), and the array and the row there of each row (n,)."""
        self._arrays, self.places = arrays, places
        self.shape = (len(places.row), int(arrays[0].shape[1]))
        self.dtype: np.dtype[Any] = np.result_type(*(array.dtype for array in arrays))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, wanted: slice | NDArray[np.integer]) -> NDArray[np.floating]:
        segments, rows = self.places.segment[wanted], self.places.row[wanted]
        found = np.empty((len(rows), self.shape[1]), dtype=self.dtype)
        for segment in np.unique(segments):
            inside = segments == segment
            found[inside] = self._arrays[segment][rows[inside]]
        return found


# Embeddings (n, d), read row by row.
EmbeddingRows = NDArray[np.floating] | RowView


_MOST_OPENED = 4096


class _GoneError(ArtifactError):
    """A segment that an index names is missing or damaged by now."""


class Segments:
    """The segments of one encoder.

    Two segments may hold the same row: the larger one counts.
    """

    def __init__(self, folder: Path, mirror: Storage, width: int | None, *, verify: bool) -> None:
        self.folder, self.mirror, self.verify = folder, mirror, verify
        # Of the embeddings, None if the encoder is not known.
        self._width = width
        self.segments_folder = folder / "segments"
        # Manifests of segments whose files were hashed.
        self._hashed: dict[str, SegmentManifest] = {}
        # Indexes of the segments whose content was checked, and of all.
        self._indexes: dict[bool, DigestIndex] = {}
        # Embeddings that were checked, mapped; Linux lets a process map some 65,000 files.
        self._opened: dict[str, NDArray[np.floating]] = {}

    @property
    def place(self) -> Place:
        """Folder or URI of the store, as users name it."""
        return self.mirror.uri or self.folder.parent

    def segment_names(self) -> list[str]:
        """Return the names of the segments, sound or damaged."""
        return list(filter(_NAME.fullmatch, self.mirror.names(self.segments_folder)))

    def segment(self, name: str, *, verify: bool = True) -> Segment | None:
        """Return a segment, None where it is missing, unfinished or damaged.

        ``verify`` checks the content against its checksums, not only the sizes; of one in a bucket
        if its embeddings are here.
        """
        try:
            return self._segment(name, verify=verify)
        except ArtifactError:
            return None

    def _segment(self, name: str, *, verify: bool) -> Segment:
        folder, here = self.segments_folder / name, self._is_here(name)
        self.mirror.fetch(folder, names=None if here else ())
        try:
            fields = read_segment(folder)
            hash_it = here and verify and self._hashed.get(name) != fields
            if here:
                self.check_segment(folder, fields, content=hash_it)
        except ArtifactError:
            if self.mirror.fetch_again(folder):
                return self._segment(name, verify=verify)
            raise
        if hash_it:
            self._hashed[name] = fields
            # An upload may have been cut off.
            self.mirror.keep(folder)
        return fields["segment"]

    def require_segment(self, name: str) -> Segment:
        """Return a segment, fetched; raise ``ArtifactError`` where it is missing or damaged."""
        try:
            self.mirror.fetch(self.segments_folder / name)
            return self._segment(name, verify=True)
        except ArtifactError as error:
            if self.mirror.look_again() and (found := self.segment(name)) is not None:
                return found
            why = str(error).partition("; ")[0]
            raise ArtifactError(
                f"segment {name} of the store {self.place} cannot be read ({why}): it is missing "
                f"or damaged; {REMEDY}"
            ) from error

    def _is_here(self, name: str) -> bool:
        return not self.mirror.uri or exists(self.segments_folder / name / EMBEDDINGS)

    def check_segment(self, folder: Path, fields: SegmentManifest, *, content: bool) -> None:
        """Check the files of a segment, the shapes of its arrays, and with ``content`` for NaN."""
        manifest.check_files(folder, fields, content=content)
        tensors = folder / EMBEDDINGS
        segment, each = fields["segment"], {"digests": (DIGEST_BYTES,), "truncated": ()}
        if self._width is not None:
            each["embeddings"] = (self._width,)
        for name, shape in each.items():
            wanted = ((segment.rows, *shape), segment.dtype if name == "embeddings" else "uint8")
            found = map_tensor(tensors, name, remedy=REMEDY)
            if (found.shape, str(found.dtype)) != wanted:
                raise ArtifactError(
                    f"{folder} is damaged: its {name} are {found.shape} {found.dtype} instead of "
                    f"{wanted[0]} {wanted[1]}; {REMEDY}"
                )
        embeddings = map_tensor(tensors, "embeddings", remedy=REMEDY)
        if keeps_moments(*embeddings.shape):
            manifest.check_files(folder, fields, content=False, names=[MOMENTS])
        if content:
            finite(embeddings, folder)

    def check_kept(self, name: str) -> NDArray[np.uint8]:
        """Check all of a segment as it is kept, not as it was copied, and return its digests."""
        with self.mirror.opened(self.segments_folder / name) as folder:
            fields = read_segment(folder)
            self.check_segment(folder, fields, content=True)
            if MOMENTS in fields["files"]:
                Moments.load(folder / MOMENTS, rows=fields["segment"].rows)
            return np.array(map_tensor(folder / EMBEDDINGS, "digests", remedy=REMEDY))

    def look_again(self) -> None:
        """Take note of segments that others wrote or removed since."""
        self.mirror.look_again()
        self._indexes.clear()
        self._opened.clear()

    def index(self, *, verify: bool) -> DigestIndex:
        """Return where each row is; ``verify`` leaves out segments with damaged content here."""
        if verify not in self._indexes:
            names = self.segment_names()
            if verify:
                names = [name for name in names if not self._is_here(name) or self.segment(name)]
            self._indexes[verify] = DigestIndex(self.digests_of_segments(names))
        return self._indexes[verify]

    def digests_of_segments(self, names: Iterable[str]) -> list[tuple[str, NDArray[np.uint8]]]:
        """Return the digests (n, 16) of segments, the largest first.

        Those that are damaged, by the sizes of their files, or gone are left out. From a bucket,
        no embeddings are read for that.
        """
        found = zip(names, at_once(self._digests_of, names), strict=True)
        there = [(name, digests) for name, digests in found if digests is not None]
        return sorted(there, key=lambda each: (-len(each[1]), each[0]))

    def _digests_of(self, name: str) -> NDArray[np.uint8] | None:
        try:
            return self._texts_of(name)[0]
        except ArtifactError:
            return None

    def _texts_of(self, name: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return ``digests`` and ``truncated`` of a segment; its name proves the digests."""
        folder, bucket = self.segments_folder / name, self.mirror
        if not isinstance(bucket, BucketStorage) or self._is_here(name):
            self._segment(name, verify=False)
            # Copied, as Linux lets a process map some 65,000 files, and more may be there.
            return np.array(self.tensor(name, "digests")), self.tensor(name, "truncated")
        data = bucket.manifest(folder) or b""
        if not bucket.damaged(folder, data):
            fields = manifest.as_manifest(json.loads(data), SCHEMA, folder)
            rows, files = fields["segment"].rows, fields["files"]
            # They are the end of the file.
            stop = files[EMBEDDINGS]["bytes"] if EMBEDDINGS in files else 0
            start = max(stop - (DIGEST_BYTES + 1) * rows, 0)
            path = folder / stamp(data) / EMBEDDINGS
            piece = bucket.piece(path, start, stop) if stop else b""
            digests, truncated = np.split(np.frombuffer(piece, np.uint8), [DIGEST_BYTES * rows])
            if digests_name(digests) == name:
                return digests.reshape(-1, DIGEST_BYTES), truncated
        raise ArtifactError(f"{folder} is missing or damaged; {REMEDY}")

    def tensor(self, name: str, what: str) -> NDArray[Any]:
        """Return ``embeddings`` (n, d), ``digests`` (n, 16) or ``truncated`` (n,), mapped."""
        return map_tensor(self.segments_folder / name / EMBEDDINGS, what, remedy=REMEDY)

    def truncated_and_bytes(self, places: Lookup) -> tuple[int, int]:
        """Return how many known rows were cut to the encoder's limit, and the bytes of all."""
        truncated = size = 0
        for number in np.unique(places.segment[places.known]):
            rows, name = places.row[places.segment == number], places.names[number]
            segment = self._segment(name, verify=False)
            if segment.truncated:
                truncated += int(self._texts_of(name)[1][rows].sum())
            size += len(rows) * segment.bytes // segment.rows
        return truncated, size

    def write(
        self,
        digests: NDArray[np.uint8],
        embeddings: NDArray[np.floating],
        *,
        dtype: StoreDtype,
        truncated: NDArray[np.bool_] | None = None,
        variances: NDArray[np.float64] | None = None,
    ) -> Segment:
        """Keep a segment, whole or not at all; its moments are those of the rows as kept.

        Args:
            digests: (n, 16) uint8, of the rows it was made from.
            embeddings: (n, d).
            dtype: how to keep them; float16 gives way to float32 where it cannot hold them.
            truncated: (n,) whether a text was cut to the encoder's limit; by default none was.
            variances: (d,) of many rows like these, which say what float16 may lose.
        """
        kept = as_kept(embeddings, dtype, variances=variances)
        cut = np.zeros(len(kept), dtype=np.bool_) if truncated is None else truncated
        name, kept_as = digests_name(digests), cast(EmbeddingsType, str(kept.dtype))
        segment = Segment(name, len(kept), kept_as, int(cut.sum()), kept.nbytes)
        # Taken also where they are not kept: they refuse what is not finite, or too large.
        moments = Moments.of(kept)
        self._hashed.pop(name, None)
        # Two processes may find the same damaged segment.
        if (found := self.segment(name)) is not None:
            return found
        folder = self.segments_folder / name
        self.mirror.drop(folder)
        tensors = {"embeddings": kept, "digests": digests, "truncated": cut.astype(np.uint8)}
        with manifest.new_artifact(folder) as (temporary, fields):
            write_tensors(temporary / EMBEDDINGS, tensors, kind=SCHEMA.kind, version=SCHEMA.version)
            if keeps_moments(*kept.shape):
                moments.save(temporary / MOMENTS)
            fields |= SCHEMA.headed(segment=asdict(segment))
        self.mirror.push(folder)
        return segment

    def rows(self, name: str, digests: Callable[[], NDArray[np.uint8]]) -> EmbeddingRows:
        """Return the embeddings (n, d) of rows, of which only those that are touched are read.

        Args:
            name: of their digests; a segment of that name holds all of them, in order.
            digests: returns (n, 16), where they are in other segments.
        """
        with contextlib.suppress(_GoneError):
            return self._opened_embeddings(name)
        places, arrays = self._located(digests())
        return RowView(arrays, places)

    def _located(self, digests: NDArray[np.uint8]) -> tuple[Lookup, list[NDArray[np.floating]]]:
        """Return the places of rows (n,), and the embeddings of the segments named there."""
        # Segments may have been joined, or written again, since they were looked at. At last,
        # every content is checked, so that damage in one of two places does no harm.
        for verify in (False, False, True):
            places = self.index(verify=verify).find(digests)
            used, numbers = np.unique(places.segment, return_inverse=True)
            if places.known.all():
                names = tuple(places.names[number] for number in used)
                with contextlib.suppress(_GoneError):
                    arrays = [self._opened_embeddings(name) for name in names]
                    return Lookup(names, numbers.astype(np.int32), places.row), arrays
            self.look_again()
        missing = int(np.count_nonzero(~places.known))
        raise ArtifactError(
            f"{missing:,} of {len(digests):,} rows of the store {self.place} cannot be read: "
            f"{self.damaged()} is missing or damaged; {REMEDY}"
        )

    def _opened_embeddings(self, name: str) -> NDArray[np.floating]:
        """Return the embeddings of a segment, mapped; its files are checked the first time."""
        if (rows := self._opened.get(name)) is not None:
            return rows
        try:
            self.mirror.fetch(self.segments_folder / name)
            if self.segment(name, verify=self.verify) is None:
                raise _GoneError(name)
            rows = self.tensor(name, "embeddings")
        except ArtifactError as error:
            raise _GoneError(name) from error
        if len(self._opened) >= _MOST_OPENED:
            self._opened.clear()
        self._opened[name] = rows
        return rows

    def damaged(self) -> Path:
        """Return the first damaged file of a segment, or the folder of all if all are sound."""
        here = filter(self._is_here, self.segment_names())
        folders = (self.segments_folder / name for name in here)
        damaged = (manifest.first_damaged(folder, SCHEMA) for folder in folders)
        return next(filter(None, damaged), self.segments_folder)

    def moments_of(self, name: str, digests: Callable[[], NDArray[np.uint8]]) -> Moments:
        """Return the moments of rows as kept; see ``rows``.

        They are those of the segment that most rows are in, less the rows of it that are not
        among these, and with the others.
        """
        with contextlib.suppress(_GoneError):
            self._opened_embeddings(name)
            return self.segment_moments(name)
        places, arrays = self._located(digests())
        nearest = int(np.argmax(np.bincount(places.segment)))
        inside = np.flatnonzero(places.segment == nearest)
        met, first = np.unique(places.row[inside], return_index=True)
        gone = np.setdiff1d(np.arange(len(arrays[nearest])), met, assume_unique=True)
        others = np.delete(np.arange(len(places.row)), inside[first])
        rows = RowView(arrays, places)
        if len(gone) + len(others) < len(rows):
            with contextlib.suppress(_GoneError):
                before = moments = self.segment_moments(places.names[nearest])
                if len(gone):
                    moments -= Moments.of(arrays[nearest][gone])
                if not _mostly_removed(before, moments):
                    return moments + Moments.of(rows[others]) if len(others) else moments
        return Moments.of(finite(rows[np.arange(len(rows))], self.segments_folder))

    def segment_moments(self, name: str) -> Moments:
        """Return the moments of the rows of a segment."""
        folder = self.segments_folder / name
        try:
            rows = self.tensor(name, "embeddings")
            if keeps_moments(*rows.shape):
                return Moments.load(folder / MOMENTS, rows=len(rows), dim=rows.shape[1])
        except ArtifactError as error:
            # Rows may have been joined since the segment was looked at.
            if not exists(folder):
                raise _GoneError(str(error)) from error
            raise
        return Moments.of(finite(rows, self.segments_folder))


def finite(rows: NDArray[np.floating], folder: Path) -> NDArray[np.floating]:
    """Return the rows, or raise ``ArtifactError`` where one is not finite."""
    # By their bits: numpy looks at halves one by one.
    exponent = np.array(np.inf, rows.dtype).view(f"u{rows.itemsize}")
    for block in blocks(rows, _ROWS_AT_ONCE):
        if ((block.view(exponent.dtype) & exponent) == exponent).any():
            raise ArtifactError(f"{folder} is damaged: it holds NaN or infinity; {REMEDY}")
    return rows


def _mostly_removed(before: Moments, left: Moments) -> bool:
    """Return whether so much was taken away, as of outliers, that rounding shows in the rest."""
    sums = [(float(np.trace(before.scatter)), float(np.trace(left.scatter)))]
    if before.quartic is not None and left.quartic is not None:
        sums.append((before.quartic, left.quartic))
    return any(whole > _DIGITS_TO_LOSE * part for whole, part in sums)
