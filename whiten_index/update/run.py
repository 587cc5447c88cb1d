"""The update: what changed is encoded, the transform kept or fitted again, a version published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.build import check_early, register
from whiten_index.changes import Changes, apart, compare, count_documents, stored_rows
from whiten_index.encode import EncodeReport, EncoderSource, encode_shards, open_corpus
from whiten_index.errors import ConfigError, GateError
from whiten_index.gates import Base as GateBase
from whiten_index.gates import CanaryFile, Gate, require_passed, run_gates
from whiten_index.lock import only_writer
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.publish import write_version
from whiten_index.space import require_space
from whiten_index.store import CorpusRecord
from whiten_index.update.base import Base
from whiten_index.update.config import UpdateConfig
from whiten_index.update.decide import Decided, decide_update
from whiten_index.update.report import UpdateReport
from whiten_index.whitening import Refit

# Room beyond what files are expected to take.
_SPARE = 1.1


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
        OutputError: the disk is full or cannot be written.
    """
    stages, out = Stages(progress or Silent()), Path(config.index)
    faiss_index.load_faiss()
    if config.threads is not None:
        faiss_index.set_threads(config.threads)
    # Nothing is made where there is no index.
    faiss_index.read_current(out)
    with only_writer(out, what="index") as held:
        faiss_index.tidy(out)
        with stages.stage("open", 0):
            base = Base.open(config)
        canaries = _canary_file(config, base)
        corpus = open_corpus(base.config, stages)
        base.require_same_width(corpus)
        check_early(base.config, corpus)
        _require_room(base, rows=corpus.rows)
        before = None if config.read_all else base.record
        encoded = encode_shards(base.config, corpus, stages, before=before, known=base.record)
        register(encoded.store, out, stages)
        changes = _changes(base, encoded, stages)
        if nothing_to_do(config, base, encoded.record):
            return UpdateReport(
                out, base.version, base.version, base.fields, changes, encoded, {}, ()
            )
        require_not_withdrawn(out, encoded.record)
        decided = decide_update(config, base, encoded, stages)
        facts = {"base": base.version, "rows": changes.to_json(), **decided.facts}
        version = faiss_index.find_version(out, decided.settled.identity)
        if version is None:
            _require_room(base, rows=encoded.record.rows)
            version = faiss_index.next_version(out, decided.settled.identity)
            examine = _Examination(config, base, encoded, changes, canaries, stages)
            _make(version, encoded, decided, facts, examine)
            held.require()
            faiss_index.promote(out, version)
        else:
            held.require()
            faiss_index.set_current(out, version)
        if dict(base.record.source) != dict(encoded.record.source):
            # Else a corpus that comes in another folder each night would keep its shards for ever.
            encoded.store.forget_corpus(base.record.source)
        _, fields = faiss_index.read_fields(out, verify="manifest")
        gates = tuple(fields.get("gates") or ())
        return UpdateReport(out, base.version, version, fields, changes, encoded, facts, gates)


def nothing_to_do(config: UpdateConfig, base: Base, record: CorpusRecord) -> bool:
    """Tell whether the published version is what an update of this corpus would publish."""
    same = record.fingerprint == base.fields["corpus"]["fingerprint"]
    kept = (base.update.get("decision") or {}).get("whitening") == "keep"
    # A transform that was fitted on this very corpus comes out the same.
    asked = config.choose_again or (config.order is Refit.ALWAYS and kept)
    return same and not asked


def _canary_file(config: UpdateConfig, base: Base) -> CanaryFile | None:
    """Read the queries that gates ask, before hours of work rather than after them."""
    if config.canary_file is None:
        return None
    found = CanaryFile.read(config.canary_file, dim=base.fitted.whitening.dim)
    if found.needs_encoder and base.config.model is None:
        raise ConfigError(
            f"{config.canary_file} holds texts, and the index was built from an embedding column, "
            "so that nothing is known to encode them with; give their embeddings"
        )
    return found


def room_wanted(base: Base, *, rows: int) -> dict[Path, int]:
    """Return folder -> bytes that a version of so many rows is expected to take there.

    Of rows that are changed, which take as much again in the store, nothing is known yet.
    """
    sizes, had = base.fields["bytes"], max(base.record.rows, 1)
    index = (sizes["index_file"] + sizes["documents_file"]) * rows / had * _SPARE
    more = max(rows - had, 0) * sizes["raw"] / had
    return {Path(str(base.config.out)): int(index), base.store.folder: int(more)}


def _require_room(base: Base, *, rows: int) -> None:
    """Refuse before work what the disk has no room for.

    Raises:
        OutputError: it has not.
    """
    require_space(room_wanted(base, rows=rows), f"a version of {rows:,} rows")


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


def require_not_withdrawn(out: Path, record: CorpusRecord) -> None:
    """Refuse to publish once more what someone took back.

    Raises:
        GateError: the corpus is that of a version which was rolled back.
    """
    for name in faiss_index.withdrawn_versions(out):
        folder = out / faiss_index.VERSIONS / name
        if not folder.exists():
            continue
        fields = faiss_index.read_version(folder, verify="manifest")
        if fields["corpus"]["fingerprint"] == record.fingerprint:
            raise GateError(
                f"the corpus still is that of version {name}, which was rolled back, so nothing is "
                f"published; mend the corpus, or take that version back with: whiten-index "
                f"rollback {out} --to {name}",
                candidate=str(folder),
            )


class _Examination:
    """The gates of one update, and what they found."""

    def __init__(
        self,
        config: UpdateConfig,
        base: Base,
        encoded: EncodeReport,
        changes: Changes,
        canaries: CanaryFile | None,
        stages: Stages,
    ) -> None:
        self.config, self.base, self.encoded = config, base, encoded
        self.changes, self.canaries, self.stages = changes, canaries, stages
        self.gates: tuple[Gate, ...] = ()

    def __call__(self, folder: Path, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Look at a version's files before its manifest is sealed."""
        counts = self.changes.to_json()
        # With passages it is documents that are counted, and rows that the index has.
        known = not self.base.passages
        rows = GateBase(
            self.base.record.rows,
            new=counts["new"] if known else None,
            deleted=counts["deleted"] if known else None,
        )
        self.gates = run_gates(
            faiss_index.open_unsealed(folder, fields),
            self.encoded.store,
            self.encoded.record,
            config=self.config.gates(),
            stages=self.stages,
            base=rows,
            canaries=self.canaries,
            encode=self._encode,
            seed=self.base.config.seed,
        )
        return [gate.to_json() for gate in self.gates]

    @property
    def _encode(self) -> Callable[[Any], NDArray[np.floating]] | None:
        if self.canaries is None or not self.canaries.needs_encoder:
            return None
        return EncoderSource(self.base.config.encoder_config())().encode_queries


def _make(
    version: str,
    encoded: EncodeReport,
    decided: Decided,
    facts: Mapping[str, Any],
    examine: _Examination,
) -> None:
    """Write the candidate, and refuse to go on where a gate does.

    Raises:
        GateError: a gate did not pass; the candidate is kept.
    """
    config = examine.base.config

    def finish(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
        examine.changes.save(folder / faiss_index.CHANGES)
        return {"update": dict(facts), "gates": examine(folder, fields)}

    write_version(
        config,
        encoded,
        decided.settled,
        version,
        examine.stages,
        faiss_index.publish_candidate,
        finish=finish,
    )
    out = Path(str(config.out))
    require_passed(examine.gates, candidate=out / faiss_index.CANDIDATES / version)
