"""Raw embeddings on disk, shard by shard: encoded once, whitened and indexed many times.

Layout below the root, one folder an encoder::

    <encoder-fingerprint>/
        manifest.json                     the encoder
        samples/<fingerprint>.safetensors pieces of documents that a transform is chosen on
        choices/<fingerprint>.json        transforms chosen
        runtimes/<fingerprint>.json       versions of the libraries that computed embeddings
        shards/<shard-fingerprint>/       embeddings, text digests, moments of d rows or more,
                                          manifest (last)
        packs/<name>/                     small shards joined, likewise
        rows/<digest>.arrow.zst           ids and kept columns of a shard in one corpus
        corpora/<source-fingerprint>.json the shards of a corpus, in order
        indexes/<fingerprint>.json        place of an index built from here
        registered/<fingerprint>.json     the same again

A shard's fingerprint comes from its texts: it is found again under any file name, id or metadata
column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts import manifest
from whiten_index.artifacts.atomic import make_folder, remove_leftovers, replace_file
from whiten_index.artifacts.cached_storage import BucketStorage, place_of
from whiten_index.artifacts.files import (
    exists,
    is_folder,
    list_folder,
    open_regular,
    reading,
    writing,
)
from whiten_index.artifacts.limits import canonical_json
from whiten_index.artifacts.manifest import Digest, Schema, Sealed
from whiten_index.artifacts.storage import Place
from whiten_index.errors import ArtifactError, FormatError
from whiten_index.store.dtypes import StoreDtype
from whiten_index.store.index_registry import FOLDER, IndexRegistry, owner_of
from whiten_index.store.packs import REMEDY
from whiten_index.store.records import CorpusPart, CorpusRecord, EncoderFacts
from whiten_index.store.result_cache import ResultCache
from whiten_index.store.shards import Shards

FORMAT_VERSION = 1
KIND = "store"
# Files of ids and kept columns.
_DOCUMENTS = ".arrow.zst"


class StoreManifest(Sealed):
    """Manifest of the folder of an encoder."""

    encoder: EncoderFacts
    fingerprint: Digest


SCHEMA = Schema(KIND, FORMAT_VERSION, StoreManifest)


class EmbeddingStore(Shards):
    """The embeddings of one encoder below a root folder.

    Attributes:
        root: the store's folder, which may hold other encoders too; of a store in a bucket, that
            of the copies on this machine.
        mirror: the bucket, if there is one.
        encoder: the encoder as JSON values.
        folder: this encoder's folder.
        results: choices, samples and runtimes that are remembered.
        indexes: registry of the indexes built from here.
        verify: whether a shard's content is compared with its checksums before its first row is
            read, once for each opened store; else only sizes are compared.

    Example:
        >>> store = EmbeddingStore.open("store")
        >>> [part.rows for part in store.corpus().parts]
        [60]
    """

    def __init__(
        self,
        root: Place | BucketStorage,
        encoder: Mapping[str, Any],
        fingerprint: str,
        verify: bool = True,
    ) -> None:
        self.root, mirror = place_of(root)
        super().__init__(self.root / fingerprint, mirror, verify=verify)
        self.encoder = dict(encoder)
        self.results = ResultCache(self.folder, self.mirror)
        self.indexes = IndexRegistry(self.folder, self.mirror)

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddingStore, (self.place, self.encoder, self.fingerprint, self.verify)

    @property
    def place(self) -> Place:
        """Folder or URI, as users name it."""
        return self.mirror.uri or self.root

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
            StorageError: the folder cannot be written.
        """
        store = cls(root, encoder, fingerprint)
        fields = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "encoder": store.encoder,
            "fingerprint": fingerprint,
        }
        with writing(store.folder):
            for name in ("shards", "rows", "corpora", FOLDER):
                make_folder(store.folder / name)
            if store._recorded_encoder() != store.encoder:
                manifest.write_manifest(store.folder / manifest.MANIFEST, fields)
                store.mirror.push(store.folder / manifest.MANIFEST)
        return store

    @classmethod
    def open(
        cls, root: Path | str, *, fingerprint: str | None = None, verify: bool = True
    ) -> EmbeddingStore:
        """Open an existing store, whose encoder may be left out where it is the only one.

        Raises:
            ArtifactError: no store is there, it is damaged, or several encoders are in it.
        """
        place, mirror = place_of(root)
        folders = mirror.folders_with(place, manifest.MANIFEST, only=fingerprint)
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
        # A bucket is not listed twice.
        there = mirror if isinstance(mirror, BucketStorage) else place
        return cls(there, read_encoder(folders[0]), folders[0].name, verify)

    def tidy(self) -> int:
        """Remove unfinished files of a writer that died; return how many there were.

        The caller holds the lock.
        """
        folders = (self.folder, *filter(is_folder, list_folder(self.folder)))
        return sum(map(remove_leftovers, folders))

    def shard_fingerprint(self, digests: NDArray[np.uint8], dtype: StoreDtype) -> str:
        """Return the fingerprint of rows with these digests (n, 16), kept as ``dtype``."""
        rows = hashlib.blake2b(np.ascontiguousarray(digests).data, digest_size=32).hexdigest()
        return manifest.fingerprint({"rows": rows, "dtype": dtype.value})

    def corpus_shards(self) -> tuple[str, ...]:
        """Return the shards of all corpora that were encoded to the end, each once.

        Damaged records are skipped: a corpus that is encoded again gets a new one.
        """
        found = dict[str, None]()
        for name in self._corpus_names():
            try:
                found |= dict.fromkeys(self.record(name).shards)
            except FormatError:
                raise
            except ArtifactError:
                continue
        return tuple(found)

    def write_documents(self, documents: pa.Table) -> str:
        """Keep the ids and kept columns of a shard; return the digest that names them.

        Equal rows get equal names, however the table is chunked or sliced. The name is of the rows,
        as the bytes of the compressed file change with zstd's release.
        """
        data = _as_bytes(documents)
        name = _digest(data)
        path = self.documents_path(name)
        if self._document_bytes(name) == data:
            self.mirror.keep(path)
            return name
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        with writing(path):
            if not exists(path.parent):
                # On another machine than that which made the store in its bucket.
                make_folder(path.parent)
            replace_file(path, sink.getvalue().to_pybytes())
        self.mirror.push(path)
        return name

    def name_documents(self, documents: pa.Table) -> str:
        """Return the digest that ``write_documents`` would return."""
        return _digest(_as_bytes(documents))

    def documents(self, part: CorpusPart) -> pa.Table:
        """Return the ids and kept columns of a part, n rows.

        Raises:
            ArtifactError: they are missing or damaged.
        """
        data = self._document_bytes(part.documents)
        if data is None and self.mirror.look_again():
            data = self._document_bytes(part.documents)
        if data is None:
            path = self.documents_path(part.documents)
            raise ArtifactError(f"{path} is missing or damaged; {REMEDY}")
        return pa.ipc.open_stream(data).read_all()

    def documents_path(self, name: str) -> Path:
        """Return the path of the ids and kept columns with that digest."""
        return self.folder / "rows" / f"{name}{_DOCUMENTS}"

    def documents_paths(self) -> dict[str, Path]:
        """Return digest -> file of ids and kept columns."""
        files = list_folder(self.folder / "rows", f"[!.]*{_DOCUMENTS}")
        return {file.name.removesuffix(_DOCUMENTS): file for file in files}

    def _document_bytes(self, name: str) -> bytes | None:
        """Return the content of a file of rows, None where it is missing or damaged."""
        path = self.documents_path(name)
        self.mirror.fetch(path)
        data = _unpacked(path)
        if data is not None and _digest(data) == name:
            return data
        return self._document_bytes(name) if self.mirror.fetch_again(path) else None

    def has(self, part: CorpusPart) -> bool:
        """Return whether a part's shard, checked against its checksums, and its rows are there."""
        if not part.rows:
            return True
        sound = self._document_bytes(part.documents) is not None
        return sound and self.find(part.shard) is not None

    def fetch_corpus(self, source: Mapping[str, Any] | None = None) -> None:
        """Download the parts of a corpus, or of all, many shards at a time."""
        only = None if source is None else f"{manifest.fingerprint(dict(source))}.json"
        for name in self.mirror.names(self._corpora):
            with suppress(ArtifactError):
                parts = self.record(name).parts if only in (None, name) else ()
                shards = (self.shards_folder / part.shard for part in parts if part.rows)
                rows = (self.documents_path(p.documents) for p in parts if p.rows)
                self.mirror.fetch_all(chain(shards, rows))

    def fetch_shards(self, fingerprints: Iterable[str]) -> None:
        """Download shards, many at a time, from the bucket of the store, if it is in one."""
        self.mirror.fetch_all(self.shards_folder / name for name in fingerprints)

    def save_corpus(self, record: CorpusRecord, *, index: Place | None = None) -> None:
        """Write the record of a corpus, replacing an earlier one."""
        path, owner = self._corpus_path(record.source), owner_of(index)
        before = self._owner_of(path)
        both = owner if before in (None, owner) else ""
        replace(record, index=both).save(path)
        self.mirror.push(path)

    def forget_corpus(self, source: Mapping[str, Any], *, index: Place) -> None:
        """Remove the record of a corpus that is kept for an index alone."""
        path = self._corpus_path(source)
        if self._owner_of(path) == owner_of(index):
            with writing(path):
                self.mirror.remove(path)

    def _corpus_path(self, source: Mapping[str, Any]) -> Path:
        return self._corpora / f"{manifest.fingerprint(dict(source))}.json"

    def _owner_of(self, path: Path) -> str | None:
        try:
            return self.record(path.name).index if exists(path) else None
        except ArtifactError:
            return None

    def corpus(self, source: Mapping[str, Any] | None = None) -> CorpusRecord:
        """Return the record of a corpus; ``source`` may be left out if there is only one.

        Raises:
            ArtifactError: no corpus was encoded to the end, or there are several to choose from.
        """
        names = self._corpus_names()
        if source is not None:
            names = [f"{manifest.fingerprint(dict(source))}.json"]
        paths = [self._corpora / name for name in names]
        records = [self.record(p.name) for p in paths if exists(p) or self.mirror.holds(p)]
        if not records:
            raise ArtifactError(
                f"no corpus was encoded to its end into {self.place}; run whiten-index encode "
                "CORPUS --store DIR again, which takes up where it stopped"
            )
        if len(records) > 1:
            found = "; ".join(canonical_json(dict(r.source)) for r in records)
            raise ArtifactError(
                f"{self.place} holds {len(records)} corpora ({found}); name the corpus to index "
                "and its columns, as when it was encoded"
            )
        return records[0]

    def _recorded_encoder(self) -> Any:
        """Return the encoder as last written; its name or query prompt may have changed since."""
        self.mirror.latest(self.folder / manifest.MANIFEST)
        try:
            return read_encoder(self.folder)
        except FormatError:
            raise
        except ArtifactError:
            return None

    def _corpus_names(self) -> list[str]:
        here = {path.name for path in list_folder(self._corpora, "[!.]*.json")}
        return sorted(here | self.mirror.names(self._corpora))

    def record(self, name: str) -> CorpusRecord:
        """Return the record in a file of that name."""
        path = self._corpora / name
        self.mirror.latest(path)
        record = CorpusRecord.load(path)
        if self._corpus_path(record.source) != path:
            raise ArtifactError(
                f"{path} is damaged: it is the record of another corpus; encode it again"
            )
        return record

    @property
    def _corpora(self) -> Path:
        return self.folder / "corpora"


def read_encoder(folder: Path) -> EncoderFacts:
    """Return the encoder that a folder of a store is of."""
    found = manifest.read_manifest(folder, SCHEMA)
    if found["fingerprint"] != folder.name:
        raise ArtifactError(
            f"{folder / manifest.MANIFEST} is damaged: it is of the encoder "
            f"{found['fingerprint']}; {manifest.REMEDY}"
        )
    return found["encoder"]


def _as_bytes(documents: pa.Table) -> bytes:
    everything = pa.array(range(documents.num_rows), pa.int64())
    table = documents.take(everything).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _unpacked(path: Path) -> bytes | None:
    """Return the content of a compressed file, None if it is missing or damaged."""
    try:
        with (
            reading(path),
            open_regular(path) as file,
            pa.input_stream(file, compression="zstd") as stream,
        ):
            data: bytes = stream.read()
    except (ArtifactError, OSError, pa.ArrowException):
        return None
    return data


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _encoder_name(folder: Path) -> str:
    found = read_encoder(folder)
    return f"{found.get('model', found.get('column'))} {folder.name[:8]}"
