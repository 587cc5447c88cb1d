"""Checks of an update before it works, and before it publishes a version."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from whiten_index.artifacts.disk_space import require_space
from whiten_index.artifacts.files import exists
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    CorpusError,
    GateError,
    WhiteningError,
)
from whiten_index.options import flag_of
from whiten_index.pipeline.base_version import BaseVersion
from whiten_index.pipeline.canary_file import CanaryFile
from whiten_index.pipeline.changes import apart, part_digests
from whiten_index.pipeline.early_checks import check_early
from whiten_index.pipeline.encode import open_corpus
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.progress import Stages
from whiten_index.store.digest_index import DigestIndex, HashTable, digest_keys
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.provenance import corpus_record
from whiten_index.versions.published import (
    VERSIONS,
    read_version,
    withdrawn_facts,
)

# Room beyond what files are expected to take.
_SPARE = 1.1
_OPTION = re.compile(r"--[a-z][a-z-]*")


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Add advice for an update to errors that name an option of the build."""
    own = {flag_of(name) for name in UpdateConfig.__dataclass_fields__}
    try:
        yield
    except (ConfigError, CorpusError, WhiteningError) as error:
        if set(_OPTION.findall(str(error))) <= own:
            raise
        kind = CorpusError if isinstance(error, CorpusError) else type(error)
        raise kind(
            f"{error} (an update keeps the options that the index was built with: mend the corpus, "
            "keep the transform with --refit never, or run whiten-index build again)"
        ) from error


def open_base(
    config: UpdateConfig, stages: Stages
) -> tuple[BaseVersion, ParquetCorpus, CanaryFile | None]:
    """Open the published version, the corpus and the canary file, and check that they fit."""
    with stages.stage("open", 0):
        base = BaseVersion.open(config)
    canaries = None
    if config.canary_file is not None:
        canaries = CanaryFile.read(config.canary_file, dim=base.fitted.whitening.dim)
        if canaries.texts is not None and base.config.model is None:
            raise ConfigError(
                f"{config.canary_file} holds texts, and the index was built from an embedding "
                "column, so that nothing is known to encode them with; give their embeddings"
            )
    dim = int(base.store.encoder["dim"])
    given = None if base.config.embedding_column is None else dim
    corpus = open_corpus(base.config, stages, dim=given)
    if corpus.dim not in (None, dim):
        raise ConfigError(
            f"the corpus holds embeddings of another kind (width {corpus.dim}) than the index "
            f"(width {dim}); build a new index"
        )
    check_early(base.config, corpus)
    return base, corpus, canaries


def nothing_to_do(config: UpdateConfig, base: BaseVersion, record: CorpusRecord) -> bool:
    """Tell whether an update of this corpus would publish what is published."""
    if record.fingerprint != base.fields["corpus"]["fingerprint"] or config.choose_again:
        return False
    decided = base.update.get("decision") or {}
    if decided.get("whitening") != "keep" or config.order == "never":
        # A transform that was fitted on this very corpus comes out the same.
        return True
    return config.order == "auto" and decided.get("threshold") == config.drift_threshold


def room_wanted(base: BaseVersion, *, rows: int, stored: int | None = None) -> dict[Path, int]:
    """Return folder -> bytes that a version of so many rows is expected to take there.

    ``stored`` are bytes that the store does not have yet. Before the corpus was read they are
    unknown, and only the growth in rows counts.
    """
    had = max(base.record.rows, 1)
    index = sum(file["bytes"] for file in base.fields["files"].values()) * rows / had * _SPARE
    if base.config.budget is not None:
        # Lists are written in parts, which are then joined.
        index *= 2
    if stored is None:
        stored = int(max(rows - had, 0) * base.fields["bytes"]["raw"] / had)
    return {base.root: int(index), base.store.folder: stored}


def require_room(base: BaseVersion, *, rows: int) -> None:
    """Refuse before work what the disk has no room for."""
    require_space(room_wanted(base, rows=rows), f"a version of {rows:,} rows")


def require_not_withdrawn(
    config: UpdateConfig, record: CorpusRecord, *, identity: str | None = None
) -> None:
    """Refuse to publish a corpus that was rolled back, unless another transform is made of it.

    Raises:
        GateError: the corpus is that of a version which was rolled back.
    """
    out = Path(config.index)
    for name, facts in withdrawn_facts(out).items():
        if facts.get("corpus") != record.fingerprint:
            continue
        if config.order != "auto" and identity != facts.get("identity"):
            continue
        there = exists(out / VERSIONS / name)
        back = f"; or take that version back: whiten-index rollback {out} --to {name}"
        raise GateError(
            f"the corpus still is that of version {name}, which was rolled back, so nothing is "
            "published; mend the corpus; or, where the transform was at fault, order another with "
            f"--refit always or never{back if there else ''}"
        )


def withdrawn_texts(
    base: BaseVersion, record: CorpusRecord, store: EmbeddingStore
) -> Iterator[str]:
    """Yield a note for each withdrawn version some of whose new texts return."""
    for name in withdrawn_facts(base.root):
        # Of what was pruned, shards may be dropped.
        with contextlib.suppress(ArtifactError):
            withdrawn = corpus_record(read_version(base.root / VERSIONS / name))
            yield from _returning(base, name, withdrawn, record, store)


def _returning(
    base: BaseVersion,
    name: str,
    withdrawn: CorpusRecord,
    record: CorpusRecord,
    store: EmbeddingStore,
) -> Iterator[str]:
    """Yield a note if texts that a withdrawn version brought are new today."""
    gone, brought, _ = apart(base.record, withdrawn)
    left, coming, _ = apart(base.record, record)
    known = {id(part): part for part in gone + left}.values()
    before = DigestIndex(part_digests(base.store, known))
    texts = HashTable(
        [
            digest_keys(digests[~before.find(digests).known])
            for _, digests in part_digests(base.store, brought)
        ]
    )
    again = np.zeros(len(texts), dtype=np.bool_)
    for _, digests in part_digests(store, coming):
        row = texts.find(digest_keys(digests))
        again[row[row >= 0]] = True
    if again.any():
        total, back = np.count_nonzero(texts.counts()), np.count_nonzero(again)
        yield (
            f"note: {back:,} of the {total:,} texts that version {name} brought, which was rolled "
            "back, come again"
        )
