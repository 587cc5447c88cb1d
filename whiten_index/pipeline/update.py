"""The update: what changed is encoded, the transform kept or fitted again, a version published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.artifacts.lock import only_writer
from whiten_index.index.library import load_faiss, set_threads
from whiten_index.pipeline.base_version import BaseVersion, withdrawn_texts
from whiten_index.pipeline.canaries import CanaryFile
from whiten_index.pipeline.changes import Changes, apart, compare, count_documents, stored_rows
from whiten_index.pipeline.early_checks import check_early
from whiten_index.pipeline.encode import EncodeReport, encode_shards, open_corpus
from whiten_index.pipeline.gates import BaseCounts, require_passed, run_gates
from whiten_index.pipeline.publish import VersionSpec, register, version_folder, write_files
from whiten_index.pipeline.shard_encoding import LazyEncoder
from whiten_index.pipeline.update_checks import (
    advising,
    canary_file,
    nothing_to_do,
    require_not_withdrawn,
    require_room,
    require_writable,
)
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.pipeline.update_decision import decide_update
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.versions.bundle import open_unsealed
from whiten_index.versions.published import (
    CANDIDATES,
    CHANGES,
    VERSIONS,
    find_version,
    new_candidate,
    next_version,
    promote,
    read_current,
    read_published,
    read_version,
    set_current,
    tidy,
)


@dataclass(frozen=True, eq=False)
class UpdateReport:
    """What an update did.

    Attributes:
        out: the index folder.
        base: the version that was published before.
        version: the one that is published now.
        manifest: of that.
        changes: what became of the documents.
        encoded: the report of its first half.
        update: decision, drift and base; empty where nothing was to be done.
        gates: what was looked at before publishing.
    """

    out: Path
    base: str
    version: str
    manifest: Mapping[str, Any]
    changes: Changes
    encoded: EncodeReport
    update: Mapping[str, Any]
    gates: tuple[Mapping[str, Any], ...]

    @property
    def up_to_date(self) -> bool:
        """Whether nothing was published, since nothing had changed."""
        return self.version == self.base

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        counts, files = self.encoded.counts, len(self.encoded.record.files)
        return {
            "out": str(self.out),
            "store": str(self.encoded.store.place),
            "version": self.version,
            "base": self.base,
            "up_to_date": self.up_to_date,
            "rows": self.changes.to_json(),
            "ids": self.changes.ids_to_json(),
            "counts": counts.to_json(),
            "files": {"read": files - counts.kept_files, "skipped": counts.kept_files},
            "drift": self.update.get("drift"),
            "decision": self.update.get("decision"),
            "gates": [dict(gate) for gate in self.gates],
            "whitening": self.manifest["whitening"],
            "factory": self.manifest["factory"],
            "bytes": self.manifest["bytes"],
            "seconds": self.encoded.stages.seconds,
            "stage_rows": self.encoded.stages.rows,
            "created": self.manifest["created"],
        }


def update_index(config: UpdateConfig, *, progress: Progress | None = None) -> UpdateReport:
    """Bring a published index up to date with its corpus; what is known is not encoded again.

    Args:
        config: what is asked.
        progress: who is told of the stages.

    Raises:
        ConfigError: an option that cannot be used.
        CorpusError: the corpus or a row of it cannot be used.
        EncoderError: the model is gone, or is another one by now.
        ArtifactError: nothing is published, or it or its store is damaged.
        GateError: the new version is not published, and kept aside.
        BusyError: another process is writing the same folder.
        StorageError: the disk is full or cannot be written.
    """
    stages, out = Stages(progress or Silent()), Path(config.index)
    load_faiss()
    if config.threads is not None:
        set_threads(config.threads)
    # Nothing is made where there is no index.
    read_current(out)
    with advising(config), only_writer(out, what="index"):
        tidy(out)
        with stages.stage("open", 0):
            base = BaseVersion.open(config)
        require_writable(base)
        canaries = canary_file(config, base)
        corpus = open_corpus(base.config, stages, dim=base.column_dim)
        base.require_same_width(corpus)
        check_early(base.config, corpus)
        require_room(base, rows=corpus.rows)
        before = None if config.read_all else base.read_before(corpus)
        encoded = encode_shards(
            base.config, corpus, stages, before=before, known=base.known_records(), remember=False
        )
        register(encoded.store, out, stages)
        changes = _changes(base, encoded, stages)
        if changes.note:
            stages.watcher.note(changes.note)
        unchanged = UpdateReport(
            out, base.version, base.version, base.fields, changes, encoded, {}, ()
        )
        if nothing_to_do(config, base, encoded.record):
            _remember(base, encoded)
            return unchanged
        require_not_withdrawn(config, encoded.record)
        for sentence in withdrawn_texts(base, encoded.record, encoded.store):
            stages.watcher.note(sentence)
        spec, facts = decide_update(config, base, encoded, stages)
        same_corpus = encoded.record.fingerprint == base.fields["corpus"]["fingerprint"]
        if spec.reuse is not None and same_corpus:
            _remember(base, encoded)
            return unchanged
        require_not_withdrawn(config, encoded.record, identity=spec.identity)
        ids = changes.ids_to_json()
        facts = {"base": base.version, "rows": changes.to_json(), "ids": ids, **facts}
        version = _interrupted(out, spec.identity, base)
        if version is None:
            require_room(base, rows=encoded.record.rows)
            version = next_version(out, spec.identity)
            _make_candidate(config, base, encoded, spec, version, changes, facts, canaries, stages)
            promote(out, version)
        else:
            set_current(out, version)
        _remember(base, encoded)
        fields = read_published(out).fields
        gates = tuple(fields.get("gates") or ())
        return UpdateReport(out, base.version, version, fields, changes, encoded, facts, gates)


def _make_candidate(
    config: UpdateConfig,
    base: BaseVersion,
    encoded: EncodeReport,
    spec: VersionSpec,
    version: str,
    changes: Changes,
    facts: dict[str, Any],
    canaries: CanaryFile | None,
    stages: Stages,
) -> None:
    """Write a candidate with the findings of the gates.

    Raises:
        GateError: a gate did not pass; the candidate is kept.
    """
    out, store, record = Path(config.index), encoded.store, encoded.record
    counts = changes.to_json()
    # Changes count documents, and the index has their passages.
    new, deleted = (None, None) if base.passages else (counts["new"], counts["deleted"])
    encode = None
    if canaries is not None and canaries.needs_encoder:
        encode = LazyEncoder(base.config.encoder_config())().encode_queries
    with version_folder(new_candidate(out, version), record.rows, stages) as (folder, fields):
        fields |= write_files(folder, base.config, encoded, spec, version, stages)
        whitening = facts["decision"]["whitening"]
        changes.save(folder / CHANGES, base=base.version, whitening=whitening)
        gates = run_gates(
            open_unsealed(folder, fields),
            store,
            record,
            config=config.gates(),
            stages=stages,
            base=BaseCounts(base.record.rows, new=new, deleted=deleted),
            canaries=canaries,
            encode=encode,
            seed=base.config.seed,
        )
        fields |= {"update": facts, "gates": [gate.to_json() for gate in gates]}
    require_passed(gates, candidate=out / CANDIDATES / version)


def _interrupted(out: Path, identity: str, base: BaseVersion) -> str | None:
    """Return the version that an update of the same base made, passed and died before naming it.

    One of the same corpus that was published before is none: the gates of tonight have not seen it,
    and its changes are those since another version.
    """
    version = find_version(out, identity)
    if version is None:
        return None
    fields = read_version(out / VERSIONS / version).fields
    return version if "update" in fields and fields["update"]["base"] == base.version else None


def _remember(base: BaseVersion, encoded: EncodeReport) -> None:
    """Let the store know the corpus that is published; the one before has its record there.

    Only now: a corpus that comes in another folder each night would keep its shards for ever, and
    so would one that a gate refused.
    """
    index = Path(str(base.config.out))
    encoded.store.save_corpus(encoded.record, index=index)
    if dict(base.record.source) != dict(encoded.record.source):
        encoded.store.forget_corpus(base.record.source, index=index)


def _changes(base: BaseVersion, encoded: EncodeReport, stages: Stages) -> Changes:
    """Return what became of the documents, by a look at the parts that differ."""
    gone, came, same = apart(base.record, encoded.record)
    rows = sum(part.rows for part in came)
    with stages.stage("compare", rows) as watcher:
        changes = compare(
            stored_rows(base.store, gone),
            stored_rows(encoded.store, came),
            same=count_documents(encoded.store, same, passages=base.passages),
            by_content=base.config.id_column is None,
        )
        watcher.advance(rows)
    return changes
