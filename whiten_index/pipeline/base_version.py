"""The published version that an update starts from, and the build that it came of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ArtifactError
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.fit import Fitted
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.search.query_encoder import QueryEncoder
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.provenance import corpus_record, open_store
from whiten_index.versions.published import (
    CANDIDATES,
    MOMENTS,
    WHITENING,
    Version,
    read_version,
    version_names,
    with_published,
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
        """Open the published version of an index, every checksum verified."""
        root = Path(config.index)
        source = with_published(root, Version.check)
        fields, choice = source.fields, source.fields.get("choice")
        remedy = "name it with --store DIR, or build the index again"
        store = open_store(root, fields, given=config.store, reader="an update", remedy=remedy)
        record = corpus_record(source)
        lacking = sum(store.find(shard, verify=False) is None for shard in record.shards)
        if config.store is not None and lacking:
            raise ArtifactError(
                f"the store {store.root}, named with --store, lacks {lacking} of the "
                f"{len(record.shards)} shards that version {source.name} was made of; name the "
                "store that the index was built from, or leave --store out; if it is that one, "
                "whiten-index build mends it"
            )
        fitted = Fitted(
            Moments.load(source.file(MOMENTS)),
            Whitening.load(source.file(WHITENING)),
            None if choice is None else Choice.from_json(choice),
        )
        return cls(source, store, record, fitted, _build_config(config, fields, store))

    @property
    def root(self) -> Path:
        """Folder of the index."""
        return Path(str(self.config.out))

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
        """True if rows are passages of documents."""
        return bool(self.fields["corpus"]["source"].get("passages"))

    @property
    def update(self) -> Mapping[str, Any]:
        """Facts of the update that made it, empty if a build did."""
        found: Mapping[str, Any] = self.fields.get("update") or {}
        return found

    def read_before(self, corpus: ParquetCorpus) -> CorpusRecord:
        """Return the record by which unchanged files are recognised.

        The store's own record may know later times of files with the same rows.
        """
        try:
            latest = self.store.corpus(corpus.config.source_identity())
        except ArtifactError:
            return self.record
        return latest if latest.fingerprint == self.record.fingerprint else self.record

    def known_records(self) -> list[CorpusRecord]:
        """Return its record and those of candidates, whose rows were encoded before a gate."""
        found = [self.record]
        for name in version_names(self.root, inside=CANDIDATES):
            # The rows of a damaged one are encoded again.
            with contextlib.suppress(ArtifactError):
                found.append(corpus_record(read_version(self.root / CANDIDATES / name)))
        return found


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
    given |= {
        "corpus": config.corpus or tuple(fields["corpus"]["source"]["sources"]),
        "out": config.index,
        "store": str(store.place),
        "device": config.device,
        "threads": config.threads,
        "index_device": config.index_device,
    }
    build, trust = BuildConfig(**given), config.trust_remote_code
    recorded = recorded_spec(fields["encoder"])
    if recorded is None:
        return replace(build, model=config.model, revision=None, trust_remote_code=trust)
    encoder = QueryEncoder(recorded, model=config.model, trust_remote_code=trust)
    _, _, found = encoder.resolve()
    # The encoder record alone says which model, and the update's own options what it may do.
    taken = ("model", "revision", "trust_remote_code", "local_files_only", "code_revision")
    return replace(build, **{name: getattr(found, name) for name in taken})
