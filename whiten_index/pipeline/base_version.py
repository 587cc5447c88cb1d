"""The published version that an update starts from, and the build that it came of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ArtifactError, ConfigError, StorageError
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.changes import apart
from whiten_index.pipeline.corpus_moments import Fitted
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.search.query_encoder import QueryEncoder
from whiten_index.store.digest_index import DigestIndex, HashTable, digest_keys
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusPart, CorpusRecord
from whiten_index.versions.provenance import corpus_record, open_store
from whiten_index.versions.published import (
    CANDIDATES,
    MOMENTS,
    VERSIONS,
    WHITENING,
    Version,
    read_version,
    version_names,
    with_published,
    withdrawn_versions,
)
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import Choice
from whiten_index.whitening.transform import Whitening


@dataclass(frozen=True, eq=False)
class BaseVersion:
    """The published version that an update starts from.

    Attributes:
        source: the version and its files.
        store: the embeddings it was built from.
        record: its corpus in the store.
        fitted: its transform, and the moments that this was fitted on.
        config: the build that would make it again, of the corpus as it is now.
    """

    source: Version
    store: EmbeddingStore
    record: CorpusRecord
    fitted: Fitted
    config: BuildConfig

    @classmethod
    def open(cls, config: UpdateConfig) -> BaseVersion:
        """Open the published version of an index, every checksum looked at.

        Raises:
            ArtifactError: nothing is published, or it or its store is damaged or missing.
            EncoderError: the model is gone, is another one by now, or needs code that the update
                does not allow.
        """
        root = Path(config.index)
        source = with_published(root, Version.check)
        fields = source.fields
        remedy = "name it with --store DIR, or build the index again"
        store = open_store(root, fields, given=config.store, reader="an update", remedy=remedy)
        record = corpus_record(source)
        if config.store is not None:
            _require_parts(store, record, source.name)
        build = _build_config(config, fields, store)
        choice = fields.get("choice")
        fitted = Fitted(
            Moments.load(source.file(MOMENTS)),
            Whitening.load(source.file(WHITENING)),
            None if choice is None else Choice.from_json(choice),
        )
        return cls(source, store, record, fitted, build)

    @property
    def folder(self) -> Path:
        """Folder of the version."""
        return self.source.folder

    @property
    def fields(self) -> Mapping[str, Any]:
        """The version's manifest."""
        return self.source.fields

    @property
    def version(self) -> str:
        """Name of the version."""
        return self.source.name

    @property
    def passages(self) -> bool:
        """Whether rows are passages of documents."""
        return bool(self.fields["corpus"]["source"].get("passages"))

    @property
    def update(self) -> Mapping[str, Any]:
        """What its manifest says of the update that made it, nothing where a build did."""
        found: Mapping[str, Any] = self.fields.get("update") or {}
        return found

    def read_before(self, corpus: ParquetCorpus) -> CorpusRecord:
        """Return the record by which files that are as they were are known.

        It is the store's where that is of the same rows: it may know files by their present time
        which had other times, or too late ones, when the version was made.
        """
        try:
            latest = self.store.corpus(corpus.config.source_identity())
        except ArtifactError:
            return self.record
        return latest if latest.fingerprint == self.record.fingerprint else self.record

    def known_records(self) -> list[CorpusRecord]:
        """Return its record and those of candidates, whose rows were encoded before a gate."""
        found = [self.record]
        root = self.folder.parents[1]
        for name in version_names(root, inside=CANDIDATES):
            # The rows of a damaged one are encoded again.
            with contextlib.suppress(ArtifactError):
                candidate = read_version(root / CANDIDATES / name)
                found.append(corpus_record(candidate))
        return found

    @property
    def column_dim(self) -> int | None:
        """Width of the embeddings of its column, None where texts are encoded."""
        return None if self.config.embedding_column is None else int(self.store.encoder["dim"])

    def require_same_width(self, corpus: ParquetCorpus) -> None:
        """Refuse a column of embeddings that are not of the kind that the index was built from.

        Raises:
            ConfigError: they have another width.
        """
        dim = int(self.store.encoder["dim"])
        if corpus.dim not in (None, dim):
            raise ConfigError(
                f"the corpus holds embeddings of another kind (width {corpus.dim}) than the index "
                f"(width {dim}); build a new index"
            )


def _require_parts(store: EmbeddingStore, record: CorpusRecord, version: str) -> None:
    """Refuse a store that was named and is another one, before anything is written there.

    Raises:
        ArtifactError: it lacks shards of the version.
    """
    lacking = sum(store.find(shard, verify=False) is None for shard in record.shards)
    if lacking:
        raise ArtifactError(
            f"the store {store.root}, named with --store, lacks {lacking} of the "
            f"{len(record.shards)} shards that version {version} was made of; name the store that "
            "the index was built from, or leave --store out; if it is that one, whiten-index build "
            "mends it"
        )


def _build_config(
    config: UpdateConfig, fields: Mapping[str, Any], store: EmbeddingStore
) -> BuildConfig:
    known = {field.name for field in dataclasses.fields(BuildConfig)}
    given = {name: value for name, value in fields["config"].items() if name in known}
    if not given["corpus"]:
        raise ArtifactError(
            f"version {fields['version']} was built from a store alone, which does not tell how "
            "its corpus is read (ids, kept columns); run whiten-index build with the corpus once, "
            "and update from then on"
        )
    build = BuildConfig(
        **given
        | {
            "corpus": config.corpus or tuple(fields["corpus"]["source"]["sources"]),
            "out": config.index,
            "store": str(store.place),
            "device": config.device,
            "threads": config.threads,
            "index_device": config.index_device,
        }
    )
    recorded = recorded_spec(fields["encoder"])
    if recorded is None:
        return replace(
            build,
            model=config.model,
            revision=None,
            trust_remote_code=config.trust_remote_code,
        )
    _, _, found = QueryEncoder(
        recorded, model=config.model, trust_remote_code=config.trust_remote_code
    ).resolve()
    # The encoder record alone says which model, and the update's own options what it may do.
    taken = ("model", "revision", "trust_remote_code", "local_files_only", "code_revision")
    return replace(build, **{name: getattr(found, name) for name in taken})


def withdrawn_texts(
    base: BaseVersion, record: CorpusRecord, store: EmbeddingStore
) -> Iterator[str]:
    """Yield a note for each withdrawn version some of whose new texts return.

    A version that the system does not let be read is only noted too.
    """
    try:
        yield from _come_again(base, record, store)
    except StorageError as error:
        yield f"note: texts of withdrawn versions that come again were not looked for: {error}"


def _come_again(base: BaseVersion, record: CorpusRecord, store: EmbeddingStore) -> Iterator[str]:
    withdrawn = _withdrawn(base.folder.parents[1])
    others = (*withdrawn.values(), record)
    gone = {id(part): part for each in others for part in apart(base.record, each)[0]}
    _, coming, _ = apart(base.record, record)
    before: DigestIndex | None = None
    for name, each in withdrawn.items():
        # Of what was pruned, shards may be dropped.
        with contextlib.suppress(ArtifactError):
            # Where few rows of each shard changed, nearly all rows are in parts that differ.
            if before is None:
                before = DigestIndex(_digests(base.store, gone.values()))
            _, came, _ = apart(base.record, each)
            brought = HashTable(
                [
                    digest_keys(digests[~before.find(digests).known])
                    for _, digests in _digests(base.store, came)
                ]
            )
            again = np.zeros(len(brought), dtype=np.bool_)
            for _, digests in _digests(store, coming):
                row = brought.find(digest_keys(digests))
                again[row[row >= 0]] = True
            if again.any():
                yield (
                    f"note: {np.count_nonzero(again):,} of the "
                    f"{np.count_nonzero(brought.counts()):,} texts that version {name} brought, "
                    "which was rolled back, come again"
                )


def _withdrawn(root: Path) -> dict[str, CorpusRecord]:
    """Return the records of the versions that were rolled back, of those that can be read."""
    found = {}
    for name in withdrawn_versions(root):
        with contextlib.suppress(ArtifactError):
            version = read_version(root / VERSIONS / name)
            found[name] = corpus_record(version)
    return found


def _digests(
    store: EmbeddingStore, parts: Iterable[CorpusPart]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    return ((part.shard, store.shards.digests(part.shard)) for part in parts if part.rows)
