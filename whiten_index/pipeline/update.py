"""The update: encode what changed, keep the transform or fit it again, publish a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.artifacts.lock import only_writer
from whiten_index.distributed.executors import SerialExecutor
from whiten_index.index.library import load_faiss, set_threads
from whiten_index.pipeline.base_version import BaseVersion
from whiten_index.pipeline.canary_file import CanaryFile
from whiten_index.pipeline.changes import Changes, apart, compare, count_documents, stored_rows
from whiten_index.pipeline.encode import EncodeReport, encode_shards
from whiten_index.pipeline.gates import require_passed, run_gates
from whiten_index.pipeline.publish import VersionSpec, register, version_folder, write_files
from whiten_index.pipeline.shard_encoding import LazyEncoder
from whiten_index.pipeline.update_checks import (
    advising,
    nothing_to_do,
    open_base,
    require_not_withdrawn,
    require_room,
    withdrawn_texts,
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
    """Result of an update.

    Attributes:
        out: the index folder.
        base: the version that was published before.
        version: the one that is published now.
        manifest: of that.
        changes: changes of the documents.
        encoded: the report of its first half.
    """

    out: Path
    base: str
    version: str
    manifest: Mapping[str, Any]
    changes: Changes
    encoded: EncodeReport

    @property
    def up_to_date(self) -> bool:
        """True if nothing was published, since nothing had changed."""
        return self.version == self.base

    @property
    def update(self) -> Mapping[str, Any]:
        """Decision, drift and base; empty if nothing was to be done."""
        return {} if self.up_to_date else dict(self.manifest["update"])

    @property
    def gates(self) -> list[Mapping[str, Any]]:
        """Findings of the gates; empty if nothing was to be done."""
        return [] if self.up_to_date else list(self.manifest["gates"])

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
            "counts": counts.to_json(),
            "files": {"read": files - counts.kept_files, "skipped": counts.kept_files},
            "drift": self.update.get("drift"),
            "decision": self.update.get("decision"),
            "gates": self.gates,
            "whitening": self.manifest["whitening"],
            "factory": self.manifest["factory"],
            "bytes": self.manifest["bytes"],
            "seconds": self.encoded.stages.seconds,
            "stage_rows": self.encoded.stages.rows,
            "created": self.manifest["created"],
        }


def update_index(config: UpdateConfig, *, progress: Progress | None = None) -> UpdateReport:
    """Bring a published index up to date with its corpus; known texts are not encoded again.

    Args:
        config: the options.
        progress: receiver of the stages.

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
    with advising(), only_writer(out, what="index"):
        tidy(out)
        base, corpus, canaries = open_base(config, stages)
        require_room(base, rows=corpus.rows)
        encoded = encode_shards(
            base.config,
            corpus,
            stages,
            executor=SerialExecutor(),
            before=None if config.read_all else base.read_before(corpus),
            known=base.known_records(),
            remember=False,
        )
        register(encoded.store, out, stages)
        changes = _compare(base, encoded)
        version = base.version
        if not nothing_to_do(config, base, encoded.record):
            require_not_withdrawn(config, encoded.record)
            for sentence in withdrawn_texts(base, encoded.record, encoded.store):
                stages.watcher.note(sentence)
            spec, facts = decide_update(config, base, encoded)
            same_corpus = encoded.record.fingerprint == base.fields["corpus"]["fingerprint"]
            if spec.reuse is None or not same_corpus:
                require_not_withdrawn(config, encoded.record, identity=spec.identity)
                facts = {"base": base.version, "rows": changes.to_json(), **facts}
                version = _publish(config, base, encoded, spec, changes, facts, canaries)
        _remember(base, encoded)
        fields = read_published(out).fields
        return UpdateReport(out, base.version, version, fields, changes, encoded)


def _compare(base: BaseVersion, encoded: EncodeReport) -> Changes:
    """Return the changes of the documents; only parts that differ are read."""
    gone, came, same = apart(base.record, encoded.record)
    rows = sum(part.rows for part in came)
    with encoded.stages.stage("compare", rows) as watcher:
        changes = compare(
            stored_rows(base.store, gone),
            stored_rows(encoded.store, came),
            same=count_documents(encoded.store, same, passages=base.passages),
            by_content=base.config.id_column is None,
        )
        watcher.advance(rows)
    return changes


def _publish(
    config: UpdateConfig,
    base: BaseVersion,
    encoded: EncodeReport,
    spec: VersionSpec,
    changes: Changes,
    facts: dict[str, Any],
    canaries: CanaryFile | None,
) -> str:
    """Make a candidate and publish it if its gates are passed; return the version.

    An update of the same base may have made it, passed its gates and died before naming it. One of
    the same corpus that was published earlier does not count: tonight's gates have not seen it,
    and its changes are those since another version.
    """
    out, record = Path(config.index), encoded.record
    version = find_version(out, spec.identity)
    if version is not None:
        made = read_version(out / VERSIONS / version).fields
        if "update" in made and made["update"]["base"] == base.version:
            set_current(out, version)
            return version
    require_room(base, rows=record.rows)
    version = next_version(out, spec.identity)
    new = new_candidate(out, version)
    with version_folder(new, record.rows, encoded.stages) as (folder, fields):
        fields |= write_files(folder, base.config, encoded, spec, version)
        changes.save(folder / CHANGES, base=base.version, whitening=facts["decision"]["whitening"])
        expected, encode = None, None
        if not base.passages:
            # Changes count documents, and the index has their passages.
            counts = changes.to_json()
            expected = base.record.rows - counts["deleted"] + counts["new"]
        if canaries is not None and canaries.texts is not None:
            encode = LazyEncoder(base.config.encoder_config())().encode_queries
        gates = run_gates(
            open_unsealed(folder, fields),
            encoded.store,
            record,
            config=config,
            stages=encoded.stages,
            base_rows=base.record.rows,
            expected_rows=expected,
            canaries=canaries,
            encode=encode,
            seed=base.config.seed,
        )
        fields |= {"update": facts, "gates": [gate.to_json() for gate in gates]}
    require_passed(gates, candidate=out / CANDIDATES / version)
    promote(out, version)
    return version


def _remember(base: BaseVersion, encoded: EncodeReport) -> None:
    """Let the store know the published corpus instead of the one before.

    Only now: a corpus that comes in another folder each night would keep its shards for ever, and
    so would one that a gate refused.
    """
    encoded.store.save_corpus(encoded.record, index=base.root)
    if dict(base.record.source) != dict(encoded.record.source):
        encoded.store.forget_corpus(base.record.source, index=base.root)
