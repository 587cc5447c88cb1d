"""The update: what changed is encoded, the transform kept or fitted again, a version published."""

from __future__ import annotations

from pathlib import Path

from whiten_index import index as faiss_index
from whiten_index.artifacts.lock import only_writer
from whiten_index.build import check_early, register
from whiten_index.changes import Changes, apart, compare, count_documents, stored_rows
from whiten_index.encode import EncodeReport, encode_shards, open_corpus
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.update.again import told_again
from whiten_index.update.base import Base
from whiten_index.update.candidate import Examination, make_candidate
from whiten_index.update.checks import (
    advising,
    canary_file,
    nothing_to_do,
    require_not_withdrawn,
    require_room,
    require_writable,
)
from whiten_index.update.config import UpdateConfig
from whiten_index.update.decide import decide_update
from whiten_index.update.report import UpdateReport


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
    faiss_index.load_faiss()
    if config.threads is not None:
        faiss_index.set_threads(config.threads)
    # Nothing is made where there is no index.
    faiss_index.read_current(out)
    with advising(config), only_writer(out, what="index"):
        faiss_index.tidy(out)
        with stages.stage("open", 0):
            base = Base.open(config)
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
        up_to_date = UpdateReport(
            out, base.version, base.version, base.fields, changes, encoded, {}, ()
        )
        if nothing_to_do(config, base, encoded.record):
            _remember(base, encoded)
            return up_to_date
        require_not_withdrawn(config, encoded.record)
        for sentence in told_again(base, encoded.record, encoded.store):
            stages.watcher.note(sentence)
        decided = decide_update(config, base, encoded, stages)
        if decided.keeps and encoded.record.fingerprint == base.fields["corpus"]["fingerprint"]:
            _remember(base, encoded)
            return up_to_date
        require_not_withdrawn(config, encoded.record, identity=decided.settled.identity)
        rows = {"rows": changes.to_json(), "ids": changes.ids_to_json()}
        facts = {"base": base.version, **rows, **decided.facts}
        version = _interrupted(out, decided.settled.identity, base)
        if version is None:
            require_room(base, rows=encoded.record.rows)
            version = faiss_index.next_version(out, decided.settled.identity)
            examine = Examination(config, base, encoded, changes, canaries, stages)
            make_candidate(version, encoded, decided, facts, examine)
            faiss_index.promote(out, version)
        else:
            faiss_index.set_current(out, version)
        _remember(base, encoded)
        fields = faiss_index.read_published(out).fields
        gates = tuple(fields.get("gates") or ())
        return UpdateReport(out, base.version, version, fields, changes, encoded, facts, gates)


def _interrupted(out: Path, identity: str, base: Base) -> str | None:
    """Return the version that an update of the same base made, passed and died before naming it.

    One of the same corpus that was published before is none: the gates of tonight have not seen it,
    and its changes are those since another version.
    """
    version = faiss_index.find_version(out, identity)
    if version is None:
        return None
    fields = faiss_index.read_version(out / faiss_index.VERSIONS / version).fields
    return version if "update" in fields and fields["update"]["base"] == base.version else None


def _remember(base: Base, encoded: EncodeReport) -> None:
    """Let the store know the corpus that is published; the one before has its record there.

    Only now: a corpus that comes in another folder each night would keep its shards for ever, and
    so would one that a gate refused.
    """
    index = Path(str(base.config.out))
    encoded.store.save_corpus(encoded.record, index=index)
    if dict(base.record.source) != dict(encoded.record.source):
        encoded.store.forget_corpus(base.record.source, index=index)


def _changes(base: Base, encoded: EncodeReport, stages: Stages) -> Changes:
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
