"""What an update would do: rows by kind, time and bytes, found out without writing anything."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from whiten_index.artifacts.disk_space import free_bytes
from whiten_index.corpus.batches import PASSAGE
from whiten_index.corpus.sharding import Shard
from whiten_index.encoding.devices import chosen_devices
from whiten_index.pipeline.base_version import BaseVersion
from whiten_index.pipeline.changes import (
    Changes,
    apart,
    compare,
    count_documents,
    document_rows,
    stored_rows,
)
from whiten_index.pipeline.early_checks import check_early
from whiten_index.pipeline.encode import kept_parts, open_corpus
from whiten_index.pipeline.plan import calibrate
from whiten_index.pipeline.shard_encoding import ShardWork, shard_work
from whiten_index.pipeline.update_checks import (
    advising,
    canary_file,
    nothing_to_do,
    require_not_withdrawn,
    require_writable,
    room_wanted,
)
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.store.dedup import RowFinder
from whiten_index.store.records import CorpusPart, CorpusRecord

# What every update does again with all rows, besides what comes of encoding.
_AGAIN = (
    "fit",
    "train",
    "exact neighbours",
    "project and add",
    "tune",
    "diagnose",
    "publish",
    "check codes",
    "check canaries",
)


@dataclass(frozen=True)
class UpdatePlan:
    """An estimate; rows are counted, seconds and bytes expected.

    Attributes:
        base: the published version.
        rows: kind -> documents, as an update would report them.
        ids: how many ids ``changes.arrow`` would name, where these are not the documents counted.
        files: how many would be read and skipped.
        to_encode: rows that have to be encoded.
        rows_per_second: measured on a sample, None where nothing is to be encoded.
        encode_seconds: expected for that, None likewise.
        other_seconds: for all else: what it took the published version, by its rows, unless none
            is made.
        bytes: folder -> what would be written there: the version's files, and of rows and shards
            what the store does not have.
        free: folder -> what the disk there has free, None where it does not say.
        refit: ``auto``, ``always`` or ``never``: whether there is drift, the embeddings will tell.
        refused: why a gate would keep the version back, as far as rows alone tell and what they
            took before; else empty.
        up_to_date: whether nothing would be published.
    """

    base: str
    rows: Mapping[str, int]
    files: Mapping[str, int]
    to_encode: int
    rows_per_second: float | None
    encode_seconds: float | None
    other_seconds: float
    bytes: Mapping[str, int]
    free: Mapping[str, int | None]
    refit: str
    up_to_date: bool
    refused: str = ""
    ids: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return dict(vars(self))


@dataclass
class _Looked:
    """What is found out of shards that are read.

    Attributes:
        to_encode: rows of the corpus.
        stored: bytes that the store will take more.
        read: parts, and where they are in the corpus.
        missing: shards some rows of which are to be encoded.
        parts: of all that was read or kept.
        met: names of shards and of documents that are counted.
    """

    to_encode: int = 0
    stored: int = 0
    read: list[tuple[CorpusPart, Shard]] = field(default_factory=list)
    missing: list[Shard] = field(default_factory=list)
    parts: list[CorpusPart] = field(default_factory=list)
    met: set[str] = field(default_factory=set)


def plan_update(config: UpdateConfig, *, progress: Progress | None = None) -> UpdatePlan:
    """Say what an update would do, and write nothing.

    Raises:
        CorpusError: the corpus cannot be used.
        EncoderError: the model is gone, or is another one by now.
        ConfigError: the corpus holds embeddings of another width.
        ArtifactError: nothing is published, or it or its store is damaged.
        GateError: the corpus is that of a version which was rolled back.
        StorageError: the index or its store cannot be written.
    """
    with advising(config):
        return _plan(config, Stages(progress or Silent()))


def _plan(config: UpdateConfig, stages: Stages) -> UpdatePlan:
    with stages.stage("open", 0):
        base = BaseVersion.open(config)
    require_writable(base)
    canary_file(config, base)
    corpus = open_corpus(base.config, stages, dim=base.column_dim)
    base.require_same_width(corpus)
    check_early(base.config, corpus)
    work = shard_work(base.config, corpus, write=False)
    named = (shard for record in base.known_records() for shard in record.shards)
    shards = dict.fromkeys((*named, *work.store.corpus_shards()))
    work = replace(work, rows=RowFinder(work.store, tuple(shards)))
    kept = kept_parts(work, None if config.read_all else base.read_before(corpus))
    looked = _Looked()
    with stages.stage("look up rows", corpus.rows) as watcher:
        for position, shards_of in groupby(corpus.shards, key=lambda shard: shard.file):
            if position in kept:
                looked.parts += kept[position][1]
            for shard in shards_of:
                if position not in kept:
                    _look(work, shard, looked)
                watcher.advance(shard.rows)
    record = CorpusRecord(corpus.config.source_identity(), tuple(looked.parts), {})
    up_to_date = nothing_to_do(config, base, record)
    if not up_to_date:
        require_not_withdrawn(config, record)
    changes = _changes(base, work, record, looked)
    if changes.note:
        stages.watcher.note(changes.note)
    rate, loading = None, 0.0
    if looked.to_encode and base.config.embedding_column is None:
        devices = chosen_devices(base.config.encoder_config().device)
        several = len(devices) if devices[0].startswith("cuda") else 1
        began = time.perf_counter()
        rate = several * calibrate(work, looked.missing, stages)
        # Of this, an update has to load the encoder too.
        loading = time.perf_counter() - began - stages.seconds["calibrate"]
    wanted = room_wanted(base, rows=corpus.rows, stored=looked.stored)
    again = _other_seconds(base, corpus.rows)
    if up_to_date:
        # What the store has lost is made anew, and no version.
        again, wanted = 0.0, dict.fromkeys(wanted, 0) | {base.store.folder: looked.stored}
    return UpdatePlan(
        base=base.version,
        rows=changes.to_json(),
        files={"read": len(corpus.files) - len(kept), "skipped": len(kept)},
        to_encode=looked.to_encode,
        rows_per_second=rate,
        encode_seconds=None if rate is None else looked.to_encode / rate,
        other_seconds=again + sum(stages.seconds.values()) + loading,
        bytes={str(path): size for path, size in wanted.items()},
        free={str(path): free_bytes(path) for path in wanted},
        refit=config.order,
        up_to_date=up_to_date,
        refused="" if up_to_date else _refused(config, base, record.rows),
        ids=changes.ids_to_json(),
    )


def _refused(config: UpdateConfig, base: BaseVersion, rows: int) -> str:
    """Return why the gate of sizes would keep the version back, as far as rows alone tell."""
    gates, had = config.gates(), base.record.rows
    least, most = had * (1 - gates.max_shrink), had * (1 + gates.max_growth)
    if least <= rows <= most:
        size = int(sum(f["bytes"] for f in base.fields["files"].values()) * rows / max(had, 1))
        if gates.most_bytes is None or size <= gates.most_bytes:
            return ""
        return (
            f"about {size:,} bytes would be kept back by a gate; mend the corpus, or allow more "
            f"than {gates.max_bytes} with --max-bytes"
        )
    option = "--max-shrink" if rows < least else "--max-growth"
    return (
        f"{rows:,} rows after {had:,} would be kept back by a gate ({least:,.0f} to {most:,.0f} "
        f"pass); mend the corpus, or allow it with {option}"
    )


def _look(work: ShardWork, shard: Shard, looked: _Looked) -> None:
    batch = work.batch_of(shard)
    if not len(batch):
        looked.parts.append(CorpusPart("", "", 0, batch.read, 0))
        return
    digests = batch.digests()
    fingerprint = work.store.shard_fingerprint(digests, work.dtype)
    documents = work.store.document_files.name_of(batch.documents)
    if documents not in looked.met:
        looked.met.add(documents)
        looked.stored += work.store.document_files.bytes_of(documents, batch.documents)
    part = CorpusPart(fingerprint, documents, len(batch), batch.read, 0)
    looked.parts.append(part)
    looked.read.append((part, shard))
    # A shard that occurs twice is encoded once.
    if fingerprint in looked.met or work.store.find(fingerprint) is not None:
        return
    looked.met.add(fingerprint)
    assert work.rows is not None
    found = work.rows.known(work.dtype, batch).find(digests)
    looked.stored += work.bytes_of(batch, found)
    unknown = ~found.known
    if PASSAGE in batch.documents.column_names:
        begins = batch.documents[PASSAGE].to_numpy() == 0
        looked.to_encode += len(np.unique(np.cumsum(begins)[unknown]))
    else:
        looked.to_encode += int(np.count_nonzero(unknown))
    if unknown.any():
        looked.missing.append(shard)


def _changes(base: BaseVersion, work: ShardWork, record: CorpusRecord, looked: _Looked) -> Changes:
    """Compare what was read with the published version; unread parts are in both.

    Parts that differ are read once more, rather than held until all were read.
    """
    gone, came, same = apart(base.record, record)
    others = set(map(id, came))
    again = (work.batch_of(shard) for part, shard in looked.read if id(part) in others)
    return compare(
        stored_rows(base.store, gone),
        (document_rows(batch.documents, batch.digests()) for batch in again),
        same=count_documents(work.store, same, passages=base.passages),
        by_content=base.config.id_column is None,
    )


def _other_seconds(base: BaseVersion, rows: int) -> float:
    took = base.fields.get("seconds", {})
    share = rows / max(base.record.rows, 1)
    # A build has no gates, whose look at the vectors is one more projection.
    took = {"check canaries": took.get("project and add", 0.0), **took}
    return share * float(sum(seconds for stage, seconds in took.items() if stage in _AGAIN))
