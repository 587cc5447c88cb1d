"""Raw embeddings on disk, shard by shard: encode once, whiten and index as often as wished.

Layout below the root, one folder an encoder::

    <encoder-fingerprint>/
        manifest.json                     the encoder
        agreements/<source-fingerprint>.json  an int8 encoder beside its float32 self, on a sample
        samples/<fingerprint>.safetensors pieces of documents that a transform is chosen on
        choices/<fingerprint>.json        transforms chosen
        shards/<shard-fingerprint>/       embeddings + text digests, moments, manifest (last)
        rows/<digest>.arrow.zst           ids and kept columns of a shard, as one corpus has them
        corpora/<source-fingerprint>.json the shards of a corpus, in order

A shard's fingerprint comes from its texts, so it is found again whatever file, id or metadata
column they are read with.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index import manifest
from whiten_index.errors import ArtifactError, ConfigError, FormatError
from whiten_index.moments import Moments
from whiten_index.tensors import map_tensor, read_tensors, write_tensors

FORMAT_VERSION = 1
_STORE, _SHARD, _CORPUS, _SAMPLE = "store", "shard", "corpus", "sample"
_ROWS_SUFFIX = ".arrow.zst"
_EMBEDDINGS, _MOMENTS = "embeddings.safetensors", "moments.safetensors"
_REMEDY = (
    "run the same encode or build with the corpus again, which makes just what is missing anew"
)
# A relative error r of each coordinate costs r²/2 of cosine: 1/256 keeps it above 0.99999.
_FLOAT16_ERROR = 1 / 256
_NEGLIGIBLE_VARIANCE = 1e-10
_LOOKED_AT_ROWS = 2048


class StoreDtype(Enum):
    """How embeddings are kept; ``OWN`` keeps the precision they came with."""

    FLOAT16 = "float16"
    FLOAT32 = "float32"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard that is done.

    Attributes:
        fingerprint: of its texts and of how they are kept.
        rows: n.
        dtype: numpy name of the embeddings' type.
        truncated: texts that were longer than the encoder's limit.
        bytes: size of the embeddings file.
    """

    fingerprint: str
    rows: int
    dtype: str
    truncated: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CorpusPart:
    """One shard of a corpus: where its embeddings and its rows are.

    Attributes:
        shard: fingerprint of the stored shard; empty where every row was skipped.
        documents: digest that names its ids and kept columns.
        rows: n.
        read: rows read from the corpus.
        truncated: texts cut to the encoder's limit.
    """

    shard: str
    documents: str
    rows: int
    read: int
    truncated: int


@dataclass(frozen=True)
class CorpusRecord:
    """The shards of one corpus in order, enough to index it without reading it again.

    Attributes:
        source: what tells this corpus from others.
        parts: its shards.
        skipped: reason -> rows left out.
    """

    source: Mapping[str, Any]
    parts: tuple[CorpusPart, ...]
    skipped: Mapping[str, int]

    @property
    def fingerprint(self) -> str:
        """Identity of the rows and their order."""
        return manifest.fingerprint({"parts": [[p.shard, p.documents] for p in self.parts]})

    @property
    def rows(self) -> int:
        """Rows that have an embedding."""
        return sum(part.rows for part in self.parts)


class EmbeddingStore:
    """The embeddings of one encoder below a root folder.

    Attributes:
        root: the store's folder, which may hold other encoders too.
        encoder: the encoder as JSON values.
        folder: this encoder's own folder.
    """

    def __init__(self, root: Path, encoder: Mapping[str, Any], fingerprint: str) -> None:
        self.root = root
        self.encoder = dict(encoder)
        self.folder = root / fingerprint

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder."""
        return self.folder.name

    @classmethod
    def create(
        cls, root: Path | str, encoder: Mapping[str, Any], fingerprint: str
    ) -> EmbeddingStore:
        """Open the store of an encoder, making it where it is new.

        Raises:
            OutputError: the folder cannot be written.
        """
        store = cls(Path(root), encoder, fingerprint)
        fields = {"kind": _STORE, "format_version": FORMAT_VERSION, "encoder": store.encoder}
        with manifest.writing(store.folder):
            store._shards.mkdir(parents=True, exist_ok=True)
            store._rows.mkdir(exist_ok=True)
            store._corpora.mkdir(exist_ok=True)
            if store._recorded_encoder() != store.encoder:
                manifest.write_manifest(store.folder / manifest.MANIFEST, fields)
        return store

    @classmethod
    def open(cls, root: Path | str, *, fingerprint: str | None = None) -> EmbeddingStore:
        """Open an existing store, whose encoder may be left out where it is the only one.

        Raises:
            ArtifactError: there is none, it is damaged, or several encoders are in it.
        """
        folders = sorted(path.parent for path in Path(root).glob(f"*/{manifest.MANIFEST}"))
        if fingerprint is not None:
            folders = [folder for folder in folders if folder.name == fingerprint]
        if not folders:
            raise ArtifactError(
                f"{root} holds no store of embeddings"
                + (f" of encoder {fingerprint}" if fingerprint else "")
                + "; check the path, or fill one with: whiten-index encode CORPUS --store DIR"
            )
        if len(folders) > 1:
            names = ", ".join(_encoder_name(folder) for folder in folders)
            raise ArtifactError(
                f"{root} holds embeddings of {len(folders)} encoders ({names}); name the corpus "
                "and the encoder's options as when they were encoded"
            )
        found = manifest.read_manifest(folders[0], kind=_STORE, version=FORMAT_VERSION)
        return cls(Path(root), found["encoder"], folders[0].name)

    def tidy(self) -> None:
        """Remove what a writer that died left; only for whoever is the one writer."""
        with manifest.writing(self.folder):
            for folder in (self.folder, *filter(Path.is_dir, self.folder.iterdir())):
                manifest.remove_leftovers(folder)

    def shard_fingerprint(self, digests: NDArray[np.uint8], dtype: StoreDtype) -> str:
        """Return the fingerprint of rows with these digests (n, 16), kept as ``dtype``."""
        rows = hashlib.blake2b(np.ascontiguousarray(digests).data, digest_size=32).hexdigest()
        return manifest.fingerprint({"rows": rows, "dtype": dtype.value})

    def find(self, fingerprint: str, *, verify: bool = True) -> StoredShard | None:
        """Return a finished shard, or None where it is missing, unfinished or damaged.

        Args:
            fingerprint: of the shard.
            verify: check the content against its checksums, not only the sizes.

        Raises:
            FormatError: a later release wrote it.
        """
        folder = self._shards / fingerprint
        try:
            found = manifest.read_manifest(folder, kind=_SHARD, version=FORMAT_VERSION)
            manifest.check_files(folder, found, content=verify)
            return StoredShard(**found["shard"])
        except FormatError:
            raise
        except (ArtifactError, KeyError, TypeError):
            return None

    def is_damaged(self, fingerprint: str) -> bool:
        """Tell whether a shard that ``find`` does not return has a folder all the same."""
        return (self._shards / fingerprint).exists()

    def write(
        self,
        fingerprint: str,
        digests: NDArray[np.uint8],
        embeddings: NDArray[np.floating],
        *,
        dtype: StoreDtype,
        truncated: int,
        moments_of: Callable[[str], Moments] | None = None,
    ) -> StoredShard:
        """Keep a shard, whole or not at all; its moments are those of the rows as kept.

        Args:
            fingerprint: of the shard.
            digests: (n, 16) uint8, of the rows it was made from.
            embeddings: (n, d).
            dtype: how to keep them; float16 gives way to float32 where it cannot hold them.
            truncated: texts that were cut to the encoder's limit.
            moments_of: gives the moments of the rows as kept in a type, where that is quicker
                done elsewhere than here.

        Raises:
            OutputError: the disk is full or cannot be written.
        """
        kept = as_kept(embeddings, dtype)
        shard = StoredShard(fingerprint, len(kept), str(kept.dtype), truncated, kept.nbytes)
        folder = self._shards / fingerprint
        if folder.exists() and self.find(fingerprint) is None:
            # Two processes may find the same damaged shard.
            shutil.rmtree(folder, ignore_errors=True)

        def fill(temporary: Path) -> dict[str, Any]:
            tensors = {"embeddings": kept, "digests": digests}
            write_tensors(temporary / _EMBEDDINGS, tensors, kind=_SHARD, version=FORMAT_VERSION)
            moments = moments_of(str(kept.dtype)) if moments_of else Moments.of(kept)
            moments.save(temporary / _MOMENTS)
            return {"kind": _SHARD, "format_version": FORMAT_VERSION, "shard": asdict(shard)}

        manifest.publish_folder(folder, fill)
        return shard

    def embeddings(self, fingerprint: str) -> NDArray[np.floating]:
        """Return the embeddings of a shard, (n, d), as kept.

        Raises:
            ArtifactError: they cannot be read.
        """
        path = self._shards / fingerprint / _EMBEDDINGS
        shapes = {"embeddings": "nd"}
        tensors, _ = read_tensors(
            path, kind=_SHARD, version=FORMAT_VERSION, shapes=shapes, remedy=_REMEDY
        )
        array: NDArray[np.floating] = tensors["embeddings"]
        return array

    def mapped_embeddings(self, fingerprint: str) -> NDArray[np.floating]:
        """Return the embeddings of a shard, (n, d), of which only rows that are touched are read.

        Raises:
            ArtifactError: the file is missing or damaged.
        """
        path = self._shards / fingerprint / _EMBEDDINGS
        return map_tensor(path, "embeddings", remedy=_REMEDY)

    def moments(self, fingerprint: str) -> Moments:
        """Return the moments of a shard's embeddings as kept."""
        return Moments.load(self._shards / fingerprint / _MOMENTS)

    def write_documents(self, documents: pa.Table) -> str:
        """Keep the ids and metadata of a shard; return the digest that names them.

        Equal rows get equal names, however the table is chunked or sliced.
        """
        everything = pa.array(range(documents.num_rows), pa.int64())
        table = documents.take(everything).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        data = sink.getvalue().to_pybytes()
        # The name is of the rows: the bytes of the compressed file change with zstd's release.
        name = _digest(data)
        path = self._rows / f"{name}{_ROWS_SUFFIX}"
        if _content(path) != data:
            with manifest.writing(path):
                manifest.replace_file(path, _compressed(data))
        return name

    def documents(self, part: CorpusPart) -> pa.Table:
        """Return the ids and kept columns of a part, n rows.

        Raises:
            ArtifactError: they are missing or damaged.
        """
        path = self._rows / f"{part.documents}{_ROWS_SUFFIX}"
        data = _content(path)
        if data is None or _digest(data) != part.documents:
            how = "missing or unreadable" if data is None else "damaged: it does not match its name"
            raise ArtifactError(f"{path} is {how}; {_REMEDY}")
        return pa.ipc.open_stream(data).read_all()

    def save_corpus(self, record: CorpusRecord) -> None:
        """Remember which shards make up a corpus, replacing what was known of it."""
        name = manifest.fingerprint(dict(record.source))
        value = {
            "kind": _CORPUS,
            "format_version": FORMAT_VERSION,
            "source": dict(record.source),
            "skipped": dict(record.skipped),
            "parts": [asdict(part) for part in record.parts],
        }
        path = self._corpora / f"{name}.json"
        with manifest.writing(path):
            manifest.write_manifest(path, value)

    def corpus(self, source: Mapping[str, Any] | None = None) -> CorpusRecord:
        """Return what is known of a corpus; which one may be left out where there is only one.

        Raises:
            ArtifactError: no corpus was encoded to the end, or there are several to choose from.
        """
        names = [path.name for path in sorted(self._corpora.glob("*.json"))]
        if source is not None:
            names = [f"{manifest.fingerprint(dict(source))}.json"]
        records = [self._record(name) for name in names if (self._corpora / name).exists()]
        if not records:
            raise ArtifactError(
                f"no corpus was encoded to its end into {self.root}; run whiten-index encode "
                "CORPUS --store DIR again, which takes up where it stopped"
            )
        if len(records) > 1:
            found = "; ".join(manifest.canonical_json(dict(r.source)) for r in records)
            raise ArtifactError(
                f"{self.root} holds {len(records)} corpora ({found}); name the corpus to index "
                "and its columns, as when it was encoded"
            )
        return records[0]

    def save_agreement(self, source: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Remember how well an encoder agrees with its float32 self on a corpus's texts."""
        self._save_note("agreements", source, value)

    def agreement(self, source: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what ``save_agreement`` was given last for a corpus, None where it never was."""
        return self._note("agreements", source)

    def save_choice(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Remember which transform was chosen, by what the choice depends on."""
        digest = manifest.fingerprint(dict(value))
        self._save_note("choices", key, {"choice": value, "digest": digest})

    def choice(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the choice remembered for ``key``, None where there is none or it is damaged."""
        note = self._note("choices", key) or {}
        choice = note.get("choice")
        sound = isinstance(choice, dict) and manifest.fingerprint(choice) == note.get("digest")
        return choice if sound else None

    def save_sample(self, key: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        """Keep the arrays of a sample, whole or not at all."""
        path = self._sample_path(key)
        with manifest.writing(path):
            path.parent.mkdir(exist_ok=True)
            with manifest.replacing(path) as temporary:
                facts = {"digest": _digest_of(tensors)}
                write_tensors(temporary, tensors, kind=_SAMPLE, version=FORMAT_VERSION, facts=facts)

    def sample(
        self, key: Mapping[str, Any], shapes: Mapping[str, str]
    ) -> dict[str, NDArray[Any]] | None:
        """Return the sample kept for ``key``, None where there is none or it is damaged.

        Args:
            key: what the sample depends on.
            shapes: name -> a letter for each axis, as ``read_tensors`` takes them.
        """
        path = self._sample_path(key)
        try:
            found, facts = read_tensors(path, kind=_SAMPLE, version=FORMAT_VERSION, shapes=shapes)
        except ArtifactError:
            return None
        return found if facts.get("digest") == _digest_of(found) else None

    def _sample_path(self, key: Mapping[str, Any]) -> Path:
        return self.folder / "samples" / f"{manifest.fingerprint(dict(key))}.safetensors"

    def _save_note(self, kind: str, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        path = self._note_path(kind, key)
        with manifest.writing(path):
            path.parent.mkdir(exist_ok=True)
            manifest.write_json(path, value)

    def _note(self, kind: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            return manifest.read_json(self._note_path(kind, key), what=f"one of the {kind}")
        except ArtifactError:
            return None

    def _note_path(self, kind: str, key: Mapping[str, Any]) -> Path:
        return self.folder / kind / f"{manifest.fingerprint(dict(key))}.json"

    def require(self, fingerprint: str, *, verify: bool = True) -> StoredShard:
        """Return a finished shard, with ``verify`` checked against its checksums.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        found = self.find(fingerprint, verify=verify)
        if found is None:
            raise ArtifactError(
                f"shard {fingerprint} of the store {self.root} is missing or damaged; {_REMEDY}"
            )
        return found

    def _recorded_encoder(self) -> Any:
        """Return the encoder as last written; its name or query prompt may have changed since."""
        try:
            found = manifest.read_manifest(self.folder, kind=_STORE, version=FORMAT_VERSION)
        except FormatError:
            raise
        except ArtifactError:
            return None
        return found["encoder"]

    def _record(self, name: str) -> CorpusRecord:
        value = manifest.read_manifest(
            self._corpora, kind=_CORPUS, version=FORMAT_VERSION, name=name
        )
        parts = tuple(CorpusPart(**part) for part in value["parts"])
        return CorpusRecord(value["source"], parts, value["skipped"])

    @property
    def _rows(self) -> Path:
        return self.folder / "rows"

    @property
    def _shards(self) -> Path:
        return self.folder / "shards"

    @property
    def _corpora(self) -> Path:
        return self.folder / "corpora"


def as_kept(embeddings: NDArray[np.floating], dtype: StoreDtype) -> NDArray[np.floating]:
    """Return embeddings (n, d) in the type they are kept in."""
    if dtype is StoreDtype.OWN:
        return embeddings
    if dtype is StoreDtype.FLOAT16 and fits_float16(embeddings):
        return embeddings.astype(np.float16)
    with np.errstate(over="ignore"):
        single = embeddings.astype(np.float32)
    if np.isinf(single).any() and np.isfinite(embeddings).all():
        raise ConfigError(
            "some embeddings are beyond float32; use --store-dtype own, or scale the column down"
        )
    return single


def fits_float16(embeddings: NDArray[np.floating]) -> bool:
    """Tell whether rounding (n, d) to float16 is small against the spread of each coordinate.

    Coordinates whose variance is below 1e-10 of the largest carry nothing and are passed over.
    """
    if embeddings.dtype == np.float16:
        return True
    if len(embeddings) < 2:
        return False
    mean = embeddings.mean(axis=0, dtype=np.float64)
    noise, variance = np.zeros_like(mean), np.zeros_like(mean)
    for start in range(0, len(embeddings), _LOOKED_AT_ROWS):
        block = embeddings[start : start + _LOOKED_AT_ROWS]
        with np.errstate(over="ignore"):
            half = block.astype(np.float16)
        if not np.isfinite(half).all():
            return False
        noise += np.square(half.astype(np.float64) - block).sum(axis=0)
        variance += np.square(block - mean).sum(axis=0)
    matters = variance > _NEGLIGIBLE_VARIANCE * variance.max()
    return bool((noise[matters] <= _FLOAT16_ERROR**2 * variance[matters]).all())


def require_dtype(name: str | None, *, own: bool) -> StoreDtype:
    """Return the type asked for; without a wish, float16, or the column's own (``own``)."""
    if name is None:
        return StoreDtype.OWN if own else StoreDtype.FLOAT16
    try:
        return StoreDtype(name)
    except ValueError as error:
        raise ConfigError(
            f"store dtype {name!r} is unknown; use {', '.join(d.value for d in StoreDtype)}"
        ) from error


def total_moments(store: EmbeddingStore, shards: Sequence[str], dim: int) -> Moments:
    """Return the sum of the moments of shards, in the order given."""
    return Moments.total(chain([Moments.empty(dim)], map(store.moments, shards)))


def _content(path: Path) -> bytes | None:
    """Return what a compressed file holds, None where it is missing or cannot be read."""
    try:
        with pa.input_stream(str(path), compression="zstd") as stream:
            data: bytes = stream.read()
    except (OSError, pa.ArrowException):
        return None
    return data


def _compressed(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _digest_of(tensors: Mapping[str, NDArray[Any]]) -> str:
    return _digest(b"".join(tensors[name].tobytes() for name in sorted(tensors)))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _encoder_name(folder: Path) -> str:
    found = manifest.read_manifest(folder, kind=_STORE, version=FORMAT_VERSION)["encoder"]
    return f"{found.get('model', found.get('column'))} {folder.name[:8]}"
